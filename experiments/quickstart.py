"""How long does each solver take to bring the colours of two photographs to a given residual?

Pixel clouds of two photographs in the unit colour cube, d = 3. Time counts only where the residual, measured by the
harness, is at the target or below.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, memory_columns
from fsbench.report.tables import Unit, summary, write


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (time to residual), memory.*, and figures: time and memory against n, counts reached, anytime curves."""
    tables = summary(df, title="Time to the residual target, median")
    memory, paths = [], []
    for device, suffix, part in by_device(df):
        targets = ", ".join(f"{tol:g}" for tol in sorted(part["tol"].dropna().unique()))
        drawn = {
            "time_n": figures.scaling(part, x="n", y=TIME, title=f"Time to residual {targets} on {device}"),
            "reached": figures.counts(part, title=f"Residual {targets} reached on {device}"),
            "anytime": figures.anytime(part, title=f"Residual against time on {device}"),
        }
        for column in memory_columns(part):
            name = figures.MEMORY_NAMES[column]
            memory += summary(part, value=column, unit=Unit.BYTES, title=f"Peak memory, {name}")
            figure = figures.scaling(part, x="n", y=column, title=f"Peak memory, {name}, on {device}")
            drawn[f"{column.removesuffix('_bytes')}_n"] = figure
        for stem, figure in drawn.items():
            paths += figures.save(figure, out_dir, stem + suffix)
    return write(tables, out_dir) + write(memory, out_dir, "memory") + paths

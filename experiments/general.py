"""How do these solvers compare in time, passes and memory? The report of an experiment that has none of its own."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, memory_columns, time_words
from fsbench.report.tables import Column, Table, Unit, cells, summary, write

LOOKS = "Solvers look at their residual at different intervals, so compare time per pass as well."
_VALUES = {
    TIME: Column("time", Unit.SECONDS),
    "n_passes": Column("passes", Unit.PASSES),
    "time_per_pass_s": Column("time per pass", Unit.SECONDS),
    "residual_l1": Column("residual L1", Unit.NUMBER),
}


def report(df: pd.DataFrame, out_dir: Path, *, looks: str = LOOKS) -> list[Path]:
    """table.* (a row a cell), memory.*, figures of both against n and, where it varies, d, and counts reached.

    `looks` is the note under times to a residual.
    """
    tables: list[Table] = []
    memory: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        to_residual = part[part["mode"] == "to_residual"]
        columns = memory_columns(part)
        tables += cells(part, _VALUES, title=f"{time_words(part)}, median", notes=[looks] if len(to_residual) else [])
        titles = {TIME: f"{time_words(part)} on {device}"}
        for column in columns:
            title = f"Peak memory, {figures.MEMORY_NAMES[column]}"
            memory += summary(part, value=column, unit=Unit.BYTES, title=title)
            titles[column] = f"{title}, on {device}"
        for x in ("n", "d") if part["d"].nunique() > 1 else ("n",):
            for column, title in titles.items():
                stem = "time" if column == TIME else column.removesuffix("_bytes")
                drawn = figures.scaling(part, x=x, y=column, title=title)
                paths += figures.save(drawn, out_dir, f"{stem}_{x}{suffix}")
        if len(to_residual):
            drawn = figures.counts(to_residual, title=f"Residual target reached on {device}")
            paths += figures.save(drawn, out_dir, f"reached{suffix}")
    return write(tables, out_dir) + write(memory, out_dir, "memory") + paths

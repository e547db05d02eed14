"""Does FlashSinkhorn2 solve what the published multiscale method is known to fail on?

Clusters of 2^22 points at blurs of 3 and 10 mean spacings, where it stalls or its masks exhaust the memory; boxes of
2,000 blurs a side, in the plane and a sheet in space, beyond its limits on cells and on float32 squares of coordinates;
and both clouds 1,000 box sides away from the origin, as float32 holds them there. Residuals are of the points as given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.common import BLUR_NOTE, memory_notes, problem_cells, reached, with_counts
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, memory_columns
from fsbench.report.style import label
from fsbench.report.tables import Column, Table, Unit, write

BOX = "box side (blurs)"
_CELL = {
    TIME: Column("time", Unit.SECONDS),
    "residual_l1": Column("residual L1", Unit.NUMBER),
    "residual_solved_l1": Column("residual L1 on its rounded points", Unit.NUMBER),
    "bytes_per_point": Column("peak memory a point", Unit.BYTES),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """reached.* (counts of each solver), table.* (these, and a row a cell), a figure of the counts."""
    counts: list[Table] = []
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        memory = memory_columns(part)[0]
        part = with_counts(part)
        part = part.assign(
            bytes_per_point=part[memory] / (part["n"] + part["m"]),
            **{BOX: np.sqrt(part["cost_scale"] / part["eps"]).map(lambda side: float(f"{side:.4g}"))},
        )
        part = part.sort_values(["problem", "n", "eps"])
        counts.append(reached(part, part["problem"], device, _reasons(part)))
        notes = [f"{BLUR_NOTE} Points: of both clouds together.", *memory_notes(part, [memory])]
        tables.append(problem_cells(part, _CELL, title=f"Every cell, on {device}", notes=notes, more=[BOX]))
        drawn = figures.counts(part, title=f"Residual target reached on {device}")
        paths += figures.save(drawn, out_dir, f"reached{suffix}")
    return write([*counts, *tables], out_dir) + write(counts, out_dir, "reached") + paths


def _reasons(df: pd.DataFrame) -> list[str]:
    """What each solver that ended without an answer said, once a problem."""
    ended = df[~df["status"].isin([Status.OK, Status.NOT_CONVERGED]) & df["status_detail"].notna()]
    said = ended[["solver", "problem", "status_detail"]].itertuples(index=False, name=None)
    lines = [f"{label(solver)} on {problem}: {detail.splitlines()[0].rstrip('.')}." for solver, problem, detail in said]
    return list(dict.fromkeys(lines))

"""What is each part of FlashSinkhorn2 worth, against the published method and without it?

One part is changed at a time: coarse correction full, lite or none, mixing, masks that last or are brief, thinned or
not, the size of tiles; and the method of arXiv 2610.02395 on the same tiles, with two levels, averaged updates, a new
mask an update and a sampled check that sends it back to its cells. All are judged by the residual over all pairs of the
points as given.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import BLUR_NOTE, PASSES_NOTE, problem_cells, with_counts
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, finished, geometric_means
from fsbench.report.style import label, styles
from fsbench.report.tables import Column, Entry, Table, Unit, write

OURS = "flash_sinkhorn2"
_RATIOS = {TIME: "time", "n_passes": "passes", "kept_pairs": "kept pairs"}
_CELL = {
    TIME: Column("time", Unit.SECONDS),
    "n_passes": Column("passes", Unit.PASSES),
    "kept_pairs": Column("kept pairs a point", Unit.NUMBER),
    "screens": Column("masks chosen", Unit.EXACT),
    "coarse_returns": Column("returns to the cells", Unit.EXACT),
    "residual_l1": Column("residual L1", Unit.NUMBER),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """parts.* (what each change costs over all problems), table.* (these, and a row a cell), a figure of times."""
    parts: list[Table] = []
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        part = with_counts(part)
        parts.append(_parts(part, device))
        notes = [BLUR_NOTE, PASSES_NOTE]
        tables.append(problem_cells(part, _CELL, title=f"Every cell, on {device}", notes=notes))
        drawn = figures.bars(part, y=TIME, title=f"Time to the residual target on {device}")
        paths += figures.save(drawn, out_dir, f"time{suffix}")
    return write([*parts, *tables], out_dir) + write(parts, out_dir, "parts") + paths


def _parts(df: pd.DataFrame, device: str) -> Table:
    """A row a solver: problems reached, ratios over ours, returns to the cells, and checks that were wrong."""
    columns = [Column("solver"), Column("reached")]
    columns += [Column(f"{name} over ours", Unit.RATIO) for name in _RATIOS.values()]
    columns += [Column("returns to the cells", Unit.EXACT), Column("called converged, above the target", Unit.EXACT)]
    done = finished(df)
    ratios = {column: _over_ours(done, column) for column in _RATIOS}
    rows: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        own = df[df["solver"] == name]
        wrong = own["converged_self"].fillna(False).astype(bool) & ~own["residual_reached"].fillna(True).astype(bool)
        returns = own["coarse_returns"].dropna()
        rows.append(
            [
                label(name),
                f"{(done['solver'] == name).sum()} of {len(own)}",
                *(ratio.get(name) for ratio in ratios.values()),
                returns.sum() if len(returns) else None,
                float(wrong.sum()),
            ]
        )
    notes = [
        f"Ratios: geometric means over the problems that both this solver and {label(OURS)} brought to the target.",
        "Called converged, above the target: by the solver's own check, but not by the residual over all pairs.",
    ]
    return Table(f"What each part of FlashSinkhorn2 is worth, on {device}", columns, rows, notes)


def _over_ours(done: pd.DataFrame, column: str) -> dict[str, float]:
    values = done.pivot_table(index="group_id", columns="solver", values=column, aggfunc="last")
    if OURS not in values:
        return {}
    means, _ = geometric_means(values.div(values[OURS], axis=0))
    return {name: float(mean) for name, mean in means.dropna().items()}

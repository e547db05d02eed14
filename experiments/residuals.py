"""How many problems in three dimensions does each solver bring to a residual of 5e-3 within 120 s?

Eight families of point clouds at two sizes and two blurs, sqrt(eps), in mean spacings n^(-1/3) of the unit box. The
question of FlashSinkhorn 2 (arXiv 2610.02395), whose 32 problems are not public: these are ours, in conf/problem. The
residual is the harness's, over all pairs of the points as given.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import PUBLISHED, blur_in_spacings, reached
from experiments.general import LOOKS
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device
from fsbench.report.style import count_text, label, number_text, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

PUBLISHED_COUNTS = {"FlashSinkhorn 2": "32 of 32", "GeomLoss multiscale": "10 of 32"}
_VALUES = {
    TIME: ("Time to the residual target, median", Unit.SECONDS),
    "residual_l1": ("Residual L1 on the points as given", Unit.NUMBER),
    "residual_solved_l1": ("Residual L1 on the points as the solver rounded them", Unit.NUMBER),
    "n_passes": ("Passes over all pairs", Unit.PASSES),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """reached.* (counts of each solver), table.* (these, and time, residual and passes of every problem), a figure."""
    counts: list[Table] = []
    values: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        part = part.assign(blur=blur_in_spacings(part))
        counts.append(_reached(part, device))
        values += [_problems(part, column, f"{title}, on {device}", unit) for column, (title, unit) in _VALUES.items()]
        drawn = figures.counts(part, title=f"Residual target reached on {device}")
        paths += figures.save(drawn, out_dir, f"reached{suffix}")
    return write([*counts, *values], out_dir) + write(counts, out_dir, "reached") + paths


def _reached(df: pd.DataFrame, device: str) -> Table:
    """Counts of each size and blur."""
    sizes = df.sort_values(["n", "blur"])
    groups = [f"n = {count_text(n)}, blur {number_text(blur)}" for n, blur in sizes[["n", "blur"]].to_numpy()]
    published = ", ".join(f"{name} reached {count}" for name, count in PUBLISHED_COUNTS.items())
    notes = [f"{PUBLISHED}, on 32 problems that are not public: {published}."]
    return reached(sizes, pd.Series(groups, sizes.index, dtype=object), device, notes)


def _problems(df: pd.DataFrame, column: str, title: str, unit: Unit) -> Table:
    """A row a problem, size and blur, a column a solver."""
    solvers = list(styles(df["solver"].dropna()))
    columns = [Column("problem"), Column("n", Unit.EXACT), Column("blur (spacings)", Unit.EXACT)]
    columns += [Column(label(name), unit, "value") for name in solvers]
    records = {(record["group_id"], record["solver"]): record for _, record in df.iterrows()}
    facts = df.drop_duplicates("group_id").sort_values(["problem", "n", "blur"])
    rows: list[list[Entry]] = [
        [fact["problem"], fact["n"], fact["blur"], *(entry(records.get((group, name)), column) for name in solvers)]
        for group, fact in facts.set_index("group_id").iterrows()
    ]
    notes = [LOOKS] if column == TIME else []
    return Table(title, columns, rows, [*notes, *legend(rows)], key_columns=3)

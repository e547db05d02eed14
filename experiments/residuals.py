"""How many problems in three dimensions does each solver bring to a residual of 5e-3 within 120 s?

Eight families of point clouds at two sizes and two blurs, sqrt(eps), in mean spacings n^(-1/3) of the unit box. The
question of FlashSinkhorn 2 (arXiv 2610.02395), whose 32 problems are not public: these are ours, in conf/problem. The
residual is the harness's, over all pairs of the points as given.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import BLUR_NOTE, PUBLISHED, blur_in_spacings
from experiments.general import LOOKS
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, finished
from fsbench.report.style import MISSING, count_text, label, number_text, status_word, styles
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
    """A row a solver: how many problems of each size and blur it solved, how many as it rounded them, the others."""
    groups = sorted(set(df[["n", "blur"]].dropna().itertuples(index=False, name=None)))
    columns = [Column("solver"), *(Column(f"n = {count_text(n)}, blur {number_text(blur)}") for n, blur in groups)]
    columns += [Column("all"), Column("on its rounded points"), Column("others")]
    rows: list[list[Entry]] = []
    words: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        own = df[df["solver"] == name]
        done = finished(own)
        lost = own.drop(index=done.index)
        ends = lost.apply(status_word, axis=1).value_counts().sort_index() if len(lost) else pd.Series(dtype=int)
        counts = [f"{len(_at(done, *group))} of {len(_at(own, *group))}" for group in groups]
        rounded = own[own["residual_solved_l1"].notna()]
        in_time = rounded["status"].isin([Status.OK, Status.NOT_CONVERGED]) & rounded["status_detail"].isna()
        on_rounded = int((in_time & (rounded["residual_solved_l1"] <= rounded["tol"])).sum())
        own_points = f"{on_rounded} of {len(own)}" if len(rounded) else MISSING
        others = ", ".join(f"{number} {word}" for word, number in ends.items()) or None
        rows.append([label(name), *counts, f"{len(done)} of {len(own)}", own_points, others])
        words.append(list(ends.index))
    published = ", ".join(f"{name} reached {count}" for name, count in PUBLISHED_COUNTS.items())
    notes = [
        f"{BLUR_NOTE} Reached: in time, by the harness's residual over all pairs of the points as given.",
        "On its rounded points: by the same residual of the points as a solver rounds them, where it returns these; no"
        " claim on the problem as given.",
        f"{PUBLISHED}, on 32 problems that are not public: {published}.",
    ]
    return Table(f"Problems that reached the residual target on {device}", columns, rows, [*notes, *legend(words)])


def _at(df: pd.DataFrame, n: float, blur: float) -> pd.DataFrame:
    return df[(df["n"] == n) & (df["blur"] == blur)]


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

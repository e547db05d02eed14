"""How many problems in three dimensions does each solver bring to a residual of 5e-3 within 120 s?

Eight families of point clouds at two sizes and two blurs, sqrt(eps), in mean spacings n^(-1/3) of the unit box. The
question of FlashSinkhorn 2 (arXiv 2610.02395), whose 32 problems are not public: these are ours, in conf/problem. The
residual is the harness's, over all pairs of the points as given.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import PUBLISHED, blur_in_spacings, crossed_note, finished_as_rounded, reached
from experiments.general import LOOKS
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, finished
from fsbench.report.style import count_text, label, number_text, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

OURS = "flash_sinkhorn2"
PUBLISHED_COUNTS = {"FlashSinkhorn 2": "32 of 32", "GeomLoss multiscale": "10 of 32"}
_VALUES = {
    TIME: ("Time to the residual target, median", Unit.SECONDS),
    "residual_l1": ("Residual L1 on the points as given", Unit.NUMBER),
    "residual_solved_l1": ("Residual L1 on the points as the solver rounded them", Unit.NUMBER),
    "n_passes": ("Passes over all pairs", Unit.PASSES),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """reached.* (counts of each solver), speedups.* (of ours), table.* (counts, and time, residual and passes of every
    problem), a figure."""
    counts: list[Table] = []
    values: list[Table] = []
    speedups: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        part = part.assign(blur=blur_in_spacings(part))
        counts.append(_reached(part, device))
        values += [_problems(part, column, f"{title}, on {device}", unit) for column, (title, unit) in _VALUES.items()]
        speedups += _speedups(part, device)
        drawn = figures.counts(part, title=f"Residual target reached on {device}")
        paths += figures.save(drawn, out_dir, f"reached{suffix}")
    if speedups:
        paths += write(speedups, out_dir, "speedups")
    return write([*counts, *values], out_dir) + write(counts, out_dir, "reached") + paths


def _reached(df: pd.DataFrame, device: str) -> Table:
    """Counts of each size and blur."""
    sizes = df.sort_values(["n", "blur"])
    groups = [f"n = {count_text(n)}, blur {number_text(blur)}" for n, blur in sizes[["n", "blur"]].to_numpy()]
    published = ", ".join(f"{name} reached {count}" for name, count in PUBLISHED_COUNTS.items())
    notes = [f"{PUBLISHED}, on 32 problems that are not public: {published}."]
    return reached(sizes, pd.Series(groups, sizes.index, dtype=object), device, notes)


def _speedups(df: pd.DataFrame, device: str) -> list[Table]:
    """Every problem that another solver brought to the target, if only on its rounded points: its time over ours."""
    ours = finished(df[df["solver"] == OURS]).set_index("group_id")[TIME]
    columns, ratios = [Column("problem"), Column("n", Unit.EXACT), Column("blur (spacings)", Unit.EXACT)], {}
    for name in styles(df["solver"].dropna()):
        own = df[df["solver"] == name]
        for where, done in (("", finished(own)), (", on its rounded points", finished_as_rounded(own))):
            ratio = (done.set_index("group_id")[TIME] / ours).dropna()
            if name != OURS and len(ratio):
                ratios[OURS, name, where] = ratio
                columns.append(Column(f"{label(name)}{where} (×)", Unit.NUMBER))
    if not ratios:
        return []
    facts = df.drop_duplicates("group_id").sort_values(["problem", "n", "blur"]).set_index("group_id")
    facts = facts[[any(group in ratio for ratio in ratios.values()) for group in facts.index]]
    rows: list[list[Entry]] = [
        [fact["problem"], fact["n"], fact["blur"], *(ratio.get(group) for ratio in ratios.values())]
        for group, fact in facts.iterrows()
    ]
    rows += [[name, None, None, *(getattr(ratio, name)() for ratio in ratios.values())] for name in ("median", "min")]
    rows.append(["problems", None, None, *(str(len(ratio)) for ratio in ratios.values())])
    crossed = crossed_note(df, {(mine, name): ratio for (mine, name, _), ratio in ratios.items()})
    notes = ["Time of the other solver over that of FlashSinkhorn2, which reached the target on the points as given."]
    title = f"Speed-ups of FlashSinkhorn2 on {device}, where others reached the target"
    return [Table(title, columns, rows, [*notes, *crossed, *legend(rows)], key_columns=3)]


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

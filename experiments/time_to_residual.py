"""How long does each dense solver take to a given residual, over dimension, eps and target?

Two Gaussian clouds whose mean squared distance is one, so that eps is the fraction of it in every dimension. Time
counts only where the residual, measured by the harness on the clouds as given, is at the target or below: solvers of
different precision are then compared at equal quality.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.general import LOOKS
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, finished, speedups
from fsbench.report.style import count_text, label, number_text, status_word, styles
from fsbench.report.tables import Column, Entry, Table, Unit, cells, legend, summary, write

OURS = ("flash_sinkhorn", "flash_sinkhorn_fast")
_CELL = {
    TIME: Column("time", Unit.SECONDS),
    "n_iterations": Column("iterations", Unit.EXACT),
    "n_passes": Column("passes", Unit.PASSES),
    "time_per_pass_s": Column("time per pass", Unit.SECONDS),
    "residual_l1": Column("residual L1", Unit.NUMBER),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """speedups.* (counts reached and ratios), table.* (these, and time and passes), cells.* (a row a cell), figures."""
    ratios: list[Table] = []
    tables: list[Table] = []
    every_cell: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        ratios.append(_reached(part, device))
        ratios += [_speedups(part, ours, device) for ours in OURS if ours in set(part["solver"])]
        tables += summary(part, title="Time to the residual target, median")
        tables += summary(part, value="n_passes", unit=Unit.PASSES, title="Passes over all pairs")
        every_cell += cells(part, _CELL, title="Every cell", notes=[LOOKS])
        drawn = figures.counts(part, title=f"Residual target reached on {device}")
        paths += figures.save(drawn, out_dir, f"reached{suffix}")
        for n, at_n in part.groupby("n"):
            title = f"Time to a residual at n = {count_text(n)} on {device}"
            drawn = figures.scaling(at_n, x="tol", y=TIME, title=title)
            paths += figures.save(drawn, out_dir, f"time_tol_n{count_text(n)}{suffix}")
    tables = [*ratios, *tables]
    return write(tables, out_dir) + write(ratios, out_dir, "speedups") + write(every_cell, out_dir, "cells") + paths


def _targets(df: pd.DataFrame) -> list[float]:
    return sorted(df["tol"].dropna().unique(), reverse=True)


def _reached(df: pd.DataFrame, device: str) -> Table:
    """A row a solver: how many cells reached each target out of those planned, and how the others ended."""
    targets = _targets(df)
    columns = [Column("solver"), *(Column(f"residual {number_text(tol)}") for tol in targets), Column("others")]
    rows: list[list[Entry]] = []
    words: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        own = df[df["solver"] == name]
        done = finished(own)
        lost = own.drop(index=done.index)
        ends = lost.apply(status_word, axis=1).value_counts().sort_index() if len(lost) else pd.Series(dtype=int)
        counts = [f"{(done['tol'] == tol).sum()} of {(own['tol'] == tol).sum()}" for tol in targets]
        rows.append([label(name), *counts, ", ".join(f"{number} {word}" for word, number in ends.items()) or None])
        words.append(list(ends.index))
    return Table(f"Cells that reached their target on {device}", columns, rows, legend(words))


def _speedups(df: pd.DataFrame, ours: str, device: str) -> Table:
    """Time of each other solver over that of ours: means over the cells that both finished, for each target and all."""
    groups = df.drop_duplicates("group_id").set_index("group_id")
    ratios = speedups(df, ours).reindex(groups.index)
    done = finished(df)
    names = df["solver"].dropna().unique()
    solved = {name: set(done.loc[done["solver"] == name, "group_id"]) for name in names}
    ran = {name: set(df.loc[df["solver"] == name, "group_id"]) for name in names}
    columns = [Column("over"), Column("residual", Unit.EXACT), Column("common cells", Unit.EXACT)]
    columns += [Column(name, Unit.RATIO) for name in ("geometric mean", "median", "least")]
    columns += [Column("ours alone", Unit.EXACT), Column("other alone", Unit.EXACT)]
    targets: list[str | float] = ["all", *_targets(df)]
    rows: list[list[Entry]] = []
    for other in (name for name in styles(df["solver"].dropna()) if name not in OURS):
        for target in targets:
            chosen = groups.index if target == "all" else groups.index[groups["tol"] == target]
            both = ratios[other].reindex(chosen).dropna() if other in ratios else pd.Series(dtype=float)
            means = [np.exp(np.log(both).mean()), both.median(), both.min()] if len(both) else [None] * 3
            met = ran[ours] & ran[other] & set(chosen)
            mine, theirs = solved[ours] & met, solved[other] & met
            alone = [float(len(mine - theirs)), float(len(theirs - mine))]
            rows.append([label(other), target, float(len(both)), *means, *alone])
    notes = [
        "Time of the other solver over that of ours, at equal target, over the cells that both brought to it; alone:"
        " cells that both were given and only one brought to it.",
        LOOKS,
    ]
    return Table(f"Speed-ups of {label(ours)} on {device}", columns, rows, notes, key_columns=2)

"""What several reports share: precision groups, ratios, and notes that must stand under a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import MEMORY, finished, solver_stat
from fsbench.report.style import MISSING, label, status_word, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, significant, unmeasured

PUBLISHED = "published (A100)"
FP32, TEN_BIT = "FP32-grade", "10-bit"
_TEN_BIT_PRECISIONS = ("fast", "mixed", "tf32")  # matmul_precision of solvers that round a cloud to 10-bit mantissas


def precision(df: pd.DataFrame) -> pd.Series:
    """FP32 or TEN_BIT for each record: only solvers of one grade are compared with each other."""
    ten_bit = df["matmul_precision"].isin(_TEN_BIT_PRECISIONS)
    return ten_bit.map({True: TEN_BIT, False: FP32}).astype(object)


def throughput_note(df: pd.DataFrame) -> str:
    """Says how far from convergence a fixed-iterations comparison is."""
    iterations, residual = df["n_iterations"].dropna().unique(), df["residual_l1"].dropna()
    count = f"{iterations[0]:.0f}" if len(iterations) == 1 else "a fixed number of"
    left = f": residuals from {significant(residual.min())} to {significant(residual.max())}" if len(residual) else ""
    return f"A throughput test: {count} iterations without a stopping rule, far from convergence{left}."


def memory_notes(df: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """What each of these memory columns counts, and why some hold nothing."""
    counts = [f"Peak memory, {figures.MEMORY_NAMES[name]}: {MEMORY[name]}." for name in columns]
    return [*counts, *unmeasured(df, columns)]


def ratio_entry(ratio: float | None, theirs: pd.Series | None, ours: pd.Series | None) -> Entry:
    """A speed-up, or how the run that is missing for it ended: the other solver's first, then as "ours OOM"."""
    if ratio is not None and not pd.isna(ratio):
        return float(ratio)
    if theirs is not None and theirs["status"] != Status.OK:
        return status_word(theirs)
    return f"ours {status_word(ours)}" if ours is not None and ours["status"] != Status.OK else MISSING


def crossed_note(df: pd.DataFrame, ratios: Mapping[tuple[str, str], pd.Series]) -> list[str]:
    """A note on how many ratios, by (ours, other) and group_id, are not of one run; none if all are."""
    runs = {(record["group_id"], record["solver"]): record["run_id"] for _, record in df.iterrows()}
    crossed = sum(
        runs[group, ours] != runs[group, other]
        for (ours, other), column in ratios.items()
        for group in column.dropna().index
    )
    if not crossed:
        return []
    return [f"{crossed} of these ratios are between runs taken at different times, the rest within one run."]


NO_GPU = "not measured (no GPU)"


def counter(record: pd.Series, columns: Iterable[str]) -> Entry:
    """The sum of hardware counters, or that there is none; `counter_notes` says why."""
    values = [record[column] for column in columns]
    if not any(pd.isna(value) for value in values):
        return float(sum(values))
    return NO_GPU if record["device"] == "cpu" else "not measured"


def counter_notes(df: pd.DataFrame) -> list[str]:
    """One line for each reason why counters are missing, other than that there is no GPU."""
    details = df.loc[df["hbm_read_bytes"].isna(), "counters_detail"].dropna()
    return [f"Counters: {detail}." for detail in dict.fromkeys(details) if detail and detail != NO_GPU]


BLUR = "blur (spacings)"
BLUR_NOTE = "Blur: sqrt(eps) in mean spacings n^(-1/d) of the unit box."
PASSES_NOTE = (
    "Passes: row or column sums over the pairs that are kept, those of coarser levels as the part that their pairs are;"
    " of a dense solver over all pairs."
)


def blur_in_spacings(df: pd.DataFrame) -> pd.Series:
    """sqrt(eps) of each record in units of n^(-1/d), to three digits: eps in the records has six."""
    with np.errstate(invalid="ignore"):
        blur = np.sqrt(df["eps"] / df["cost_scale"]) * df["n"] ** (1 / df["d"])
    return blur.map(lambda value: float(f"{value:.3g}"))


def with_counts(df: pd.DataFrame) -> pd.DataFrame:
    """The records with their blur in spacings and what multiscale solvers count besides, a column each."""
    names = {"kept_pairs": "kept_pairs_per_point"} | {name: name for name in ("screens", "coarse_returns")}
    return df.assign(**{BLUR: blur_in_spacings(df)}, **{key: solver_stat(df, name) for key, name in names.items()})


def problem_cells(
    df: pd.DataFrame, values: Mapping[str, Column], *, title: str, notes: Iterable[str] = (), more: Iterable[str] = ()
) -> Table:
    """A row for each cell, by problem, d, n and blur, solvers next to each other; `values` as in `tables.cells`.

    more: columns of numbers that say what a problem is besides.
    """
    keys = {"problem": Unit.TEXT} | dict.fromkeys(("d", "n", BLUR, *more), Unit.EXACT)
    shown = [key for key in keys if key == "n" or df[key].nunique() > 1]
    columns = [*(Column(key, keys[key]) for key in shown), Column("solver"), *values.values()]
    look = list(styles(df["solver"].dropna()))
    order = df.assign(place=df["solver"].map({name: place for place, name in enumerate(look)}))
    rows: list[list[Entry]] = [
        [*(record[key] for key in shown), label(record["solver"]), *(entry(record, column) for column in values)]
        for _, record in order.sort_values([*keys, "place"]).iterrows()
    ]
    return Table(title, columns, rows, [*notes, *legend(rows)], len(shown) + 1)


def finished_as_rounded(df: pd.DataFrame) -> pd.DataFrame:
    """The cells of solvers that round points which reached the residual, in time, of the points as rounded."""
    in_time = df["status"].isin([Status.OK, Status.NOT_CONVERGED]) & df["status_detail"].isna()
    return df[in_time & (df["residual_solved_l1"] <= df["tol"])]


def reached(df: pd.DataFrame, group: pd.Series, device: str, notes: Iterable[str] = ()) -> Table:
    """A row a solver: how many problems it brought to the target, by group, how many as it rounded them, the others.

    group: what the column of each record says; columns in the order in which groups first occur.
    """
    groups = list(dict.fromkeys(group))
    columns = [Column("solver"), *map(Column, groups), Column("all"), Column("on its rounded points"), Column("others")]
    rows: list[list[Entry]] = []
    words: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        own = df[df["solver"] == name]
        done = finished(own)
        lost = own.drop(index=done.index)
        ends = lost.apply(status_word, axis=1).value_counts().sort_index() if len(lost) else pd.Series(dtype=int)
        counts = [f"{(group[done.index] == each).sum()} of {(group[own.index] == each).sum()}" for each in groups]
        own_points = f"{len(finished_as_rounded(own))} of {len(own)}" if own["residual_solved_l1"].any() else MISSING
        others = ", ".join(f"{number} {word}" for word, number in ends.items()) or None
        rows.append([label(name), *counts, f"{len(done)} of {len(own)}", own_points, others])
        words.append(list(ends.index))
    shared = [
        f"{BLUR_NOTE} Reached: in time, by the harness's residual over all pairs of the points as given.",
        "On its rounded points: by the same residual of the points as a solver rounds them, where it returns these; no"
        " claim on the problem as given.",
    ]
    title = f"Problems that reached the residual target on {device}"
    return Table(title, columns, rows, [*shared, *notes, *legend(words)])

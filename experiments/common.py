"""What several reports share: precision groups, ratios, and notes that must stand under a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import MEMORY
from fsbench.report.style import MISSING, status_word
from fsbench.report.tables import Entry, significant, unmeasured

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

"""What several reports share: precision groups, notes that must stand under a table, and figures by device."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fsbench.report import figures
from fsbench.report.analysis import MEMORY
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

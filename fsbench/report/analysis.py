"""What reports compute from records: which cells compare, ratios over them, means, fitted exponents."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd

from fsbench.api import Task
from fsbench.records import Status

TIME = "time_to_solution_s"
MEMORY = {  # column -> what it counts
    "peak_alloc_bytes": "framework allocator, inputs included",
    "peak_device_bytes": "GPU memory by NVML, above what was in use before the solve",
    "peak_host_bytes": "resident set, above what was in use before the solve",
}


def newest(df: pd.DataFrame) -> pd.DataFrame:
    """One row for each device, solver and comparison: the newest record wins, whatever code or timing made it."""
    keys = pd.DataFrame({"device": device_names(df), "solver": df["solver"], "group": df["group_id"]})
    order = df["started_at"].fillna("").argsort(kind="stable")
    keep = ~keys.iloc[order].duplicated(keep="last")
    return df[keep.reindex(df.index)]


def device_names(df: pd.DataFrame) -> pd.Series:
    """Name of the device each record was measured on: the GPU's, or the CPU model with its core count."""
    cores = df["cpu_count"].map(lambda count: "" if pd.isna(count) else f" ({count:.0f} cores)")
    cpu = df["cpu_model"].fillna("unknown CPU") + cores
    return cpu.where(df["device"] != "cuda", df["gpu_name"].fillna("unknown GPU"))


def by_device(df: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(device name, file suffix, its newest records), one for each device; the suffix is empty when there is one."""
    if df.empty:
        return [("no records", "", df)]
    df = newest(df)
    names = device_names(df)
    found = list(dict.fromkeys(names))
    suffixes = ["" if len(found) == 1 else "_" + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in found]
    return [(name, suffix, df[names == name]) for name, suffix in zip(found, suffixes, strict=True)]


def finished(df: pd.DataFrame) -> pd.DataFrame:
    """The cells that count in ratios, means and fits: status ok and a positive time."""
    return df[(df["status"] == Status.OK) & (df[TIME] > 0)]


def is_counted(status: str | None, column: str) -> bool:
    """Whether a cell's number in `column` is valid: with status ok and, unless it is the time, not converged."""
    return status == Status.OK or (status == Status.NOT_CONVERGED and column != TIME)


def counted(df: pd.DataFrame, column: str) -> pd.DataFrame:
    """The cells whose number in `column` is valid."""
    return df[df["status"].map(lambda status: is_counted(status, column)).astype(bool)]


def time_words(df: pd.DataFrame) -> str:
    """What the time of these records is, by their task and mode, as a title begins."""
    tasks = set(df["task"].dropna())
    if tasks == {Task.HVP}:
        return "Time of one Hessian-vector product"
    suffixes = {Task.FORWARD_BACKWARD: ", gradient included", Task.DIVERGENCE: " of each of three problems"}
    return _time_words(df) + (suffixes.get(Task(tasks.pop()), "") if len(tasks) == 1 else "")


def _time_words(df: pd.DataFrame) -> str:
    modes = set(df["mode"].dropna())
    if modes == {"to_residual"}:
        targets = ", ".join(f"{tol:g}" for tol in sorted(df["tol"].dropna().unique()))
        return f"Time to residual {targets}" if targets else "Time to the residual target"
    if modes == {"fixed_iterations"}:
        numbers = ", ".join(f"{count:g}" for count in sorted(df["max_iterations"].dropna().unique()))
        return f"Time of {numbers or 'a fixed number of'} iterations"
    return "Time to solution"


def memory_columns(df: pd.DataFrame) -> list[str]:
    """The memory columns that hold numbers here: allocator and NVML on a GPU, the resident set on a CPU."""
    on_gpu = (df["device"] == "cuda").any()
    wanted = ["peak_alloc_bytes", "peak_device_bytes"] if on_gpu else ["peak_host_bytes"]
    return [name for name in wanted if df[name].notna().any()] or wanted[:1]


def speedups(df: pd.DataFrame, ours: str) -> pd.DataFrame:
    """Time of each other solver over that of `ours`: rows group_id, columns solvers, NaN unless both finished."""
    times = finished(df).pivot_table(index="group_id", columns="solver", values=TIME, aggfunc="last")
    if ours not in times:
        return pd.DataFrame(index=times.index)
    return times.drop(columns=ours).div(times[ours], axis=0).dropna(how="all")


def geometric_means(ratios: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Geometric mean of each column over its own numbers, NaN without any; and how many these are."""
    return np.exp(np.log(ratios.astype(float)).mean()), ratios.notna().sum()


def solver_stat(df: pd.DataFrame, name: str) -> pd.Series:
    """A number that solvers count besides, by its name in their records; NaN where a record has none."""
    held = [json.loads(text).get(name) if isinstance(text, str) else None for text in df["solver_stats"]]
    return pd.Series(held, index=df.index, dtype="float64")


def power_fit(x: pd.Series, y: pd.Series) -> tuple[float, int] | None:
    """(exponent p, points used) of y ~ x^p by least squares on logarithms; None under two distinct positive x."""
    usable = (x > 0) & (y > 0)
    if x[usable].nunique() < 2:
        return None
    return float(np.polyfit(np.log(x[usable]), np.log(y[usable]), 1)[0]), int(usable.sum())

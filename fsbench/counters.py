"""Hardware counters of one solve through Nsight Compute, for a cell that already ended well.

Parent side: starts `ncu` on `fsbench.counters_child` and reads its table. Imports no GPU framework.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsbench.api import Cell

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
THROUGHPUT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct"
DURATION = "gpu__time_duration.sum"
METRICS = (READ, WRITE, THROUGHPUT, STALL, DURATION)  # few: each kernel is replayed for every group of them

STAGES = "fsbench stages: "  # how the child's line about its own time begins

_COLUMNS = ("hbm_read_bytes", "hbm_write_bytes", "sm_throughput_pct", "memory_stall_pct", "kernel_launches")


def measure(cell: Cell, *, timeout_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The record's counter columns for one warm solve of `cell`, in a process with `environment`, a worker's own.

    Bytes are sums over its kernels, percentages are weighted by kernel duration. counters_detail says what the tool's
    own time went into. Where nothing can be measured every column is None and counters_detail says why; this never
    raises for a missing tool, GPU or permission.
    """
    ncu = shutil.which("ncu")
    if cell.device != "cuda":
        return _nothing("not measured (no GPU)")
    if ncu is None:
        return _nothing("not measured (Nsight Compute's ncu is not on PATH)")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        began = time.monotonic()
        failure, stages = _run(_command(ncu, log, cell), timeout_s, environment or os.environ)
        took_s = time.monotonic() - began
        text = log.read_text() if log.exists() else ""
    columns = parse(text, failure)
    if stages:
        columns["counters_detail"] += f"; {took_s:.0f} s: {stages}"
    return columns


def _command(ncu: str, log: Path, cell: Cell) -> list[str]:
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS),
        "--clock-control", "none",  # locking clocks needs rights that few have
        "--cache-control", "none",  # a flush before every kernel would count traffic that a solve does not have
        "--profile-from-start", "off", "--apply-rules", "no", "--log-file", str(log),
        "--target-processes", "application-only",  # the solver is in that process; compilers that it starts are not
        sys.executable, "-m", "fsbench.counters_child", cell.to_json(),
    ]  # fmt: skip


def _run(command: list[str], timeout_s: float, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Run to the end or to the deadline: why it failed, or None, and what the child says of its stages."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment, "LC_ALL": "C"}, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:g} s", ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # ncu and the solver that it started
            process.communicate()
    if process.returncode == 0:
        return None, next((line[len(STAGES) :] for line in output.splitlines() if line.startswith(STAGES)), "")
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no message")
    return f"exit code {process.returncode}: {last}", ""


def parse(text: str, failure: str | None = None) -> dict[str, Any]:
    """The counter columns from ncu's raw page as CSV: a header, a row of units, one row a kernel.

    Lines of ncu's own (==PROF==, ==ERROR==) may stand anywhere. A metric that this GPU or version does not have
    leaves its column None.
    """
    lines = text.splitlines()
    errors = [line.partition("== ")[2] for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    kernels = [row for row in rows if (row.get("ID") or "").strip().isdigit()]  # the row of units has no ID
    if failure or not kernels:
        return _nothing(
            f"not measured ({'; '.join([*errors[:1], *([failure] if failure else [])]) or 'no kernel seen'})"
        )
    missing = [name for name in METRICS if not any(_number(row, name) is not None for row in kernels)]
    return {
        "hbm_read_bytes": _total(kernels, READ),
        "hbm_write_bytes": _total(kernels, WRITE),
        "sm_throughput_pct": _weighted_mean(kernels, THROUGHPUT),
        "memory_stall_pct": _weighted_mean(kernels, STALL),
        "kernel_launches": len(kernels),
        "counters_detail": "Nsight Compute" + (f"; not available: {', '.join(missing)}" if missing else ""),
    }


def _nothing(reason: str) -> dict[str, Any]:
    return {**dict.fromkeys(_COLUMNS), "counters_detail": reason}


def _number(row: dict[str, str], name: str) -> float | None:
    """A cell of the table; ncu writes thousands separators, and n/a, nan or nothing where it has no value."""
    try:
        value = float((row.get(name) or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _total(kernels: list[dict[str, str]], name: str) -> float | None:
    values = [value for row in kernels if (value := _number(row, name)) is not None]
    return sum(values) if len(values) == len(kernels) else None  # a sum that misses kernels would mislead


def _weighted_mean(kernels: list[dict[str, str]], name: str) -> float | None:
    pairs = [(_number(row, name), _number(row, DURATION)) for row in kernels]
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None

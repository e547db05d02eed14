"""Records: one row a measured cell, and one row an environment. JSON lines while running, Parquet after `collect`.

Units are in the column names. Missing is null: never nan, inf, 0, -1 or text.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa

from fsbench.api import Cell, FixedIterations, Task, budget_to_dict

SCHEMA_VERSION = 6
_READABLE = (1, 2, 3, 4, 5, SCHEMA_VERSION)

Record = dict[str, Any]


class Status(StrEnum):
    """How a planned cell ended. Every planned cell ends in exactly one; failure is data."""

    OK = "ok"
    NOT_CONVERGED = "not_converged"
    OOM = "oom"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


class Phase(StrEnum):
    """Where in a cell's life it was, or where it failed."""

    IMPORT = "import"
    PREPARE = "prepare"
    WARMUP = "warmup"
    TIME = "time"
    MEMORY = "memory"
    SCORE = "score"


_CURVE_POINT = pa.struct([("iteration", pa.int64()), ("seconds", pa.float64()), ("residual", pa.float64())])

_IDENTITY = [
    ("schema_version", pa.int32()),
    ("record_id", pa.string()),
    ("run_id", pa.string()),
    ("attempt", pa.int32()),
    ("cell_id", pa.string()),
    ("group_id", pa.string()),  # same for the cells that differ in the solver alone
    ("code_id", pa.string()),
    ("env_id", pa.string()),
    ("git_commit", pa.string()),  # of the run that measured this; null where the tree has no repository and names none
    ("git_dirty", pa.bool_()),
    ("experiment", pa.string()),
    ("started_at", pa.string()),  # ISO 8601, UTC
]
_WHAT = [
    ("solver", pa.string()),
    ("framework", pa.string()),
    ("solver_params", pa.string()),  # JSON, keys sorted
    ("problem", pa.string()),
    ("problem_params", pa.string()),  # JSON, keys sorted
    ("input_hash", pa.string()),  # of the clouds as given: equal for every solver of a comparison
    ("seed", pa.int64()),
    ("n", pa.int64()),
    ("m", pa.int64()),
    ("d", pa.int64()),
    ("eps", pa.float64()),
    ("cost_scale", pa.float64()),
    ("dtype", pa.string()),
    ("device", pa.string()),
    ("matmul_precision", pa.string()),
    ("task", pa.string()),  # what a timed call computes: forward, forward_backward, hvp or divergence
    ("mode", pa.string()),  # fixed_iterations or to_residual
    ("tol", pa.float64()),
    ("max_iterations", pa.int64()),
    ("timeout_s", pa.float64()),  # null: no limit
    ("timing", pa.string()),  # JSON, keys sorted
]
_OUTCOME = [
    ("status", pa.string()),
    ("status_detail", pa.string()),
    ("traceback", pa.string()),
    ("phase", pa.string()),
    ("exit_code", pa.int32()),
    ("inferred_from", pa.string()),  # record_id of the smaller cell that failed
]
_TIME = [
    (
        "first_call_s",
        pa.float64(),
    ),  # cold: import done, then prepare and the first solve, compile and autotune included
    ("time_to_solution_s", pa.float64()),  # median of samples_s
    ("time_q25_s", pa.float64()),
    ("time_q75_s", pa.float64()),
    ("samples_s", pa.list_(pa.float64())),
    ("device_time_s", pa.float64()),  # median by device events, torch only
    ("time_per_iteration_s", pa.float64()),  # slope between two budgets
    ("setup_s", pa.float64()),  # what the slope leaves at zero iterations
    ("time_per_pass_s", pa.float64()),
    ("pairs_per_s", pa.float64()),
]
_QUALITY = [
    ("n_iterations", pa.int64()),
    ("n_passes", pa.float64()),
    ("residual_l1", pa.float64()),  # max of the next two
    ("residual_row_l1", pa.float64()),
    ("residual_col_l1", pa.float64()),
    ("residual_solved_l1", pa.float64()),  # on the points as the solver rounded them, where it tells what they are
    ("residual_bound", pa.float64()),  # what a block-sparse score may have left out; 0 for all pairs
    (
        "half_step_error",
        pa.float64(),
    ),  # min over sides of max |log(marginal / weight)|: error / eps of the last half-step
    ("residual_reached", pa.bool_()),
    ("residual_self", pa.float64()),
    ("converged_self", pa.bool_()),
    ("dual_value", pa.float64()),
    ("primal_value", pa.float64()),
    ("ref_rel_err", pa.float64()),
    ("gradient_rel_err", pa.float64()),  # larger of the two clouds', against float64: see metrics_gradient.py
    ("hvp_rel_err", pa.float64()),  # of the Hessian-vector product, against float64
    ("hvp_residual_self", pa.float64()),  # of the solver's linear system, relative, as the solver says
    ("value", pa.float64()),  # Sinkhorn divergence, as the solver returned it
    ("value_rel_err", pa.float64()),  # against the float64 dual values of the solver's own potentials
    ("self_residual_l1", pa.float64()),  # larger of the divergence's two self problems'
    ("ladder", pa.string()),  # JSON list of {params, seconds, residual}: rungs tried, cheap to dear
    ("curve", pa.list_(_CURVE_POINT)),
    ("solver_stats", pa.string()),  # JSON, keys sorted: numbers by name, what else the solver counted
]
_MEMORY = [
    ("input_bytes", pa.int64()),
    ("peak_alloc_bytes", pa.int64()),  # the framework's allocator, inputs included
    ("peak_device_bytes", pa.int64()),  # NVML, above what was in use before the solve
    ("peak_host_bytes", pa.int64()),  # resident set above what was in use before the solve
]
_MACHINE = [  # while the cell was sampled
    ("sm_clock_mhz", pa.float64()),
    ("memory_clock_mhz", pa.float64()),
    ("temperature_c", pa.float64()),
    ("power_w", pa.float64()),
    ("throttle_reasons", pa.string()),
    ("energy_j", pa.float64()),  # per solve
    ("foreign_processes", pa.int32()),  # on the GPU, of others than this run; null where process numbers are hidden
    ("host_load_cpus", pa.float64()),  # CPUs that other processes kept busy
    ("hbm_read_bytes", pa.float64()),
    ("hbm_write_bytes", pa.float64()),
    ("sm_throughput_pct", pa.float64()),
    ("memory_stall_pct", pa.float64()),
    ("kernel_launches", pa.int64()),
    ("counters_detail", pa.string()),  # why the five columns above are null, or the tool that filled them
]

MEASUREMENTS = pa.schema(_IDENTITY + _WHAT + _OUTCOME + _TIME + _QUALITY + _MEMORY + _MACHINE)

ENVIRONMENTS = pa.schema(
    [
        ("env_id", pa.string()),
        ("schema_version", pa.int32()),
        ("gpu_name", pa.string()),
        ("gpu_memory_bytes", pa.int64()),
        ("driver_version", pa.string()),
        ("cuda_version", pa.string()),
        ("cpu_model", pa.string()),
        ("cpu_count", pa.int32()),
        ("host_memory_bytes", pa.int64()),
        ("os", pa.string()),
        ("python_version", pa.string()),
        ("packages", pa.string()),  # JSON: distribution -> version
        ("git_commit", pa.string()),
        ("git_dirty", pa.bool_()),
        ("lock_hash", pa.string()),
        ("variables", pa.string()),  # JSON: environment variables that change results (threads, precision, caches)
    ]
)

_ALWAYS = {
    "schema_version", "record_id", "run_id", "attempt", "cell_id", "group_id", "code_id", "env_id", "experiment",
    "started_at", "solver", "solver_params", "problem", "problem_params", "seed", "n", "m", "d", "eps", "cost_scale",
    "dtype", "device", "task", "mode", "timing", "status",
}  # fmt: skip
_MEASURED = {"framework", "input_hash", "first_call_s", "time_to_solution_s", "samples_s", "residual_l1"}
_REQUIRED: dict[Status, set[str]] = {
    Status.OK: _MEASURED,
    Status.NOT_CONVERGED: _MEASURED | {"residual_reached"},
    Status.OOM: {"status_detail"},
    Status.TIMEOUT: {"status_detail"},
    Status.UNSUPPORTED: {"status_detail"},
    Status.ERROR: {"status_detail", "phase"},
}
_NUMBERS_ONLY_WHEN_MEASURED = {"time_to_solution_s", "residual_l1", "residual_reached", "time_per_iteration_s"}


def describe(cell: Cell) -> Record:
    """The columns that say what was to be measured: all that is known of a cell before it runs."""
    copied = ("experiment", "solver", "problem", "seed", "n", "m", "d", "eps", "cost_scale", "dtype", "device")
    budget = cell.budget
    return {name: getattr(cell, name) for name in (*copied, "matmul_precision", "timeout_s", "cell_id", "group_id")} | {
        "schema_version": SCHEMA_VERSION,
        "solver_params": json.dumps(cell.solver_params, sort_keys=True),
        "problem_params": json.dumps(cell.problem_params, sort_keys=True),
        "timing": json.dumps(asdict(cell.timing), sort_keys=True),
        "task": cell.task.value,
        "mode": budget_to_dict(budget)["kind"],
        "tol": None if isinstance(budget, FixedIterations) else budget.tol,
        "max_iterations": budget.iterations if isinstance(budget, FixedIterations) else budget.max_iterations,
    }


def upgraded(record: Record) -> Record:
    """`record` in this schema, if it is of this or an older version that can be read. ValueError otherwise.

    Version 1 knew forward solves only, and no commit; version 2 no load of the host; version 3 no divergence; version 4
    no residual on rounded points; version 5 no numbers of the solver's own: those columns stay null.
    """
    version = record.get("schema_version")
    if version not in _READABLE:
        raise ValueError(
            f"records of schema version {version}; this fsbench reads versions"
            f" {', '.join(map(str, _READABLE))}: run the experiment again, or use the fsbench that wrote them"
        )
    return {"task": Task.FORWARD.value} | record | {"schema_version": SCHEMA_VERSION}


def check_record(record: Record) -> None:
    """Raise ValueError, naming column and rule, if `record` breaks the schema or the rules of its status."""
    unknown = set(record) - set(MEASUREMENTS.names)
    if unknown:
        raise ValueError(f"record has unknown columns {sorted(unknown)}")
    status = Status(record["status"])
    needed = _ALWAYS | _REQUIRED[status]
    missing = sorted(name for name in needed if record.get(name) is None)
    if missing:
        raise ValueError(f"a record with status {status} needs {missing}")
    if status not in (Status.OK, Status.NOT_CONVERGED):
        present = sorted(name for name in _NUMBERS_ONLY_WHEN_MEASURED if record.get(name) is not None)
        if present:
            raise ValueError(f"a record with status {status} must leave {present} empty")
    if record["mode"] == "to_residual" and record.get("tol") is None:
        raise ValueError("a record with mode to_residual needs tol")
    for name, value in record.items():
        if not _is_finite(value):
            raise ValueError(f"column {name} is or holds nan or inf: write null for missing")
    pa.Table.from_pylist([record], schema=MEASUREMENTS)  # types


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def append(path: Path, record: Record) -> None:
    """Append one line and make it durable before returning: a killed run keeps every finished cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
    with os.fdopen(descriptor, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size and not _ends_with_newline(file, size):
            line = "\n" + line  # a line cut off by a kill stays alone, and is dropped on reading
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _ends_with_newline(file: Any, size: int) -> bool:
    file.seek(size - 1)
    return file.read(1) == b"\n"


def read_lines(path: Path) -> list[Record]:
    """All whole records of a JSON lines file; a line cut off by a kill is dropped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def holds_a_run(path: Path) -> bool:
    """Whether `path` is a folder that a run wrote its records into."""
    return any(path.glob("measurements*.jsonl"))


def environments_in(folder: Path) -> list[Record]:
    """The environments that runs described in `folder`, those of all shards."""
    return [row for file in sorted(folder.glob("environments*.jsonl")) for row in read_lines(file)]


def latest(records: list[Record]) -> list[Record]:
    """The last record of each (cell_id, code_id, env_id), in order of first appearance."""
    last: dict[tuple[str, str, str], Record] = {}
    for record in records:
        last[record["cell_id"], record["code_id"], record["env_id"]] = record
    return list(last.values())

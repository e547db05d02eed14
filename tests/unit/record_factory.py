"""Synthetic records that keep the rules of fsbench.records: what reports and their tests are fed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fsbench.records import SCHEMA_VERSION, Record, Status, check_record

GPU = {"env_id": "gpu", "schema_version": SCHEMA_VERSION, "gpu_name": "NVIDIA H200", "cpu_model": "Some CPU"}
CPU = {"env_id": "cpu", "schema_version": SCHEMA_VERSION, "cpu_model": "Some CPU", "cpu_count": 2}

_TEN_BIT = {"flash_sinkhorn_fast": "fast", "flash_sinkhorn_pypi_tf32": "tf32"}


def record(solver: str = "keops", *, time_s: float = 0.01, status: Status = Status.OK, **columns: Any) -> Record:
    """One record that passes check_record; `columns` override the defaults."""
    what = {"problem": "gaussian", "seed": 0, "n": 1000, "m": 1000, "d": 64, "eps": 0.1, "mode": "fixed_iterations"}
    what |= {key: columns[key] for key in what if key in columns}
    if "n" in columns and "m" not in columns:
        what["m"] = columns["n"]
    group = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    made: Record = {
        "schema_version": SCHEMA_VERSION,
        "record_id": f"{solver}-{group}",
        "run_id": "run",
        "attempt": 1,
        "cell_id": f"{solver}-{group}",
        "group_id": group,
        "code_id": "code",
        "env_id": "gpu",
        "experiment": "synthetic",
        "started_at": "2026-01-01T00:00:00+00:00",
        "solver": solver,
        "solver_params": "{}",
        "problem_params": "{}",
        "cost_scale": 1.0,
        "dtype": "float32",
        "device": "cuda",
        "matmul_precision": _TEN_BIT.get(solver, "exact"),
        "task": "forward",
        "timeout_s": 600.0,
        "timing": "{}",
        "status": str(status),
        **what,
    }
    if status in (Status.OK, Status.NOT_CONVERGED):
        made |= {
            "framework": "torch",
            "input_hash": group,
            "first_call_s": 10 * time_s,
            "time_to_solution_s": time_s,
            "time_q25_s": 0.97 * time_s,
            "time_q75_s": 1.05 * time_s,
            "samples_s": [0.97 * time_s, time_s, 1.05 * time_s],
            "residual_l1": 0.004 if status is Status.OK else 0.2,
            "residual_reached": status is Status.OK,
            "half_step_error": 3e-5,
            "n_iterations": 10,
            "n_passes": 20.0,
            "peak_alloc_bytes": 50_000_000,
            "peak_device_bytes": 90_000_000,
            "peak_host_bytes": 70_000_000,
        }
    elif status is Status.ERROR:
        made |= {"status_detail": "RuntimeError: it broke", "phase": "warmup"}
    else:
        made |= {"status_detail": f"{status} in this synthetic cell"}
    made |= columns
    check_record(made)
    return made

"""What is installed, what the machine has, and which solvers run on it: each is tried on a tiny cell."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fsbench import compose
from fsbench.api import Budget, Cell, FixedIterations, Timing, ToResidual
from fsbench.env import environment
from fsbench.plan import Plan
from fsbench.records import Record, Status
from fsbench.runner import Runner

_TIMEOUT_S = 120.0  # a first compilation included
_QUICK = Timing(warmup_calls=1, warmup_seconds=0, rounds=1, min_samples=1, max_samples=1, slope=False, memory=False)


class _Quiet:
    """The table says it all."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def resumed(self, done: int) -> None:
        pass

    def measuring(self, cell: Cell) -> None:
        if self._console.is_terminal:
            self._console.print(f"trying {cell.solver} ...", end="\r")

    def ended(self, record: Record) -> None:
        pass


def examine(console: Console, config_dirs: Iterable[Path] = ()) -> None:
    """Print the machine, the packages and a row a solver: runs here, or why not and what to install."""
    config_dirs = list(config_dirs)
    found = environment()
    _show_machine(console, found)
    device = "cuda" if found["gpu_name"] else "cpu"
    solvers = [compose.load_solver(name, config_dirs) for name in sorted(compose.names("solver", config_dirs))]
    missing = {solver.name: _missing(solver.requires) for solver in solvers}
    installed = [solver for solver in solvers if not missing[solver.name]]
    records = _try([_tiny_cell(solver, device, FixedIterations(5)) for solver in installed], console)
    # A solver that cannot count iterations may still run to a residual.
    again = [solver for solver in installed if (records[solver.name] or {}).get("status") == Status.UNSUPPORTED]
    records |= _try([_tiny_cell(solver, device, ToResidual(tol=0.1, max_seconds=30)) for solver in again], console)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("solver", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("why not, and what to do", overflow="fold")
    for solver in solvers:
        table.add_row(solver.name, *_verdict(missing[solver.name], records.get(solver.name)))
    console.print(table)


def _try(cells: list[Cell], console: Console) -> dict[str, Record | None]:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            experiment="doctor", question="", report="", cells=tuple(cells), timeout_s=_TIMEOUT_S, budget_s=None,
            fail_fast=False, retries=0, out_dir=Path(folder), launcher={}, config={}, notices=(),
        )  # fmt: skip
        return {cell.solver: record for cell, record in Runner(plan, _Quiet(console)).run().rows}


def _tiny_cell(solver: compose.SolverConf, device: str, budget: Budget) -> Cell:
    problem = compose.load_problem("gaussian")
    return Cell(
        experiment="doctor", solver=solver.name, solver_target=solver.target, solver_params=solver.params,
        ladder=solver.ladder, matmul_precision=solver.matmul_precision, problem=problem.name,
        problem_target=problem.target, problem_params=problem.params, seed=0, n=64, m=64, d=3, eps=0.5, cost_scale=1.0,
        dtype="float32", device=device, budget=budget, timing=_QUICK, timeout_s=_TIMEOUT_S,
    )  # fmt: skip


def _missing(distributions: Iterable[str]) -> list[str]:
    installed = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    return [name for name in distributions if name.lower().replace("_", "-") not in installed]


def _verdict(missing: list[str], record: Record | None) -> tuple[str, str]:
    if missing:
        return "no", f"not installed: pip install {' '.join(missing)}"
    if record is None:
        return "?", "not tried: the check was interrupted"
    if record["status"] in (Status.OK, Status.NOT_CONVERGED):
        return "yes", ""
    detail = str(record["status_detail"]).split("\n")[0]
    if record["status"] == Status.UNSUPPORTED:
        return "no", detail
    return "no", f"{record['status']} in phase {record['phase']}: {detail}{_advice(record)}"


def _advice(record: Record) -> str:
    text = f"{record['status_detail']} {record['traceback']}".lower()
    if "g++" in text or "compiler" in text:
        return "; apt install g++"
    if "python.h" in text:
        return "; apt install python3-dev"
    if "no module named" in text:
        return f"; pip install {text.split('no module named')[1].split()[0].strip(chr(39)).split('.')[0]}"
    return ""


def _show_machine(console: Console, found: Record) -> None:
    gpu = f"{found['gpu_name']}, {found['gpu_memory_bytes'] / 2**30:.0f} GiB" if found["gpu_name"] else None
    rows = [
        ("GPU", gpu or "none seen by NVML: cells run on the CPU"),
        ("driver, CUDA", f"{found['driver_version']}, {found['cuda_version']}" if gpu else "-"),
        ("CPU", f"{found['cpu_model']}, {found['cpu_count']} usable"),
        ("memory", f"{found['host_memory_bytes'] / 2**30:.0f} GiB"),
        ("system", f"{found['os']}, Python {found['python_version']}"),
        ("g++ (KeOps)", shutil.which("g++") or "missing: apt install g++"),
        ("nvcc", shutil.which("nvcc") or "not on PATH"),
        ("ncu (counters)", shutil.which("ncu") or "not on PATH: counter columns stay empty"),
        ("packages", ", ".join(f"{name} {version}" for name, version in json.loads(found["packages"]).items())),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)

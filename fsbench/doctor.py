"""What is installed, what the machine has, and which solvers run on it: each is tried on a tiny cell.

Nothing is timed, so that several are tried side by side: most of the time is imports and compilation.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsbench import compose
from fsbench.api import Budget, Cell, FixedIterations, Timing, ToResidual
from fsbench.env import environment
from fsbench.plan import Plan
from fsbench.records import Record, Status
from fsbench.runner import Runner, sigterm_as_interrupt

_TIMEOUT_S = 240.0  # a first compilation beside others included
_MOST_AT_ONCE = 8
_GPU_BYTES = 2 * 2**30  # of one solver on a tiny cell: above all its context
_REDRAW_S = 0.5
_QUICK = Timing(warmup_calls=1, warmup_seconds=0, rounds=1, min_samples=1, max_samples=1, slope=False, memory=False)


class _Quiet:
    """The table says it all."""

    def resumed(self, done: int) -> None:
        pass

    def measuring(self, cell: Cell) -> None:
        pass

    def ended(self, record: Record) -> None:
        pass


def examine(console: Console, config_dirs: Iterable[Path] = ()) -> bool:
    """Print the machine, the packages and a row a solver: runs here, or why not and what to install.

    False if Ctrl-C or SIGTERM ended it; the rows of what was not tried say so.
    """
    config_dirs = list(config_dirs)
    found = environment()
    _show_machine(console, found)
    device = "cuda" if found["gpu_name"] else "cpu"
    solvers = [compose.load_solver(name, config_dirs) for name in sorted(compose.names("solver", config_dirs))]
    missing = {solver.name: _missing(solver.requires) for solver in solvers}
    installed = [solver for solver in solvers if not missing[solver.name]]
    records = _try_all(installed, device, _at_once(found), console)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("solver", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("why not, and what to do", overflow="fold")
    for solver in solvers:
        verdict = _verdict(missing[solver.name], records.get(solver.name))
        table.add_row(*(Text(cell) for cell in (solver.name, *verdict)))  # errors may hold what looks like markup
    console.print(table)
    return None not in records.values()


def _at_once(found: Record) -> int:
    """How many solvers this machine has room for: each keeps a core busy, and on a GPU takes memory."""
    room = found["gpu_memory_bytes"] // _GPU_BYTES if found["gpu_name"] else _MOST_AT_ONCE
    return max(1, min(found["cpu_count"], room, _MOST_AT_ONCE))


def _try_all(
    solvers: Sequence[compose.SolverConf], device: str, at_once: int, console: Console
) -> dict[str, Record | None]:
    """The record of each solver; None where Ctrl-C or SIGTERM came before it. A terminal shows what is running."""
    keops = Lock()  # formulas are compiled into one folder for all processes, and KeOps itself locks nothing
    futures: dict[str, Future[Record | None]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        runners = {solver.name: _runners(solver, device, Path(folder, solver.name)) for solver in solvers}
        try:
            with sigterm_as_interrupt(), console.status("") as status:
                for solver in solvers:
                    turn = keops if "pykeops" in solver.requires else Lock()
                    futures[solver.name] = pool.submit(_try, runners[solver.name], turn)
                left = set(futures.values())
                while left:
                    running = ", ".join(name for name, future in futures.items() if future.running())
                    done = len(futures) - len(left)
                    status.update(Text(f"{done} of {len(futures)} solvers tried; running: {running}"))
                    _, left = wait(left, _REDRAW_S, FIRST_COMPLETED)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for runner in itertools.chain.from_iterable(runners.values()):
                runner.interrupt()
    tried = {name: future.result() for name, future in futures.items() if not future.cancelled()}
    return dict.fromkeys(runners) | tried


def _runners(solver: compose.SolverConf, device: str, folder: Path) -> list[Runner]:
    """One a budget: a solver that cannot count iterations may still run to a residual."""
    runners = []
    for budget in (FixedIterations(5), ToResidual(tol=0.1, max_seconds=30)):
        plan = Plan(
            experiment="doctor", question="", report="", cells=(_tiny_cell(solver, device, budget),),
            timeout_s=_TIMEOUT_S, budget_s=None, fail_fast=False, retries=0, out_dir=folder / type(budget).__name__,
            launcher={}, config={}, notices=(),
        )  # fmt: skip
        runners.append(Runner(plan, _Quiet()))
    return runners


def _try(runners: Iterable[Runner], turn: Lock) -> Record | None:
    """The record of the first that its solver supports; else of the last."""
    record = None
    with turn:
        for runner in runners:
            ((_, record),) = runner.run().rows
            if record is None or record["status"] != Status.UNSUPPORTED:
                break
    return record


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
    if record["exit_code"] is not None:  # the end of its log says nothing of why
        return ""
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

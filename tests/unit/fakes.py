"""Plans of fake cells, and a worker whose measurement behaves as solver_params say. Real processes, no solver.

`python fakes.py worker ...` is the worker; `python fakes.py run PLAN.pickle` runs a plan in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fsbench import cell as cell_module
from fsbench import process, worker
from fsbench.api import Cell, FixedIterations, Timing, Unsupported
from fsbench.plan import Plan
from fsbench.progress import RunProgress, make_console
from fsbench.records import Phase, Record, read_lines
from fsbench.runner import Outcome, Runner

WORKER = (sys.executable, __file__, "worker")
FAR = 3600.0
GRACE_S = 5.0  # after a deadline: to kill, on a busy machine
_poisoned = False


def fake_cell(
    solver: str, n: int = 10, *, d: int = 3, timeout_s: float | None = 60.0, rounds: int = 2, **params
) -> Cell:
    return Cell(
        experiment="fake", solver=solver, solver_target="nowhere.Fake", solver_params={"name": solver, **params},
        ladder=(), matmul_precision="native", problem="fake", problem_target="nowhere.fake", problem_params={}, seed=0,
        n=n, m=n, d=d, eps=0.1, cost_scale=1.0, dtype="float32", device="cpu", budget=FixedIterations(1),
        timing=Timing(rounds=rounds), timeout_s=timeout_s,
    )  # fmt: skip


def fake_plan(out_dir: Path, *cells: Cell, **settings: Any) -> Plan:
    defaults: dict[str, Any] = {
        "experiment": "fake", "question": "", "report": "", "timeout_s": None, "budget_s": None, "fail_fast": False,
        "retries": 0, "redo": False, "launcher": {"kind": "local"}, "config": {"experiment": "fake"}, "notices": (),
    }  # fmt: skip
    return Plan(cells=cells, out_dir=out_dir, **(defaults | settings))


class Heard:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.done_before = 0
        self.records: list[Record] = []
        self.at: list[float] = []

    def resumed(self, done: int) -> None:
        self.done_before = done

    def measuring(self, cell: Cell) -> None:
        pass

    def ended(self, record: Record) -> None:
        self.records.append(record)
        self.at.append(time.monotonic())


def run(plan: Plan, heard: Heard | None = None) -> Outcome:
    return Runner(plan, heard or Heard()).run()


def run_elsewhere(plan: Plan, **settings: Any) -> subprocess.Popen:
    """The plan in a process of its own, to be killed."""
    plan.out_dir.mkdir(parents=True, exist_ok=True)
    path = plan.out_dir / "plan.pickle"
    path.write_bytes(pickle.dumps(plan))
    command = [sys.executable, __file__, "run", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)


def statuses(outcome: Outcome) -> list[str]:
    return ["not run" if record is None else str(record["status"]) for _, record in outcome.rows]


def written(out: Path) -> list[Record]:
    return read_lines(out / "fake" / "measurements.jsonl")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class FakeMeasurement:
    """Ends as solver_params["do"] says, in `start` (or "op") of the cell whose n is "at" (or of all)."""

    phase = Phase.IMPORT

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.params = cell.solver_params
        self._calls: dict[str, int] = {}

    def start(self) -> None:
        self.phase = Phase.WARMUP
        self._reached("start")

    def sample(self) -> None:
        self.phase = Phase.TIME
        self._reached("sample")
        self.sampled(float(self.params.get("seconds", 0.01)))

    def sampled(self, seconds: float) -> None:
        pass

    def finish(self) -> Record:
        self.phase = Phase.SCORE
        self._reached("finish")
        do = self.params.get("do")
        residual = float("nan") if do == "nan" else 1e-3
        seconds = float("inf") if do == "nan_samples" else 0.01
        return {
            "status": "ok", "framework": "torch", "input_hash": "same", "first_call_s": 0.1,
            "time_to_solution_s": 0.01, "samples_s": [0.01, seconds], "residual_l1": residual, "phase": "score",
        }  # fmt: skip

    def _reached(self, op: str) -> None:
        if trace := self.params.get("trace"):
            with open(trace, "a") as file:
                file.write(f"{os.getpid()} {self.cell.solver} {self.cell.n} {op}\n")
        self._calls[op] = self._calls.get(op, 0) + 1
        here = op == self.params.get("op", "start") and self.cell.n in self.params.get("at", [self.cell.n])
        if here and self._calls[op] >= self.params.get("from_call", 1):
            getattr(self, f"_{self.params.get('do', 'ok')}")()

    def _ok(self) -> None:
        if _poisoned:
            raise RuntimeError("an earlier cell broke this process")

    def _nan(self) -> None:
        pass

    _nan_samples = _nan

    def _raise(self) -> None:
        raise RuntimeError("deliberate failure [/b] [link]")

    def _poison(self) -> None:
        global _poisoned
        _poisoned = True
        raise RuntimeError("device-side assert")

    def _missing(self) -> None:
        raise ModuleNotFoundError("No module named 'not_installed'")

    def _memory(self) -> None:
        raise MemoryError("cannot allocate")

    def _memory_if_crowded(self) -> None:
        if any(Path(self.params["others"]).iterdir()):
            raise MemoryError("no room beside the others")

    def _occupy(self) -> None:
        (Path(self.params["others"]) / str(os.getpid())).touch()

    def _unsupported(self) -> None:
        raise Unsupported("d <= 3 only")

    def _once(self) -> None:
        marker = Path(self.params["marker"])
        if not marker.exists():
            marker.touch()
            raise RuntimeError("only the first time")

    def _sleep(self) -> None:
        time.sleep(self.params.get("seconds", FAR))

    def _wait_for(self) -> None:
        while not Path(self.params["gate"]).exists():
            time.sleep(0.02)

    def _show_environment(self) -> None:
        print([os.environ.get(name) for name in self.params["names"]])

    def _abort(self) -> None:
        print("about to abort", file=sys.stderr)
        os.abort()

    def _segfault(self) -> None:
        ctypes.string_at(0)

    def _exit(self) -> None:
        os._exit(3)

    def _killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _masked(self) -> None:
        """A native call that holds the interpreter, all signals masked: nothing inside can stop it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        ctypes.PyDLL(None).sleep(int(FAR))

    def _leak(self) -> None:
        self._spawn(start_new_session=False)
        time.sleep(FAR)

    def _leak_session(self) -> None:
        self._spawn(start_new_session=True)
        time.sleep(FAR)

    def _leak_and_die(self) -> None:
        if os.fork() == 0:  # holds every descriptor of the worker open, its end of the pipe included
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._note(os.getpid())
            time.sleep(FAR)
        time.sleep(0.2)
        os._exit(7)

    def _noise(self) -> None:
        print('{"record": {"status": "ok"}}' * 1000, flush=True)
        os.write(1, b"\xff\xfe raw bytes\n" * 1000)
        os.write(2, b"warning " * 20_000)

    def _spawn(self, *, start_new_session: bool) -> None:
        code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({FAR})"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=start_new_session)
        self._note(child.pid)

    def _note(self, pid: int) -> None:
        Path(self.params["pid_file"]).write_text(str(pid))


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "worker":
        cell_module.Measurement = FakeMeasurement  # type: ignore[misc, assignment]
        worker.main(arguments)
    else:
        process.WORKER = WORKER
        plan = pickle.loads(Path(arguments[0]).read_bytes())
        with RunProgress(make_console(), len(plan.cells)) as progress:
            outcome = Runner(plan, progress).run()
        print(outcome.stopped or "complete")
        print(*("not run" if record is None else record["status"] for _, record in outcome.rows))
        sys.exit(outcome.exit_code)

"""The parent: hands cells to workers, holds every deadline, and writes exactly one record a cell and attempt.

The cells of one comparison run side by side: each is started in its solver's worker, sampled once and finished, and
then sampled in turn, round by round, so that a drift of the machine meets all of them alike. What a cell had after its
first round is kept in a file of its own until the last: a run that is killed loses the rest, and no cell.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import os
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

from fsbench import counters, records
from fsbench.api import Cell
from fsbench.cell_failure import without_folders
from fsbench.compose import ConfigError
from fsbench.env import code_id, environment, has_gpu
from fsbench.history import History
from fsbench.plan import Plan
from fsbench.process import DeadlineReached, WorkerDied, WorkerProcess, close_all, worker_environment
from fsbench.records import Phase, Record, Status

_COUNTERS_S = 600.0  # where the cell has no limit
_GOOD = (Status.OK, Status.NOT_CONVERGED)


class Progress(Protocol):
    """Where a run tells how it goes."""

    def resumed(self, done: int) -> None: ...
    def measuring(self, cell: Cell) -> None: ...
    def ended(self, record: Record) -> None: ...


class StopReason(StrEnum):
    """Why a run ended before its last cell."""

    BUDGET = "the run's budget_s is used up"
    FAIL_FAST = "fail_fast is on and a cell ended in error"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """One row a planned cell: its latest record, or None where it has not run."""

    rows: tuple[tuple[Cell, Record | None], ...]
    stopped: str | None
    exit_code: int


class _Stop(Exception):
    """Ends the loop over comparisons; its text is the reason."""


@dataclass
class _Running:
    """A cell in a worker's hands. Its deadline is on the sum of the time its operations took."""

    cell: Cell
    worker: WorkerProcess
    identity: Record
    spent_s: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)

    def ask(self, op: str, **extra: Any) -> dict[str, Any] | None:
        """Carry out one operation: None if the cell goes on, else the columns of its record."""
        limit = self.cell.timeout_s
        began = time.monotonic()
        try:
            left = None if limit is None else max(0.0, limit - self.spent_s)
            return self.worker.request({"op": op, **extra}, left).get("record")
        except DeadlineReached:
            detail = f"limit of {limit:g} s reached in phase {self.worker.phase}"
            samples = {"samples_s": self.worker.samples_s or None}
            return {"status": Status.TIMEOUT, "status_detail": detail, "phase": self.worker.phase, **samples}
        except WorkerDied as death:
            return _describe_death(death, self.worker.phase)
        finally:
            self.spent_s += time.monotonic() - began


class Runner:
    """Runs a plan once. Resumes from the records that are in the plan's folder.

    `shard` names this run's files where several runs share the folder, each with its part of the plan.
    """

    def __init__(self, plan: Plan, progress: Progress, *, shard: str = "") -> None:
        self.plan = plan
        self.folder = plan.folder
        self._suffix = f"-{shard}" if shard else ""
        self.path = self.folder / f"measurements{self._suffix}.jsonl"
        self._unfinished = self.folder / f"measurements{self._suffix}-unfinished.jsonl"  # sorted before the finished
        self.progress = progress
        self._run_id = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        self._workers: dict[str, WorkerProcess] = {}
        self._env_id = ""
        self._commit: dict[str, Any] = {}
        self._interrupted = False
        self._history: History

    def run(self) -> Outcome:
        """Measure every cell that is not done. Ctrl-C and SIGTERM end it cleanly, workers killed; so does `interrupt`.

        Raises ConfigError if another run holds the folder, or if the plan needs a GPU and there is none.
        """
        if any(cell.device == "cuda" for cell in self.plan.cells) and not has_gpu():
            raise ConfigError("device=cuda, but NVML sees no GPU here: use device=cpu or device=auto")
        stopped, exit_code = None, 0
        with _locked(self.plan.out_dir, self._suffix), sigterm_as_interrupt():
            self._write_surroundings()
            self._keep_unfinished()
            self._history = History(self.folder, self.plan.cells, self._env_id)
            try:
                self._run_all()
            except _Stop as stop:
                stopped = str(stop)
            except KeyboardInterrupt:
                stopped, exit_code = StopReason.INTERRUPTED, 130
                self._kill_workers()
            finally:
                self._close_workers()
                for record in self._keep_unfinished():
                    self._history.add(record)
        rows = tuple((cell, self._history.latest(cell)) for cell in self.plan.cells)
        failed = any(record is not None and record["status"] == Status.ERROR for _, record in rows)
        return Outcome(rows, stopped, exit_code or int(failed))

    def interrupt(self) -> None:
        """From another thread, end `run` as Ctrl-C ends it in the main one: that alone is told of signals."""
        self._interrupted = True
        for worker in tuple(self._workers.values()):
            worker.abort()

    def _heed_interrupt(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def _run_all(self) -> None:
        self._began = time.monotonic()
        self.progress.resumed(sum(map(self._is_done, self.plan.cells)))
        for _, group in itertools.groupby(self.plan.cells, key=lambda cell: cell.group_id):
            todo = [cell for cell in group if not self._is_done(cell)]
            crowded = self._measure(todo)
            if self._out_of_budget() and any(self._history.latest(cell) is None for cell in self.plan.cells):
                raise _Stop(StopReason.BUDGET)
            for cell in crowded:
                # Out of memory beside other solvers says little: ask again with the machine to itself.
                self._close_workers()
                self._measure([cell])
            for _ in range(self.plan.retries):
                for cell in todo:
                    latest = self._history.latest(cell)
                    if latest and latest["status"] in (Status.ERROR, Status.TIMEOUT) and not latest["inferred_from"]:
                        self._measure([cell])

    def _is_done(self, cell: Cell) -> bool:
        latest = self._history.latest(cell)
        if self.plan.redo and latest is not None and latest["run_id"] != self._run_id:
            return False
        return self._history.is_done(cell)

    def _out_of_budget(self) -> bool:
        return self.plan.budget_s is not None and time.monotonic() - self._began >= self.plan.budget_s

    def _measure(self, cells: Sequence[Cell]) -> list[Cell]:
        """One comparison, interleaved. Returns the cells to be measured again alone."""
        running: list[_Running] = []
        crowded: list[Cell] = []

        def step(run: _Running, op: str, **extra: Any) -> bool:
            """Whether the cell goes on; if not, it is recorded."""
            self.progress.measuring(run.cell)
            self._heed_interrupt()
            ended = run.ask(op, **extra)
            self._heed_interrupt()
            if ended is None:
                return True
            if ended["status"] in _GOOD:
                if run.cell.timing.counters and not run.counters:
                    run.counters = _counters(run.cell)
                ended |= run.counters
            else:
                run.worker.kill()
                del self._workers[run.cell.solver]
            if ended["status"] == Status.OOM and self._workers:
                crowded.append(run.cell)
            elif extra.get("more_rounds") and ended["status"] in _GOOD:
                records.append(self._unfinished, _checked(run.identity, ended))
                return True
            else:
                self._record(_checked(run.identity, ended))
            return False

        rounds = cells[0].timing.rounds if cells else 0
        self._start_workers([cell for cell in cells if self._history.smaller_failure(cell) is None])
        for index, cell in enumerate(cells):
            if index and self._out_of_budget():
                break
            smaller = self._history.smaller_failure(cell)
            if smaller is not None:
                self._record(_checked(self._identity(cell), _inferred(smaller)))
                continue
            run = _Running(cell, self._worker(cell), self._identity(cell))
            started = step(run, "start", cell=cell.to_json()) and step(run, "sample")
            if started and step(run, "finish", more_rounds=rounds > 1):
                running.append(run)
        for _ in range(rounds - 1):
            if self._out_of_budget():
                break
            running = [run for run in running if step(run, "sample")]
        for run in running:
            step(run, "finish", more_rounds=False)
        self._unfinished.unlink(missing_ok=True)
        return crowded

    def _start_workers(self, cells: Sequence[Cell]) -> None:
        """Start the workers that are missing side by side: importing a framework takes seconds."""
        missing = [cell for cell in cells if cell.solver not in self._workers]
        if len(missing) == 1:
            return  # its start imports as fast
        for cell in missing:
            self._worker(cell).post({"op": "import", "cell": cell.to_json()})
        for cell in missing:
            try:
                self._workers[cell.solver].answer(cell.timeout_s)
            except (DeadlineReached, WorkerDied):  # a new one will say so again at the cell's start, for the record
                del self._workers[cell.solver]

    def _worker(self, cell: Cell) -> WorkerProcess:
        worker = self._workers.get(cell.solver)
        if worker is None:
            worker = WorkerProcess(self.folder / "logs" / f"{cell.solver}{self._suffix}.log", cell.device)
            self._workers[cell.solver] = worker
        worker.begin_cell()
        return worker

    def _identity(self, cell: Cell) -> Record:
        """The columns of a record that say what it is of; of a cell that starts now."""
        return records.describe(cell) | {
            "record_id": uuid.uuid4().hex,
            "run_id": self._run_id,
            "attempt": self._history.next_attempt(cell),
            "code_id": code_id(cell.solver_target, cell.problem_target),
            "env_id": self._env_id,
            **self._commit,
            "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        }

    def _record(self, record: Record) -> None:
        """Write the record of a cell, durably, as soon as it is known."""
        records.append(self.path, record)
        self._history.add(record)
        self.progress.ended(record)
        if record["status"] == Status.ERROR and self.plan.fail_fast:
            raise _Stop(StopReason.FAIL_FAST)

    def _keep_unfinished(self) -> list[Record]:
        """Records that an ended run left behind after a cell's first round stand as they are; returns these."""
        finished = {record["record_id"] for record in records.read_lines(self.path)}
        kept = [record for record in records.read_lines(self._unfinished) if record["record_id"] not in finished]
        for record in kept:
            records.append(self.path, record)
        self._unfinished.unlink(missing_ok=True)
        return kept

    def _write_surroundings(self) -> None:
        """The environment, once, and the effective configuration of this run."""
        row = environment()
        self._env_id = row["env_id"]
        self._commit = {name: row[name] for name in ("git_commit", "git_dirty")}
        path = self.folder / f"environments{self._suffix}.jsonl"
        if all(known["env_id"] != self._env_id for known in records.read_lines(path)):
            records.append(path, row)
        config = self.folder / "runs" / f"{self._run_id}.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump(self.plan.config, sort_keys=False))

    def _close_workers(self) -> None:
        close_all(self._workers.values())
        self._workers.clear()

    def _kill_workers(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()


def _counters(cell: Cell) -> dict[str, Any]:
    """Counter columns, from a process of their own: profiling must not touch the worker that is timed."""
    limit_s = _COUNTERS_S if cell.timeout_s is None else cell.timeout_s
    return counters.measure(cell, timeout_s=limit_s, environment=worker_environment(cell.device))


def _checked(identity: Record, measured: dict[str, Any]) -> Record:
    """The whole record; one of an error if the measurement breaks a record's rules."""
    record = _complete(identity | measured)
    try:
        records.check_record(record)
    except (ValueError, TypeError, KeyError) as error:
        detail = f"the measurement broke the record's rules: {error}"
        return _complete(identity | {"status": Status.ERROR, "status_detail": detail, "phase": Phase.SCORE})
    return record


def _complete(record: Record) -> Record:
    return dict.fromkeys(records.MEASUREMENTS.names) | record


def _inferred(smaller: Record) -> dict[str, Any]:
    size = ", ".join(f"{axis}={smaller[axis]}" for axis in ("n", "m", "d"))
    return {
        "status": smaller["status"],
        "status_detail": f"not run: {smaller['status']} already at {size}",
        "inferred_from": smaller["inferred_from"] or smaller["record_id"],
    }


def _describe_death(death: WorkerDied, phase: Phase) -> dict[str, Any]:
    log = without_folders(death.log_tail) or None
    columns: dict[str, Any] = {"phase": phase, "exit_code": death.exit_code, "traceback": log}
    if death.oom_killed:
        return columns | {"status": Status.OOM, "status_detail": "killed by the kernel's out-of-memory killer"}
    if death.exit_code >= 0:
        detail = f"worker ended with exit code {death.exit_code}"
    else:
        number = -death.exit_code
        name = signal.Signals(number).name if number in signal.valid_signals() else "unknown"
        detail = f"worker killed by signal {number} ({name})"
        if number == signal.SIGKILL:
            detail += "; the kernel reported no out-of-memory kill"
    return columns | {"status": Status.ERROR, "status_detail": detail}


@contextlib.contextmanager
def _locked(folder: Path, suffix: str) -> Iterator[None]:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends."""
    path = folder / f".lock{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise ConfigError(f"cannot write to out_dir {folder}: {error.strerror}") from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"another run (process {holder}) uses {folder}: wait for it or give out_dir=..."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """While the block runs, SIGTERM ends it as Ctrl-C does. In the main thread; others are told of neither."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

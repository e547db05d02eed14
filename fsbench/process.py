"""A worker process seen from the parent: start it, ask it with a deadline, kill it with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from fsbench.compose import ROOT
from fsbench.records import Phase

WORKER = (sys.executable, "-m", "fsbench.worker")
_LOG_TAIL_LINES = 12
_LOG_LINE_CHARACTERS = 500
_CLOSE_S = 5.0
_LOOK_S = 0.5  # between looks at a silent worker


class DeadlineReached(Exception):
    """The worker did not answer in time. It has been killed."""


class WorkerDied(Exception):
    """The worker ended without an answer. exit_code is negative for a signal, as subprocess has it."""

    def __init__(self, exit_code: int, oom_killed: bool, log_tail: str) -> None:
        super().__init__(f"worker ended with exit code {exit_code}")
        self.exit_code = exit_code
        self.oom_killed = oom_killed
        self.log_tail = log_tail


class WorkerProcess:
    """One worker in a session of its own. `phase` is the last that it reported."""

    def __init__(self, log_path: Path, device: str) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        self.phase = Phase.IMPORT
        self.samples_s: list[float] = []
        self._log_offset = log_path.stat().st_size if log_path.exists() else 0
        self._oom_kills = 0
        self._buffer = b""
        child_in, self._requests = os.pipe()
        self._replies, child_out = os.pipe()
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*WORKER, str(child_in), str(child_out), str(os.getpid())],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(child_in, child_out),
                    start_new_session=True, env=worker_environment(device),
                )  # fmt: skip
        finally:
            os.close(child_in)
            os.close(child_out)
        self._ending = threading.Lock()
        self._gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin_cell(self) -> None:
        """What is logged and sampled from here on belongs to the next cell."""
        self._log_offset = self.log_path.stat().st_size
        self.phase = Phase.IMPORT
        self.samples_s = []

    def request(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """The worker's answer. Raises DeadlineReached or WorkerDied; then nothing of the worker is left."""
        self.post(message)
        return self.answer(timeout_s)

    def post(self, message: dict[str, Any]) -> None:
        """Ask, to wait for the answer later. A worker that is no more shows when it is waited for."""
        self._oom_kills = oom_kills()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(message).encode() + b"\n")

    def answer(self, timeout_s: float | None) -> dict[str, Any]:
        """Wait for the answer to what was posted. Raises as `request` does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                answer = self._next_line(deadline)
                if "phase" in answer:
                    self.phase = Phase(answer["phase"])
                elif "sample_s" in answer:
                    self.samples_s.append(answer["sample_s"])
                else:
                    return answer
        except DeadlineReached:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL the whole session, and children that left it. Safe to call twice."""
        with self._ending:  # until then nobody waits for the process: its id cannot be anybody else's
            if self._gone:
                return
            self._gone = True
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # before wait(): until then the id cannot be anybody else's
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when that call returns
            self._process.wait(timeout=_CLOSE_S)
        for descriptor in (self._requests, self._replies):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = -1

    def abort(self) -> None:
        """SIGKILL the session, from any thread: the one that waits for its answer sees it dead, and clears up."""
        with self._ending:
            if not self._gone:
                os.killpg(self.pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Close the pipe of requests: an idle worker ends by itself."""
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the process ends in that time. It stays a zombie, so that its id stays its own until `kill`."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.01)
                    continue
            return True

    def _next_line(self, deadline: float | None) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left_s <= 0:
                raise DeadlineReached
            if poll.poll(left_s * 1000):
                chunk = os.read(self._replies, 1 << 20)
                self._buffer += chunk
                if not chunk:
                    self._raise_death()
            elif self.has_ended() and not poll.poll(0):  # a child that it leaked holds the pipe open
                self._raise_death()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _raise_death(self) -> NoReturn:
        closed_but_alive = not self.has_ended(_CLOSE_S)  # the pipe closes a moment before the process ends
        self.kill()
        code = self._process.returncode
        code = -signal.SIGKILL if code is None else code
        oom_killed = code == -signal.SIGKILL and not closed_but_alive and oom_kills() > self._oom_kills
        raise WorkerDied(code, oom_killed, self._log_tail())

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(line[:_LOG_LINE_CHARACTERS] for line in lines[-_LOG_TAIL_LINES:])


def close_all(workers: Iterable[WorkerProcess]) -> None:
    """Let idle workers end by themselves, so that they remove their temporary files; kill those that do not."""
    workers = list(workers)
    for worker in workers:
        worker.let_go()
    deadline = time.monotonic() + _CLOSE_S
    for worker in workers:
        worker.has_ended(deadline - time.monotonic())
        worker.kill()


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended in this control group, or on this machine without one."""
    groups = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups[controllers] = path.lstrip("/")
    files = [
        Path("/sys/fs/cgroup", groups.get("", ""), "memory.events"),
        Path("/sys/fs/cgroup/memory", groups.get("memory", ""), "memory.oom_control"),
        Path("/proc/vmstat"),
    ]
    for file in files:
        try:
            counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def worker_environment(device: str) -> dict[str, str]:
    """The environment variables of a process that solves: quiet, no preallocation, no GPU for a CPU cell."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    environment = os.environ | {
        "KEOPS_VERBOSE": "0",
        "POT_BACKEND_DISABLE_JAX": "1",
        "PYKEOPS_VERBOSE": "0",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return environment

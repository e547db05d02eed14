"""Child entry point: `python -m fsbench.worker REQUESTS REPLIES PARENT_PID`, one process a solver.

JSON lines on two inherited file descriptors, so that whatever a solver prints goes to the log and cannot disturb the
protocol. Requests: {"op": "import", "cell": ...}, {"op": "start", "cell": ...}, {"op": "sample"},
{"op": "finish", "more_rounds": whether samples follow}.
Each is answered by {"more": true} or {"record": {...}}, the measured columns of a cell that has ended; {"phase": ...}
and {"sample_s": ...} lines may come before the answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from typing import IO, Any

from fsbench.api import Cell
from fsbench.records import Phase, Status

_PR_SET_PDEATHSIG = 1


class _Session:
    """The cell in hand and the pipe that tells the parent about it."""

    def __init__(self, replies: IO[str]) -> None:
        self.replies = replies
        self.measurement: Any = None

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message)  # before writing: a value that is no JSON must leave no half line
        self.replies.write(text + "\n")
        self.replies.flush()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request. Whatever goes wrong becomes the record of the cell."""
        try:
            match request["op"]:
                case "import":
                    self._bring(Cell.from_json(request["cell"]))
                case "start":
                    self.measurement = None
                    self.measurement = self._measurement(Cell.from_json(request["cell"]))
                    self.measurement.start()
                case "sample":
                    self.measurement.sample()
                case "finish":
                    record = self.measurement.finish()
                    if not request["more_rounds"]:
                        self.measurement = None
                    json.dumps(record)
                    return {"record": record}
                case unknown:
                    raise ValueError(f"unknown op {unknown!r}")
        except Exception as error:  # noqa: BLE001 - ends in a record
            traceback.print_exc()
            phase = self.measurement.phase if self.measurement is not None else Phase.IMPORT
            return {"record": _failure(error, phase)}
        return {"more": True}

    def _bring(self, cell: Cell) -> None:
        """Import what the cell's solver needs. What fails here fails again at its start, and is recorded there."""
        from fsbench.cell_inputs import load_target

        try:
            load_target(cell.solver_target)
        except Exception:  # noqa: BLE001 - ends in a record
            traceback.print_exc()

    def _measurement(self, cell: Cell) -> Any:
        from fsbench.cell import Measurement

        session = self

        class Reporting(Measurement):  # type: ignore[misc, valid-type]
            """Tells the parent each phase and sample, so that a crash or a hang is placed and loses no sample."""

            _phase = Phase.IMPORT

            @property
            def phase(self) -> Phase:
                return self._phase

            @phase.setter
            def phase(self, phase: Phase) -> None:
                self._phase = phase
                session.send({"phase": phase})

            def sampled(self, seconds: float) -> None:
                session.send({"sample_s": seconds})

        return Reporting(cell)


def _failure(error: Exception, phase: Phase) -> dict[str, Any]:
    try:
        from fsbench.cell_failure import describe_failure
    except ImportError:
        detail = f"{type(error).__name__}: {error}"
        return {"status": Status.ERROR, "status_detail": detail, "traceback": traceback.format_exc(), "phase": phase}
    return describe_failure(error, phase)


def _die_with(parent: int) -> None:
    """SIGKILL this process when its parent dies, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # died before the line above
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve requests until the parent closes its end."""
    receive, send, parent = map(int, arguments)
    _die_with(parent)
    faulthandler.enable()
    for descriptor in (receive, send):
        os.set_inheritable(descriptor, False)  # a compiler that outlives us must not hold the pipe open
    with os.fdopen(receive) as requests, os.fdopen(send, "w") as replies:
        session = _Session(replies)
        for line in requests:
            session.send(session.answer(json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What earlier runs left in a folder: which cells are done, and which failures rule out larger sizes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fsbench.api import Cell, budget_to_dict
from fsbench.env import code_id
from fsbench.records import SCHEMA_VERSION, Record, Status, read_lines

MAX_ERROR_RUNS = 3  # the first and two more


class History:
    """Records of this code on this machine for the cells of one plan, kept up to date while the run goes on."""

    def __init__(self, folder: Path, cells: Iterable[Cell], env_id: str) -> None:
        self._cells = {cell.cell_id: cell for cell in cells}
        self._failures: dict[str, dict[str, Record]] = defaultdict(dict)  # series -> cell_id -> out of memory or time
        self._env_id = env_id
        self._latest: dict[str, Record] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._error_runs: dict[str, set[str]] = defaultdict(set)
        earlier = [record for path in sorted(folder.glob("measurements*.jsonl")) for record in read_lines(path)]
        for record in sorted(earlier, key=lambda record: record.get("started_at") or ""):
            self.add(record)

    def add(self, record: Record) -> None:
        """Take in a record, the newest so far; those of other cells, code or machines are passed over."""
        cell = self._cells.get(record.get("cell_id", ""))
        if cell is None or record["schema_version"] != SCHEMA_VERSION or record["env_id"] != self._env_id:
            return
        if record["code_id"] != code_id(cell.solver_target, cell.problem_target):
            return
        self._latest[cell.cell_id] = record
        self._attempts[cell.cell_id] += 1
        if record["status"] == Status.ERROR:
            self._error_runs[cell.cell_id].add(record["run_id"])
        failures = self._failures[_series(cell)]
        failures.pop(cell.cell_id, None)
        if record["status"] in (Status.OOM, Status.TIMEOUT):
            failures[cell.cell_id] = record

    def latest(self, cell: Cell) -> Record | None:
        return self._latest.get(cell.cell_id)

    def next_attempt(self, cell: Cell) -> int:
        return self._attempts[cell.cell_id] + 1

    def is_done(self, cell: Cell) -> bool:
        """Whether the latest record stands: an error is tried in two more runs, a timeout when its limit is raised."""
        record = self.latest(cell)
        if record is None:
            return False
        if record["status"] == Status.ERROR:
            return len(self._error_runs[cell.cell_id]) >= MAX_ERROR_RUNS
        return record["status"] != Status.TIMEOUT or _limit(record["timeout_s"]) >= _limit(cell.timeout_s)

    def smaller_failure(self, cell: Cell) -> Record | None:
        """The record of a cell of the same series, no larger in n, m and d, that ran out of memory or time."""
        for record in self._failures[_series(cell)].values():
            stands = record["status"] == Status.OOM or _limit(record["timeout_s"]) >= _limit(cell.timeout_s)
            if stands and _is_larger(cell, record):
                return record
        return None


def _is_larger(cell: Cell, record: Record) -> bool:
    size, smaller = (cell.n, cell.m, cell.d), (record["n"], record["m"], record["d"])
    return size != smaller and all(a >= b for a, b in zip(size, smaller, strict=True))


def _limit(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else timeout_s


def _series(cell: Cell) -> str:
    """All that must be equal for a failure at one size to tell of a larger one."""
    keys = (
        "solver_target", "solver_params", "ladder", "problem_target", "problem_params", "eps", "cost_scale", "dtype",
        "device", "task",
    )  # fmt: skip
    described = {key: getattr(cell, key) for key in keys} | {"budget": budget_to_dict(cell.budget)}
    return json.dumps(described, sort_keys=True)

"""What a person sees of a run: a bar on a terminal, one line a cell elsewhere, and the table at the end."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fsbench.api import Cell, FixedIterations
from fsbench.records import Record, Status

_FAILED = (Status.OOM, Status.TIMEOUT, Status.UNSUPPORTED, Status.ERROR)
_PLAIN_WIDTH = 100
_BUSY = 0.25  # share of a machine's CPUs that other processes may keep busy before a run says so


def make_console() -> Console:
    """Standard output; a table of 100 columns where there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


class RunProgress:
    """Use as a context manager around a run of `total` cells."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done_before = 0
        self._ended: set[str] = set()
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"), console=console, transient=True,
                refresh_per_second=2,  # drawing takes time from what is measured
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total, left="")

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def resumed(self, done: int) -> None:
        """`done` of the cells have a record that stands from an earlier run."""
        self._done_before = done
        if done:
            self._console.print(Text(f"{done} of {self._total} cells are done already"))
        if self._bar:
            self._bar.update(self._task, completed=done)

    def measuring(self, cell: Cell) -> None:
        if self._bar:
            self._bar.update(self._task, description=f"{cell.solver} n={cell.n} d={cell.d} eps={cell.eps:g}")

    def ended(self, record: Record) -> None:
        self._ended.add(record["cell_id"])  # a cell tried again counts once
        done = self._done_before + len(self._ended)
        if self._bar:
            self._bar.update(self._task, completed=done, left=self._time_left(done))
        failed = record["status"] in _FAILED
        if self._bar is None or failed:
            place = f"[{done:>{len(str(self._total))}}/{self._total}]"
            line = f"{place} {describe(record)}  {record['status']}  {_result(record)}"
            self._console.print(Text(line, style="red" if record["status"] == Status.ERROR else ""), soft_wrap=True)

    def _time_left(self, done: int) -> str:
        """From the mean of this run's cells; larger ones are still to come, so it is a lower end."""
        left_s = (time.monotonic() - self._began) / len(self._ended) * (self._total - done)
        return f"{datetime.timedelta(seconds=round(left_s))} left"


def describe(record: Record) -> str:
    """A cell in a few words."""
    m = "" if record["m"] == record["n"] else f" m={record['m']}"
    tol = "" if record.get("tol") is None else f" tol={record['tol']:g}"
    return f"{record['solver']} {record['problem']} n={record['n']}{m} d={record['d']} eps={record['eps']:g}{tol}"


def summary(rows: Iterable[tuple[Cell, Record | None]]) -> Table:
    """One row a planned cell, failures in their place."""
    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown = {
        "problem": len({cell.problem for cell, _ in rows}) > 1,
        "seed": len({cell.seed for cell, _ in rows}) > 1,
        "m": any(cell.m != cell.n for cell, _ in rows),
        "dtype": len({cell.dtype for cell, _ in rows}) > 1,
        "budget": len({_budget_words(cell) for cell, _ in rows}) > 1,
    }
    table.add_column("solver", overflow="fold")
    if shown["problem"]:
        table.add_column("problem", overflow="fold")
    for name in ("n", "m", "d", "eps", "seed"):
        if shown.get(name, True):
            table.add_column(name, justify="right", no_wrap=True)
    if shown["dtype"]:
        table.add_column("dtype", no_wrap=True)
    if shown["budget"]:
        table.add_column("budget", no_wrap=True)
    for name in ("time", "passes", "residual", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for cell, record in rows:
        what = [cell.solver]
        what += [cell.problem] if shown["problem"] else []
        what += [f"{getattr(cell, k):g}" if k == "eps" else str(getattr(cell, k))
                 for k in ("n", "m", "d", "eps", "seed") if shown.get(k, True)]  # fmt: skip
        what += [cell.dtype] if shown["dtype"] else []
        what += [_budget_words(cell)] if shown["budget"] else []
        got: Record = record or {}
        status = str(got.get("status", "not run")) + (" (inferred)" if got.get("inferred_from") else "")
        numbers = [
            format_seconds(got.get("time_to_solution_s")),
            _format("{:.4g}", got.get("n_passes")),
            _format("{:.2e}", got.get("residual_l1")),
            format_bytes(got.get("peak_device_bytes") or got.get("peak_alloc_bytes") or got.get("peak_host_bytes")),
        ]
        table.add_row(*what, *numbers, status, style="red" if status.startswith("error") else "")
    return table


def _budget_words(cell: Cell) -> str:
    budget = cell.budget
    return f"{budget.iterations} iterations" if isinstance(budget, FixedIterations) else f"tol {budget.tol:g}"


def failures(rows: Iterable[tuple[Cell, Record | None]]) -> list[str]:
    """One line a cell that has no result, with the reason."""
    lines = []
    for _, record in rows:
        if record and record["status"] in _FAILED and not record.get("inferred_from"):
            lines.append(f"{describe(record)}  {record['status']}: {_first_line(record['status_detail'])}")
    return lines


def busy_machine(measured: Iterable[Record], environments: Iterable[Record]) -> list[str]:
    """One line if other processes kept a machine busy while cells were sampled, else none.

    `environments` say how many CPUs there are; cells without theirs, or without a load, are passed over.
    """
    cpus = {row["env_id"]: row.get("cpu_count") or math.inf for row in environments}
    known = ((record.get("host_load_cpus"), cpus.get(record["env_id"], math.inf)) for record in measured)
    busy = [(load, count) for load, count in known if load is not None and load > _BUSY * count]
    if not busy:
        return []
    load, count = max(busy)
    return [
        f"other processes kept up to {load:.1f} of {count} CPUs busy during sampling: "
        f"times of {len(busy)} {'cell' if len(busy) == 1 else 'cells'} may be too long"
    ]


def format_seconds(seconds: float | None) -> str:
    """Three digits and a unit; a dash for missing."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds / scale < 1000 else f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(count: int | None) -> str:
    """Decimal units, three digits; a dash for missing."""
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _result(record: Record) -> str:
    if record["status"] in _FAILED:
        return _first_line(record["status_detail"])
    residual = _format("residual {:.2e}", record["residual_l1"])
    return f"{format_seconds(record['time_to_solution_s'])}  {residual}"


def _format(pattern: str, value: Any) -> str:
    return "-" if value is None else pattern.format(value)


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0][:200]

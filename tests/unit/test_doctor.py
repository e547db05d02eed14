"""The check of solvers, on solvers whose workers are real and whose measurement is that of `fakes`."""

from __future__ import annotations

import io
import itertools
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import yaml
from fakes import GRACE_S, is_gone, wait_until
from rich.console import Console

from fsbench import compose, doctor
from fsbench.__main__ import main
from fsbench.api import FixedIterations

pytestmark = pytest.mark.usefixtures("fake_workers")


@pytest.fixture
def solvers(tmp_path, monkeypatch):
    """Make these the only solvers there are: those of the checkout are tried by their contract tests."""
    real = compose.names
    own = {}
    monkeypatch.setattr(compose, "names", lambda group, dirs=(): own if group == "solver" else real(group, dirs))
    monkeypatch.setattr(doctor, "_at_once", lambda found: 2)
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 30.0)

    def add(name: str, requires: tuple[str, ...] = (), **params) -> None:
        own[name] = tmp_path / f"{name}.yaml"
        conf = {"_target_": "nowhere.Fake", "requires": list(requires), "params": {"name": name, **params}}
        own[name].write_text(yaml.safe_dump(conf))

    return add


def rows(text: str) -> dict[str, str]:
    """Each line of the output by its first word."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


def test_each_solver_is_one_row_in_order_with_what_to_do(solvers, monkeypatch):
    real = doctor._tiny_cell

    def tiny_cell(solver, *rest):
        return replace(real(solver, *rest), timeout_s=1.0) if solver.name == "hang" else real(solver, *rest)

    monkeypatch.setattr(doctor, "_tiny_cell", tiny_cell)
    solvers("works")
    solvers("absent", requires=("toy-of-nobody",))
    solvers("broken", do="raise")
    solvers("needs", do="missing")
    solvers("crash", do="abort")
    solvers("hang", do="sleep")
    solvers("limited", do="unsupported")
    console = Console(width=200, file=io.StringIO())  # no row is folded
    assert doctor.examine(console)
    found = rows(console.file.getvalue())
    named = ["absent", "broken", "crash", "hang", "limited", "needs", "works"]
    assert [name for name in found if name in named] == named
    assert found["works"] == "yes"
    assert found["absent"] == "no not installed: pip install toy-of-nobody"
    assert "deliberate failure [/b] [link]" in found["broken"]  # no markup, whatever it looks like
    assert "pip install not_installed" in found["needs"]
    assert "SIGABRT" in found["crash"]
    assert "timeout in phase" in found["hang"] and "limit of 1 s" in found["hang"]
    assert found["limited"] == "no d <= 3 only"


def test_a_solver_that_cannot_count_iterations_is_tried_to_a_residual(solvers, monkeypatch, capsys):
    real = doctor._tiny_cell

    def tiny_cell(solver, device, budget):
        do = "unsupported" if isinstance(budget, FixedIterations) else "ok"
        return replace(real(solver, device, budget), solver_params={"do": do})

    monkeypatch.setattr(doctor, "_tiny_cell", tiny_cell)
    solvers("a")
    assert main(["doctor"]) == 0
    assert rows(capsys.readouterr().out)["a"] == "yes"


def test_slow_solvers_are_tried_at_once_and_a_terminal_shows_which(solvers, tmp_path):
    """Each waits until the other has started: one after the other, the first would reach its limit."""
    traces = {name: str(tmp_path / name) for name in ("a", "b")}
    solvers("a", do="wait_for", trace=traces["a"], gate=traces["b"])
    solvers("b", do="wait_for", trace=traces["b"], gate=traces["a"])
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    assert doctor.examine(console)
    shown = console.file.getvalue()
    assert "0 of 2 solvers tried; running: a, b" in shown
    assert [line.split() for line in shown.splitlines() if "yes" in line] == [["a", "yes"], ["b", "yes"]]


def test_formulas_of_keops_are_compiled_by_one_process_at_a_time(solvers, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_missing", lambda distributions: [])
    trace = tmp_path / "trace"
    for name in ("a", "b"):
        solvers(name, requires=("pykeops",), do="sleep", seconds=1.0, trace=str(trace))
    assert main(["doctor"]) == 0
    order = [name for name, _ in itertools.groupby(line.split()[1] for line in trace.read_text().splitlines())]
    assert sorted(order) == ["a", "b"], "interleaved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_shows_what_is_known_and_kills_what_runs(solvers, tmp_path, capsys, number):
    """Two at once: a is done when c begins, b and c are stuck, d is not begun."""
    traces = {name: tmp_path / f"trace-{name}" for name in "abcd"}
    for name, do in (("a", "ok"), ("b", "sleep"), ("c", "sleep"), ("d", "ok")):
        solvers(name, do=do, trace=str(traces[name]))
    sent_at = []

    def interrupt():
        wait_until(lambda: traces["b"].exists() and traces["c"].exists())
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    exit_code = main(["doctor"])
    sender.join()
    assert exit_code == 130
    assert time.monotonic() - sent_at[0] < GRACE_S
    assert not traces["d"].exists()
    assert all(is_gone(int(traces[name].read_text().split()[0])) for name in "bc")
    found = rows(capsys.readouterr().out)
    assert found["a"] == "yes"
    assert [found[name] for name in "bcd"] == ["? not tried: the check was interrupted"] * 3


@pytest.mark.parametrize(
    ("cpus", "gpu_bytes", "expected"),
    [(1, None, 1), (2, None, 2), (64, None, 8), (16, 139 * 2**30, 8), (16, 6 * 2**30, 3), (16, 2**30, 1)],
)
def test_as_many_at_once_as_there_is_room_for(cpus, gpu_bytes, expected):
    gpu = {"gpu_name": gpu_bytes and "some", "gpu_memory_bytes": gpu_bytes}
    assert doctor._at_once({"cpu_count": cpus, **gpu}) == expected

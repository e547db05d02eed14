"""Runs that stop, are killed or fail, and what the next run makes of them. Every process is real."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import Heard, fake_cell, fake_plan, is_gone, run, run_elsewhere, statuses, wait_until, written

from fsbench import runner
from fsbench.compose import ConfigError
from fsbench.records import read_lines

pytestmark = pytest.mark.usefixtures("fake_workers")


def test_a_timeout_is_not_retried_unless_asked_and_each_attempt_is_recorded(out, tmp_path):
    cell = fake_cell("a", timeout_s=0.7, do="sleep")
    run(fake_plan(out, cell))
    assert [record["attempt"] for record in written(out)] == [1]
    run(fake_plan(tmp_path / "again", cell, retries=1))
    assert [record["attempt"] for record in written(tmp_path / "again")] == [1, 2]


def test_a_retry_that_succeeds_replaces_the_error(out, tmp_path):
    outcome = run(fake_plan(out, fake_cell("a", do="once", marker=str(tmp_path / "m")), retries=2))
    assert statuses(outcome) == ["ok"]
    assert outcome.exit_code == 0
    assert [record["status"] for record in written(out)] == ["error", "ok"]


def test_a_timeout_is_tried_again_when_the_limit_is_raised(out):
    run(fake_plan(out, fake_cell("a", timeout_s=0.5, do="sleep", seconds=1.0), fake_cell("a", 20, timeout_s=0.5)))
    heard = Heard()
    short = [fake_cell("a", timeout_s=0.4, do="sleep", seconds=1.0)]
    run(fake_plan(out, *short), heard)
    assert heard.records == []
    assert statuses(run(fake_plan(out, fake_cell("a", timeout_s=30, do="sleep", seconds=1.0)))) == ["ok"]


def test_errors_are_tried_in_two_more_runs_and_never_shown_as_success(out):
    plan = fake_plan(out, fake_cell("a", do="raise"), fake_cell("b"))
    outcomes = [run(plan) for _ in range(4)]
    assert [statuses(outcome) for outcome in outcomes] == [["error", "ok"]] * 4
    assert [outcome.exit_code for outcome in outcomes] == [1] * 4
    assert Counter(record["solver"] for record in written(out)) == {"a": 3, "b": 1}
    assert [r["attempt"] for r in written(out) if r["solver"] == "a"] == [1, 2, 3]


def test_fail_fast_stops_and_a_later_run_picks_up_the_rest(out):
    cells = [fake_cell("a", do="raise"), fake_cell("a", 20), fake_cell("a", 30)]
    outcome = run(fake_plan(out, *cells, fail_fast=True))
    assert statuses(outcome) == ["error", "not run", "not run"]
    assert outcome.stopped == runner.StopReason.FAIL_FAST
    assert outcome.exit_code == 1
    assert statuses(run(fake_plan(out, *cells))) == ["error", "ok", "ok"]


def test_budget_stops_between_cells_and_a_later_run_continues(out):
    cells = [fake_cell("a", n, do="sleep", seconds=0.6) for n in (10, 20, 30)]
    outcome = run(fake_plan(out, *cells, budget_s=0.5))
    assert statuses(outcome) == ["ok", "not run", "not run"]
    assert (outcome.stopped, outcome.exit_code) == (runner.StopReason.BUDGET, 0)
    heard = Heard()
    assert statuses(run(fake_plan(out, *cells), heard)) == ["ok"] * 3
    assert (heard.done_before, len(heard.records)) == (1, 2)


def test_budget_also_stops_within_a_comparison(out):
    cells = [fake_cell(name, do="sleep", seconds=0.6) for name in ("a", "b", "c")]
    outcome = run(fake_plan(out, *cells, budget_s=0.5))
    assert statuses(outcome) == ["ok", "not run", "not run"]
    assert outcome.stopped == runner.StopReason.BUDGET
    assert statuses(run(fake_plan(out, *cells))) == ["ok"] * 3


def test_parent_killed_with_sigkill_loses_one_cell_and_leaves_no_worker(out, tmp_path):
    """Job 3 of 6 is in flight when the parent dies; jobs 1 and 2 are not run again."""
    trace, gate = tmp_path / "trace", tmp_path / "gate"
    cells = [fake_cell("a", n, trace=str(trace), do="wait_for", gate=str(gate), at=[30]) for n in range(10, 70, 10)]
    parent = run_elsewhere(fake_plan(out, *cells))
    wait_until(lambda: trace.exists() and " 30 start" in trace.read_text())
    worker_pid = int(trace.read_text().splitlines()[-1].split()[0])
    parent.kill()
    parent.communicate()
    wait_until(lambda: is_gone(worker_pid))
    before = written(out)
    assert [record["n"] for record in before] == [10, 20]

    gate.touch()
    assert statuses(run(fake_plan(out, *cells))) == ["ok"] * 6
    after = written(out)
    assert after[:2] == before
    assert [record["n"] for record in after] == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("killed_in", ["b start", "a sample"])
def test_a_killed_comparison_keeps_every_cell_that_had_its_first_round(out, tmp_path, killed_in):
    """Solvers a and b side by side: killed while b starts, and while a is sampled for the second time."""
    trace, gate = tmp_path / "trace", tmp_path / "gate"
    solver, op = killed_in.split()
    waits = {"do": "wait_for", "gate": str(gate), "op": op, "from_call": 1 if op == "start" else 2}
    cells = [fake_cell(name, trace=str(trace), **(waits if name == solver else {})) for name in ("a", "b")]
    parent = run_elsewhere(fake_plan(out, *cells))
    reached = 1 if op == "start" else 2
    wait_until(lambda: trace.exists() and trace.read_text().count(f" {solver} 10 {op}") == reached)
    parent.kill()
    parent.communicate()
    kept = ["a"] if op == "start" else ["a", "b"]
    assert written(out) == []
    assert [record["solver"] for record in read_lines(out / "fake" / "measurements-unfinished.jsonl")] == kept

    gate.touch()
    assert statuses(run(fake_plan(out, *cells))) == ["ok", "ok"]
    assert sorted(record["solver"] for record in written(out)) == ["a", "b"]
    assert [record["attempt"] for record in written(out)] == [1, 1]
    assert not (out / "fake" / "measurements-unfinished.jsonl").exists()
    starts = trace.read_text().count(" start")
    assert starts == 2 + (op == "start")  # only what had no round is measured again


def test_a_line_cut_off_by_a_kill_costs_that_cell_only(out):
    plan = fake_plan(out, fake_cell("a"), fake_cell("b"))
    run(plan)
    path = out / "fake" / "measurements.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert [record["solver"] for record in written(out)] == ["a"]
    assert statuses(run(plan)) == ["ok", "ok"]
    assert sorted(record["solver"] for record in written(out)) == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_cleanly_and_the_next_run_continues(out, tmp_path, number):
    trace = tmp_path / "trace"
    cells = [fake_cell("a", 10), fake_cell("b", 20, do="sleep", trace=str(trace)), fake_cell("c", 30)]
    parent = run_elsewhere(fake_plan(out, *cells))
    wait_until(trace.exists)
    worker_pid = int(trace.read_text().split()[0])
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=20)
    assert parent.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert is_gone(worker_pid)
    assert [record["solver"] for record in written(out)] == ["a"]


def test_a_run_in_a_thread_is_interrupted_from_outside(out, tmp_path):
    trace = tmp_path / "trace"
    cells = [fake_cell("a", 10), fake_cell("b", 20, do="sleep", trace=str(trace)), fake_cell("c", 30)]
    inner = runner.Runner(fake_plan(out, *cells), Heard())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(inner.run)
        wait_until(trace.exists)
        inner.interrupt()
        outcome = future.result(timeout=20)
    assert (statuses(outcome), outcome.stopped, outcome.exit_code) == (["ok", "not run", "not run"], "interrupted", 130)
    assert is_gone(int(trace.read_text().split()[0]))
    assert [record["solver"] for record in written(out)] == ["a"]


def test_an_interrupt_before_the_first_cell_leaves_none_run(out):
    inner = runner.Runner(fake_plan(out, fake_cell("a")), Heard())
    inner.interrupt()
    assert statuses(inner.run()) == ["not run"]


@pytest.mark.parametrize("ending", ["interrupt", "fail_fast"])
def test_a_run_that_ends_early_shows_every_cell_that_had_its_first_round(out, tmp_path, ending):
    """In the second round b waits while the parent is interrupted, or breaks; c does not come to it."""
    trace = tmp_path / "trace"
    do = {"interrupt": "sleep", "fail_fast": "raise"}[ending]
    b = fake_cell("b", do=do, op="sample", from_call=2, trace=str(trace))
    parent = run_elsewhere(fake_plan(out, fake_cell("a"), b, fake_cell("c"), fail_fast=True))
    if ending == "interrupt":
        wait_until(lambda: trace.exists() and trace.read_text().count(" sample") == 2)
        parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=20)
    expected = ["ok", "ok" if ending == "interrupt" else "error", "ok"]
    assert output.splitlines()[-1] == " ".join(expected), output
    assert {record["solver"]: record["status"] for record in written(out)} == dict(zip("abc", expected, strict=True))
    assert not (out / "fake" / "measurements-unfinished.jsonl").exists()


def test_two_runs_on_one_folder_are_refused_and_the_lock_dies_with_its_holder(out, tmp_path):
    trace = tmp_path / "trace"
    parent = run_elsewhere(fake_plan(out, fake_cell("a", do="sleep", trace=str(trace))))
    wait_until(trace.exists)
    with pytest.raises(ConfigError, match=rf"another run \(process {parent.pid}\)"):
        run(fake_plan(out, fake_cell("b")))
    parent.kill()
    parent.communicate()
    assert statuses(run(fake_plan(out, fake_cell("b")))) == ["ok"]


def test_results_of_other_code_or_another_machine_do_not_count(out, monkeypatch):
    plan = fake_plan(out, fake_cell("a"))
    run(plan)
    real = runner.environment
    monkeypatch.setattr(runner, "environment", lambda: real() | {"env_id": "elsewhere"})
    heard = Heard()
    run(plan, heard)
    assert (heard.done_before, len(heard.records)) == (0, 1)
    assert len(read_lines(out / "fake" / "environments.jsonl")) == 2


def test_redo_measures_again_and_the_newest_counts(out):
    cells = [fake_cell("a"), fake_cell("b")]
    first = run(fake_plan(out, *cells))
    again = run(fake_plan(out, *cells, redo=True))
    assert {r["record_id"] for _, r in first.rows}.isdisjoint(r["record_id"] for _, r in again.rows)
    assert [record["attempt"] for _, record in again.rows] == [2, 2]

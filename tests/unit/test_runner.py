"""The runner against workers that hang, die and lie. Every process is real."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from fakes import WORKER, Heard, fake_cell, fake_plan, run, run_elsewhere

from fsbench import process, records, runner
from fsbench.compose import ConfigError
from fsbench.env import code_id
from fsbench.history import History
from fsbench.process import WorkerProcess
from fsbench.records import check_record, read_lines
from fsbench.runner import Runner

GRACE_S = 5.0  # after a deadline: to kill, on a busy machine


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch):
    monkeypatch.setattr(process, "WORKER", WORKER)
    code_id.cache_clear()  # other processes of a test hash the files as they are now


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def statuses(outcome) -> list[str]:
    return ["not run" if record is None else str(record["status"]) for _, record in outcome.rows]


def written(out: Path) -> list[dict]:
    return read_lines(out / "fake" / "measurements.jsonl")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_one_valid_record_a_cell(out):
    outcome = run(fake_plan(out, fake_cell("a"), fake_cell("b"), fake_cell("a", 20)))
    assert statuses(outcome) == ["ok"] * 3
    assert outcome.exit_code == 0
    assert outcome.stopped is None
    for record in written(out):
        check_record(record)
    assert len(written(out)) == 3
    (environment,) = read_lines(out / "fake" / "environments.jsonl")
    assert {record["env_id"] for record in written(out)} == {environment["env_id"]}


def test_a_record_names_the_commit_of_its_own_run(out, monkeypatch):
    """The environment's row is that of the first run on this machine: a later commit adds none."""
    real = runner.environment
    for commit, dirty in (("first", False), ("second", True)):
        row = real() | {"git_commit": commit, "git_dirty": dirty}
        monkeypatch.setattr(runner, "environment", lambda row=row: row)
        run(fake_plan(out, fake_cell(commit)))
    assert len(read_lines(out / "fake" / "environments.jsonl")) == 1
    assert [(r["solver"], r["git_commit"], r["git_dirty"]) for r in written(out)] == [
        ("first", "first", False), ("second", "second", True)
    ]  # fmt: skip


def test_rounds_alternate_between_the_solvers_of_a_comparison_and_workers_are_kept(out, tmp_path):
    trace = tmp_path / "trace"
    cells = [fake_cell(name, n, trace=str(trace)) for n in (10, 20) for name in ("a", "b")]
    run(fake_plan(out, *cells))
    lines = [line.split() for line in trace.read_text().splitlines()]
    expected = [(name, op) for name in ("a", "b") for op in ("start", "sample", "finish")]
    expected += [(name, op) for op in ("sample", "finish") for name in ("a", "b")]
    assert [(name, op) for _, name, n, op in lines if n == "10"] == expected
    assert [n for _, _, n, _ in lines] == ["10"] * 10 + ["20"] * 10
    assert len({pid for pid, name, _, _ in lines if name == "a"}) == 1
    assert len({pid for pid, _, _, _ in lines}) == 2


@pytest.mark.parametrize(
    ("do", "status", "detail", "exit_code"),
    [
        ("raise", "error", "deliberate failure", None),
        ("missing", "error", "not_installed", None),
        ("memory", "oom", "cannot allocate", None),
        ("unsupported", "unsupported", "d <= 3 only", None),
        ("abort", "error", "SIGABRT", -signal.SIGABRT),
        ("segfault", "error", "SIGSEGV", -signal.SIGSEGV),
        ("exit", "error", "exit code 3", 3),
        ("killed", "error", "no out-of-memory kill", -signal.SIGKILL),
        ("nan", "error", "residual_l1", None),
        ("nan_samples", "error", "samples_s", None),
    ],
)
def test_every_end_is_one_labelled_row_and_the_rest_goes_on(out, do, status, detail, exit_code):
    cells = [fake_cell("a", 10), fake_cell("bad", 10, do=do, at=[10]), fake_cell("a", 20), fake_cell("b", 20)]
    outcome = run(fake_plan(out, *cells))
    assert statuses(outcome) == ["ok", status, "ok", "ok"]
    record = outcome.rows[1][1]
    assert detail in record["status_detail"]
    assert record["exit_code"] == exit_code
    assert outcome.exit_code == (1 if status == "error" else 0)
    assert len(written(out)) == 4


def test_a_missing_import_is_an_error_of_phase_import(out):
    record = run(fake_plan(out, fake_cell("a", do="missing"))).rows[0][1]
    assert (record["status"], record["phase"]) == ("error", "import")


def test_a_crash_keeps_phase_and_the_last_lines_of_the_log(out):
    record = run(fake_plan(out, fake_cell("a", do="abort", op="sample"))).rows[0][1]
    assert record["phase"] == "time"
    assert "about to abort" in record["traceback"]


def test_the_kernels_out_of_memory_kill_is_oom(out, monkeypatch):
    """The counter is the kernel's; here it is made to move as it does when the killer strikes."""
    counts = iter([0, 1])
    monkeypatch.setattr(process, "oom_kills", lambda: next(counts))
    record = run(fake_plan(out, fake_cell("a", do="killed"))).rows[0][1]
    assert (record["status"], record["exit_code"]) == ("oom", -9)


def test_the_deadline_is_on_the_sum_of_all_rounds(out):
    """0.4 s a round, for ever, limit 3 s: no round alone reaches it."""
    cell = fake_cell("a", timeout_s=3.0, rounds=1000, do="sleep", seconds=0.4, op="sample")
    began = time.monotonic()
    record = run(fake_plan(out, cell)).rows[0][1]
    assert 3.0 <= time.monotonic() - began < 3.0 + GRACE_S
    assert (record["status"], record["phase"], record["timeout_s"]) == ("timeout", "time", 3.0)
    assert set(record["samples_s"]) == {0.4}  # what was finished is kept
    assert len(record["samples_s"]) <= 7  # the start takes its share of the limit


def test_a_native_call_with_masked_signals_is_killed_and_the_next_cell_runs(out):
    cells = [fake_cell("a"), fake_cell("stuck", timeout_s=2.0, do="masked"), fake_cell("c")]
    began = time.monotonic()
    assert statuses(run(fake_plan(out, *cells))) == ["ok", "timeout", "ok"]
    assert time.monotonic() - began < 2.0 + 2 * GRACE_S


@pytest.mark.parametrize(
    ("do", "status"), [("leak", "timeout"), ("leak_session", "timeout"), ("leak_and_die", "error")]
)
def test_leaked_children_that_ignore_sigterm_are_killed_too(out, tmp_path, do, status):
    pid_file = tmp_path / "pid"
    cell = fake_cell("a", timeout_s=2.0, do=do, pid_file=str(pid_file))
    began = time.monotonic()
    assert statuses(run(fake_plan(out, cell))) == [status]
    assert time.monotonic() - began < 2.0 + GRACE_S
    wait_until(lambda: is_gone(int(pid_file.read_text())))


def test_output_of_a_solver_goes_to_its_log_and_not_into_the_protocol(out):
    assert statuses(run(fake_plan(out, fake_cell("a", do="noise")))) == ["ok"]
    assert (out / "fake" / "logs" / "a.log").stat().st_size > 100_000


def test_a_poisoned_process_is_replaced(out):
    """Job 2 of 5 breaks its process; the other four have the values they have alone."""
    cells = [fake_cell("a", n, **({"do": "poison"} if n == 20 else {})) for n in (10, 20, 30, 40, 50)]
    outcome = run(fake_plan(out, *cells))
    assert statuses(outcome) == ["ok", "error", "ok", "ok", "ok"]
    assert "device-side assert" in outcome.rows[1][1]["status_detail"]


def test_larger_sizes_of_a_series_are_inferred(out, tmp_path):
    trace = tmp_path / "trace"
    sizes = [(10, 3), (20, 3), (20, 5), (40, 2), (40, 3)]
    cells = [fake_cell("a", n, d=d, do="memory", at=[20], trace=str(trace)) for n, d in sizes]
    cells += [fake_cell("b", 40)]
    outcome = run(fake_plan(out, *cells))
    # n = 40 with d = 2 is not larger than n = 20 with d = 3 in every axis, so it runs.
    assert statuses(outcome) == ["ok", "oom", "oom", "ok", "oom", "ok"]
    records = [record for _, record in outcome.rows]
    assert records[2]["inferred_from"] == records[4]["inferred_from"] == records[1]["record_id"]
    assert records[3]["inferred_from"] is None
    assert len(trace.read_text().split("start")) - 1 == 3


def test_book_keeping_of_ten_thousand_cells_is_cheap(out):
    cells = [fake_cell("a", n) for n in range(1, 10_001)]
    history = History(out, cells, "machine")
    failed = dict(env_id="machine", code_id=code_id("nowhere.Fake", "nowhere.fake"), run_id="r", status="oom")
    history.add(records.describe(cells[5000]) | failed)
    began = time.process_time()
    inferred = [history.smaller_failure(cell) is not None for cell in cells]
    assert inferred == [cell.n > 5001 for cell in cells]
    assert sum(map(history.is_done, cells)) == 1
    assert time.process_time() - began < 3.0


def test_out_of_memory_beside_others_is_asked_again_alone(out, tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    occupy = fake_cell("a", do="occupy", others=str(others))
    victim = fake_cell("b", do="memory_if_crowded", others=str(others))
    plan = fake_plan(out, occupy, victim)
    closing = runner.close_all

    def clear(workers):
        closing(workers)
        for file in others.iterdir():
            file.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "close_all", clear)
        assert statuses(run(plan)) == ["ok", "ok"]
    assert Counter(record["solver"] for record in written(out)) == {"a": 1, "b": 1}


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


def test_failures_are_told_at_once_with_the_traceback_in_log_and_record(out):
    heard = Heard()
    cells = [
        fake_cell("a", 10, do="raise"),
        fake_cell("a", 20, do="sleep", seconds=1.5),
        fake_cell("a", 30, do="raise"),
    ]
    outcome = run(fake_plan(out, *cells), heard)
    assert heard.at[1] - heard.at[0] > 1.0
    for row in (0, 2):
        assert 'raise RuntimeError("deliberate failure")' in outcome.rows[row][1]["traceback"]
    assert (out / "fake" / "logs" / "a.log").read_text().count("RuntimeError: deliberate failure") == 2


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


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to out_dir"):
        run(fake_plan(tmp_path / "file" / "out", fake_cell("a")))


def test_results_of_other_code_or_another_machine_do_not_count(out, monkeypatch):
    plan = fake_plan(out, fake_cell("a"))
    run(plan)
    real = runner.environment
    monkeypatch.setattr(runner, "environment", lambda: real() | {"env_id": "elsewhere"})
    heard = Heard()
    run(plan, heard)
    assert (heard.done_before, len(heard.records)) == (0, 1)
    assert len(read_lines(out / "fake" / "environments.jsonl")) == 2


def test_counters_are_asked_for_after_a_good_cell_and_only_where_wanted(out, monkeypatch):
    asked = []

    def measure(cell, *, timeout_s, environment):
        asked.append((cell.solver, timeout_s, environment["CUDA_VISIBLE_DEVICES"]))
        return {"kernel_launches": 7, "counters_detail": "a tool"}

    monkeypatch.setattr(runner.counters, "measure", measure)
    plain = [fake_cell("a"), fake_cell("b", do="raise"), fake_cell("c", timeout_s=None)]
    cells = [replace(cell, timing=replace(cell.timing, counters=True)) for cell in plain]
    outcome = run(fake_plan(out, *cells, fake_cell("d")))
    assert asked == [("a", 60.0, ""), ("c", 600.0, "")]
    assert [record["kernel_launches"] for _, record in outcome.rows] == [7, None, 7, None]


def test_the_effective_configuration_is_kept(out):
    run(fake_plan(out, fake_cell("a"), config={"experiment": "fake", "timeout_s": 5}))
    (kept,) = (out / "fake" / "runs").glob("*.yaml")
    assert yaml.safe_load(kept.read_text())["timeout_s"] == 5


def test_workers_get_quiet_frameworks_and_no_gpu_on_the_cpu(out, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "PYKEOPS_VERBOSE", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    run(fake_plan(out, fake_cell("a", do="show_environment", names=list(names))))
    assert (out / "fake" / "logs" / "a.log").read_text().split("\n")[0] == "['false', '0', '', 'cpu']"


def test_a_plan_of_no_cells_is_no_failure(out):
    outcome = Runner(fake_plan(out), Heard()).run()
    assert (outcome.rows, outcome.exit_code) == ((), 0)


def test_killing_twice_is_safe(tmp_path):
    worker = WorkerProcess(tmp_path / "log", "cpu")
    worker.kill()
    worker.kill()
    assert is_gone(worker.pid)


def test_redo_measures_again_and_the_newest_counts(out):
    cells = [fake_cell("a"), fake_cell("b")]
    first = run(fake_plan(out, *cells))
    again = run(fake_plan(out, *cells, redo=True))
    assert {r["record_id"] for _, r in first.rows}.isdisjoint(r["record_id"] for _, r in again.rows)
    assert [record["attempt"] for _, record in again.rows] == [2, 2]


def test_a_plan_for_a_gpu_is_refused_where_there_is_none(out, monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="device=cpu"):
        run(fake_plan(out, replace(fake_cell("a"), device="cuda")))


def test_workers_of_one_comparison_import_side_by_side(out, tmp_path, monkeypatch):
    """Each module waits for the other to be under way: one after the other they would wait in vain."""
    for own, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"waits_{own}.py").write_text(
            "import time\nfrom pathlib import Path\n"
            f"Path({str(tmp_path / own)!r}).touch()\n"
            "deadline = time.monotonic() + 20\n"
            f"while not Path({str(tmp_path / other)!r}).exists():\n"
            "    assert time.monotonic() < deadline\n"
            "    time.sleep(0.02)\n"
            f"Path({str(tmp_path / ('met_' + own))!r}).touch()\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cells = [replace(fake_cell(name), solver_target=f"waits_{name}.Fake") for name in ("a", "b")]
    assert statuses(run(fake_plan(out, *cells))) == ["ok", "ok"]
    assert (tmp_path / "met_a").exists() and (tmp_path / "met_b").exists()

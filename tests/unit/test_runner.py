"""The runner against workers that hang, die and lie. Every process is real."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from fakes import GRACE_S, Heard, fake_cell, fake_plan, is_gone, run, statuses, wait_until, written

from fsbench import process, records, runner
from fsbench.compose import ConfigError
from fsbench.env import code_id
from fsbench.history import History
from fsbench.process import WorkerProcess
from fsbench.records import check_record, read_lines
from fsbench.runner import Runner

pytestmark = pytest.mark.usefixtures("fake_workers")


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
        assert 'raise RuntimeError("deliberate failure' in outcome.rows[row][1]["traceback"]
    assert (out / "fake" / "logs" / "a.log").read_text().count("RuntimeError: deliberate failure") == 2


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to out_dir"):
        run(fake_plan(tmp_path / "file" / "out", fake_cell("a")))


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

"""The command line from outside: own solver from a temporary folder, exit codes, one-line mistakes, the summary."""

from __future__ import annotations

import io
import itertools
import os
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import fake_cell, fake_plan
from record_factory import GPU, record
from rich.console import Console

from fsbench import __main__ as cli
from fsbench import compose, progress
from fsbench.__main__ import main
from fsbench.api import ToResidual
from fsbench.launcher import run_shards, shard
from fsbench.records import Status, append, read_lines

FSBENCH = (sys.executable, "-m", "fsbench")

TOY = """
import numpy as np
import torch
from fsbench.api import Framework, Solution

class Toy:
    framework = Framework.TORCH

    def __init__(self, sweeps=3):
        self.sweeps = sweeps

    def supports(self, spec, budget):
        pass

    def prepare(self, spec, budget):
        pass

    def solve(self, problem, budget):
        print("solving", flush=True)
        eps = problem.spec.eps
        cost = problem.spec.cost_scale * torch.cdist(problem.x, problem.y).square()
        g = torch.zeros_like(problem.b)
        for _ in range(self.sweeps):
            f = -eps * torch.logsumexp((g - cost) / eps + problem.b.log(), dim=1)
            g = -eps * torch.logsumexp((f[:, None] - cost) / eps + problem.a.log()[:, None], dim=0)
        return Solution(f, g, self.sweeps, 2.0 * self.sweeps)

class Bad(Toy):
    def solve(self, problem, budget):
        raise RuntimeError("toy is broken")

def cloud(*, n, m, d, eps, seed):
    from fsbench.api import Clouds
    random = np.random.default_rng(seed)
    return Clouds(random.random((n, d)), random.random((m, d)), np.full(n, 1 / n), np.full(m, 1 / m))

def report(df, out_dir):
    path = out_dir / "table.txt"
    path.write_text("\\n".join(f"{row.solver} {row.status}" for row in df.itertuples()))
    return [path]
"""


@pytest.fixture
def home(tmp_path) -> Path:
    """A user's folder: toy.py, and conf/ with solvers, a problem and an experiment of their own."""
    (tmp_path / "toy.py").write_text(TOY)
    for name, text in {
        "solver/toy": "_target_: toy.Toy\nrequires: [torch]\nparams: {sweeps: 4}\nlabel: a toy",
        "solver/bad": "_target_: toy.Bad\n",
        "solver/absent": "_target_: toy_that_is_not_there.Toy\nrequires: [toy-of-nobody]\n",
        "problem/own": "_target_: toy.cloud\nparams: {}",
        "experiment/mine": """
            # @package _global_
            experiment: mine
            question: Does my own solver run?
            report: toy.report
            grid:
              gpu:
                {solver: [toy, bad, absent], problem: [own], n: [40], d: [2], eps: [0.5], seed: [0], dtype: [float32]}
            budget: {kind: fixed_iterations, iterations: 4}
            device: cpu
            """,
    }.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def fsbench(home: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*FSBENCH, *arguments], cwd=home, env=environment, capture_output=True, text=True)


def test_own_solver_is_one_file_and_one_yaml_and_reports_need_no_solver(home):
    """Three solvers planned, one breaks and one is not installed: three rows; the report outlives the solver's file."""
    done = fsbench(home, "run", "experiment=mine", "timing=quick", "--config-dir", "conf")
    assert done.returncode == 1
    rows = {row["solver"]: row for row in read_lines(home / "results" / "raw" / "mine" / "measurements.jsonl")}
    assert {name: row["status"] for name, row in rows.items()} == {"toy": "ok", "bad": "error", "absent": "error"}
    assert rows["toy"]["residual_l1"] < 0.1
    assert rows["toy"]["solver_params"] == '{"sweeps": 4}'
    assert "toy is broken" in rows["bad"]["traceback"]
    assert (rows["absent"]["phase"], rows["bad"]["phase"]) == ("import", "warmup")
    for text in (
        "[1/3] toy own n=40 d=2 eps=0.5  ok",
        "[2/3] bad own n=40 d=2 eps=0.5  error",
        "toy is broken",
        "toy_that_is_not_there",
        "records: results/raw/mine",
        "1 ok",
    ):
        assert text in done.stdout
    written = home / "results" / "raw" / "mine" / "report" / "table.txt"
    assert sorted(written.read_text().splitlines()) == ["absent error", "bad error", "toy ok"]

    (home / "toy.py").write_text("def report(df, out_dir):\n    return [out_dir / str(len(df))]\n")
    again = fsbench(home, "report", "mine", "--config-dir", "conf", "--out", "elsewhere")
    assert (again.returncode, again.stdout) == (0, "records: results/raw/mine\nreport: elsewhere/3\n")


def without_report(home: Path, line: str = "") -> None:
    """mine.yaml becomes rings.yaml, which names no report, or the one in `line`."""
    text = (home / "conf/experiment/mine.yaml").read_text()
    text = text.replace("experiment: mine", "experiment: rings").replace("report: toy.report\n", line)
    (home / "conf/experiment/rings.yaml").write_text(text)


def test_an_experiment_without_a_report_has_the_general_one(home):
    without_report(home)
    done = fsbench(home, "run", "experiment=rings", "solver=toy", "timing=quick", "--config-dir=conf")
    assert done.returncode == 0, done.stderr
    folder = home / "results" / "raw" / "rings"
    table = (folder / "report" / "table.md").read_text()
    assert table.startswith("**Time of 4 iterations, median") and "| 40 | toy |" in table
    assert (folder / "report" / "time_n.png").is_file()
    for options in (["--config-dir=conf"], [], ["--report=toy.report"]):
        (folder / "report" / "table.txt").unlink()
        again = fsbench(home, "report", "rings", f"--records={folder}", *options)
        assert again.returncode == 0 and "report/table.txt" in again.stdout, again.stderr
    unknown = fsbench(home, "report", "ringz", f"--records={folder}")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1) and "unknown experiment" in unknown.stderr


def test_a_report_on_the_command_line_is_the_one_written(home):
    mine = ["run", "experiment=mine", "solver=toy", "timing=quick", "--config-dir=conf"]
    assert fsbench(home, *mine, "report=experiments.memory.report").returncode == 0
    assert (home / "results" / "raw" / "mine" / "report" / "exponents.md").is_file()


def test_a_yaml_whose_report_is_not_there_is_refused_before_measuring(home):
    without_report(home, "report: toy.reporter\n")
    done = fsbench(home, "run", "experiment=rings", "--config-dir=conf")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "toy has no 'reporter'; did you mean 'report'?" in done.stderr
    assert not (home / "results").exists()


def test_the_parent_stays_small_and_imports_no_framework(home):
    code = """
        import sys
        from pathlib import Path
        from fsbench.__main__ import main
        code = main(["run", "experiment=mine", "solver=toy", "timing=quick", "--config-dir", "conf"])
        loaded = {"torch", "jax", "triton", "pykeops"} & set(sys.modules)
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print("rss", int(peak.split()[1]) // 1024, sorted(loaded), code)  # ru_maxrss would count the test's own memory
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=home, capture_output=True, text=True)
    _, rss_mib, loaded, code = done.stdout.splitlines()[-1].split()
    assert (loaded, code) == ("[]", "0"), done.stderr
    assert int(rss_mib) < 300


def test_dry_run_measures_nothing(home):
    done = fsbench(home, "run", "--dry-run", "experiment=mine", "solver=toy", "n=[40,20]", "--config-dir=conf")
    assert done.returncode == 0
    assert [line.split("  ")[1] for line in done.stdout.splitlines()[-2:]] == [
        "toy own n=20 d=2 eps=0.5", "toy own n=40 d=2 eps=0.5"
    ]  # fmt: skip
    assert not (home / "results").exists()
    given = ["solver=keops", "n=[20]", "eps=[0.5]"]
    for words, said in ((given, True), (["experiment=quickstart", *given], False)):
        shown = fsbench(home, "run", "--dry-run", *words).stdout.splitlines()
        assert (shown[0] == "no experiment given: quickstart", shown[said].startswith("quickstart: ")) == (said, True)


def test_list_is_fast_and_has_one_line_each(home):
    seconds = []
    for _ in range(3):  # the least: other processes on the machine slow some
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = fsbench(home, "list", "--config-dir", "conf")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.5
    lines = done.stdout.splitlines()
    assert any(line.split() == ["toy", "a", "toy"] for line in lines)
    assert any(line.strip().startswith("table2") for line in lines)
    assert {"solvers", "problems", "experiments"} <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["runn"], "unknown command 'runn'; did you mean 'run'?"),
        (["run", "experiment=table3x"], "unknown experiment 'table3x'; did you mean 'table"),
        (["run", "experiment=table2", "solver=[kepos]"], "did you mean 'keops'?"),
        (["run", "experiment=table2", "epsilom=0.1"], "did you mean 'eps'?"),
        (["run", "experiment=table2", "--dry-ru"], "unknown option '--dry-ru'; did you mean '--dry-run'?"),
        (["run", "experiment=table2", "--config-dir", "nowhere"], "is not a folder"),
        (["doctor", "--config-dir", "nowhere"], "is not a folder"),
        (["list", "--config-dir", "nowhere"], "is not a folder"),
        (["run", "experiment=table2", "report=nonsense"], "'nonsense' of experiment 'table2' cannot be used: write a"),
        (["run", "experiment=table2", "report=experiments.nobody.report"], "no module experiments.nobody"),
        (["run", "experiment=table2", "report=experiments.table2.reprot", "--dry-run"], "did you mean 'report'?"),
        (["report", "table2", "--report", "nobody.knows.report"], "no module nobody.knows"),
        (["report", "tabel2"], "did you mean 'table2'?"),
        (["report", "table2", "--records", "nowhere"], "no records"),
        (["collect", "nowhere"], "no records in nowhere"),
        (["collect"], "FOLDER"),
        (["compare", "nowhere", "nowhere"], "no records in nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, needle, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert needle in output.err


def test_usage(capsys):
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_collect_and_compare_from_the_command_line(tmp_path, capsys):
    for name, changes in (("old", {}), ("new", {"pot": {"status": Status.ERROR}})):
        for solver in ("keops", "pot"):
            append(tmp_path / name / "measurements.jsonl", record(solver, **changes.get(solver, {})))
        append(tmp_path / name / "environments.jsonl", GPU)
    old, new, out = (str(tmp_path / name) for name in ("old", "new", "out"))
    assert main(["collect", old, "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{out}/h200/synthetic.parquet"
    assert main(["compare", f"{out}/h200", old]) == 0
    text = capsys.readouterr().out
    assert "2 cells compared, 0 only in the old records, 0 only in the new" in text
    assert text.splitlines()[-1].startswith("median time, new against old: differs by 0.0 % in the median cell")
    assert main(["compare", old, new]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "1 cells got worse; their times are not compared:"
    assert shown[1].startswith("  pot") and "ok -> error" in shown[1]
    assert any(line.split()[0] == "keops" and "+0.0 %" in line for line in shown if line.strip())


def test_a_report_reads_where_run_wrote_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ["--report", "experiments.memory.report"]
    append(tmp_path / "again" / "forward" / "measurements.jsonl", record("keops", experiment="forward"))
    assert main(["report", "forward", "out_dir=again", *quick]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "records: again/forward" and "report: again/forward/report/table.md" in shown
    assert main(["report", "forward", "--out-dir=again", "--out=there", *quick]) == 0
    assert "report: there/table.md" in capsys.readouterr().out.splitlines()
    assert main(["report", "table2", "out_dir=again"]) == 2
    assert capsys.readouterr().err == (
        "fsbench: no records in again/table2: fsbench run experiment=table2 out_dir=again\n"
    )
    assert main(["report", "forward", "out_dir=again", "--records=again/forward"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_published_records_are_named_and_their_folder_gets_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_PUBLISHED", tmp_path / "published")
    append(tmp_path / "old" / "measurements.jsonl", record("keops", experiment="quickstart"))
    append(tmp_path / "old" / "environments.jsonl", GPU)
    assert main(["collect", "old"]) == 0
    before = sorted((tmp_path / "published").rglob("*"))
    for choice in ([], ["quickstart"], ["quickstart", f"--records={before[0]}"]):  # twice: a report is not a record
        capsys.readouterr()
        assert main(["report", *choice, "--report=experiments.memory.report"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert "report: results/raw/quickstart/report/table.md" in shown
        assert (shown[0] == "no experiment given: quickstart") is (not choice)
        named = [line for line in shown if line.startswith("records: ")]
        assert named == [f"records: {tmp_path}/published/h200/quickstart.parquet"] * (len(choice) < 2)
    assert sorted((tmp_path / "published").rglob("*")) == before


def test_a_folder_of_run_folders_is_answered_with_the_one_it_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append(tmp_path / "again" / "forward" / "measurements.jsonl", record("keops"))
    (tmp_path / "again" / "logs").mkdir()
    assert main(["compare", "again/forward", "again"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean again/forward?\n")
    append(tmp_path / "again" / "table2" / "measurements.jsonl", record("keops"))
    assert main(["compare", "again/forward", "again"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_run_says_that_other_processes_kept_the_machine_busy(home):
    """The load is put into the record; the run that shows it again finds it as an earlier one's."""
    mine = ["run", "experiment=mine", "solver=toy", "timing=quick", "--config-dir=conf"]
    assert fsbench(home, *mine).returncode == 0
    (measured,) = read_lines(home / "results/raw/mine/measurements.jsonl")
    n_cpus = len(os.sched_getaffinity(0))
    line = f"of {n_cpus} CPUs busy during sampling: times of 1 cell may be too long"
    for load, said in ((0.25 * n_cpus, False), (0.75 * n_cpus, True)):
        append(home / "results/raw/mine/measurements.jsonl", measured | {"host_load_cpus": load})
        shown = fsbench(home, *mine).stdout.splitlines()
        assert (f"other processes kept up to {load:.1f} {line}" in shown) is said, shown


def test_doctor_tries_each_solver_and_names_the_cure(home, monkeypatch, capsys):
    """Own solvers only: those of the checkout are tried by their contract tests."""
    own = {path.stem: path for path in (home / "conf" / "solver").glob("*.yaml")}
    real = compose.names
    monkeypatch.setattr(compose, "names", lambda group, dirs=(): own if group == "solver" else real(group, dirs))
    monkeypatch.chdir(home)
    assert main(["doctor", "--config-dir", "conf"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["toy"].split() == ["toy", "yes"]
    assert "toy is broken" in lines["bad"]
    assert "pip install toy-of-nobody" in lines["absent"]


def rendered(rows) -> list[str]:
    console = Console(width=100, file=io.StringIO())
    console.print(progress.summary(rows))
    return console.file.getvalue().splitlines()


def test_summary_fits_a_terminal_with_failures_in_their_place():
    names = ("flash_sinkhorn_pypi_symmetric_tf32", "keops", "ott_jax_online", "pot", "tensorized", "toy", "late")
    cells = [replace(fake_cell(name), n=134_217_728, m=100_000_000, d=1024) for name in names]
    rows = [
        (cell, record(cell.solver, status=status, mode="to_residual", tol=0.01, time_s=12.3))
        for cell, status in zip(cells, Status, strict=False)
    ]
    rows.append((cells[-1], None))
    lines = rendered(rows)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for status in ("ok", "not_converged", "oom", "timeout", "unsupported", "error", "not run"):
        assert status in text
    assert len(progress.failures(rows)) == 4


def test_budgets_of_one_run_are_told_apart():
    """As in lowepsilon: the same sizes at fixed iterations and to a residual, or to several."""
    cell = fake_cell("keops")
    to_residual = {"mode": "to_residual", "tol": 1e-3}
    rows = [(cell, record("keops")), (replace(cell, budget=ToResidual(1e-3)), record("keops", **to_residual))]
    lines = rendered(rows)
    assert "budget" in lines[1] and "1 iterations" in lines[3] and "tol 0.001" in lines[4]
    assert "budget" not in rendered(rows[:1])[1]
    assert [progress.describe(got).partition("eps=0.1")[2] for _, got in rows] == ["", " tol=0.001"]


def test_a_miss_just_above_the_target_shows():
    missed = record("keops", status=Status.NOT_CONVERGED, residual_l1=0.01042, mode="to_residual", tol=0.01)
    assert any("1.04e-02" in line for line in rendered([(fake_cell("keops"), missed)]))


def test_numbers_are_short():
    assert [progress.format_seconds(s) for s in (None, 0.0000123, 0.0123, 1.5, 5400.0)] == [
        "-", "12.3 us", "12.3 ms", "1.5 s", "5400 s"
    ]  # fmt: skip
    assert [progress.format_bytes(b) for b in (None, 12, 1_200, 3_450_000, 80_000_000_000)] == [
        "-", "12 B", "1.2 kB", "3.45 MB", "80 GB"
    ]  # fmt: skip


def test_a_bar_on_a_terminal_with_cells_done_current_cell_and_time_left():
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with progress.RunProgress(console, 4) as bar:
        bar.resumed(1)
        bar.measuring(fake_cell("keops", 77))
        bar.ended(record("keops", status=Status.ERROR))
        bar._bar.refresh()
    shown = console.file.getvalue()
    for text in ("keops n=77", "2/4", "0:00:00 left", "it broke"):
        assert text in shown


def test_shards_keep_comparisons_whole_and_lose_no_cell(tmp_path):
    plan = fake_plan(tmp_path, *(fake_cell(name, n) for n in (10, 20, 30) for name in ("a", "b")))
    parts = [shard(plan, index, 2).cells for index in range(2)]
    assert sorted(cell.cell_id for part in parts for cell in part) == sorted(cell.cell_id for cell in plan.cells)
    for part in parts:
        groups = [list(group) for _, group in itertools.groupby(part, key=lambda cell: cell.group_id)]
        assert all(len(group) == 2 for group in groups)


def test_shards_through_submitit_land_in_one_folder(tmp_path):
    pytest.importorskip("submitit")
    settings = {"kind": "slurm", "shards": 2, "cluster": "local", "parameters": {"timeout_min": 5}}
    cells = [fake_cell("nobody", n) for n in (10, 20, 30)]
    plan = fake_plan(tmp_path / "out", *cells, launcher=settings)
    outcome = run_shards(plan)
    assert [row["status"] for _, row in outcome.rows] == ["error"] * 3  # nowhere.Fake, asked of real workers
    assert all("nowhere" in row["status_detail"] for _, row in outcome.rows)
    files = sorted(path.name for path in (tmp_path / "out" / "fake").glob("measurements*.jsonl"))
    assert files == ["measurements-shard-1-of-2.jsonl", "measurements-shard-2-of-2.jsonl"]

"""The record's rules, its schema as it was published, durable appending, and the merge of run folders."""

from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import fake_cell
from record_factory import CPU, GPU, record
from rich.console import Console

from fsbench import collect as collecting
from fsbench import records
from fsbench.collect import collect, gpu_slug, newest
from fsbench.compare import baseline_for, compare, show
from fsbench.records import Status, append, check_record, latest, read_lines

GOLDENS = Path(__file__).parent / "goldens"


def test_schema_is_the_published_one():
    """A column that comes, goes or changes its type needs a new SCHEMA_VERSION and a golden file of its own."""
    golden = json.loads((GOLDENS / f"schema_v{records.SCHEMA_VERSION}.json").read_text())
    assert golden["schema_version"] == records.SCHEMA_VERSION
    assert {field.name: str(field.type) for field in records.MEASUREMENTS} == golden["measurements"]
    assert {field.name: str(field.type) for field in records.ENVIRONMENTS} == golden["environments"]


def test_published_records_are_still_valid():
    golden = read_lines(GOLDENS / f"records_v{records.SCHEMA_VERSION}.jsonl")
    assert [made["status"] for made in golden] == [str(status) for status in Status]
    for made in golden:
        check_record(made)
    table = pa.Table.from_pylist(golden, schema=records.MEASUREMENTS)
    assert table.num_rows == len(Status)


def test_records_of_the_first_schema_are_read_as_forward_solves(folder, tmp_path):
    old = read_lines(GOLDENS / "records_v1.jsonl")
    assert {made["schema_version"] for made in old} == {1} and "task" not in old[0]
    run = folder("old", *old, environments=({"env_id": env_id} for env_id in {made["env_id"] for made in old}))
    for made in collecting.read(run)[0]:
        check_record(made)
        assert (made["schema_version"], made["task"]) == (records.SCHEMA_VERSION, "forward")
    (file, _) = collect([run], tmp_path / "out")
    assert set(pq.ParquetFile(file).read()["task"].to_pylist()) == {"forward"}


def test_records_of_the_second_schema_are_read_without_the_host_s_load(folder, tmp_path):
    old = read_lines(GOLDENS / "records_v2.jsonl")
    assert {made["schema_version"] for made in old} == {2} and "host_load_cpus" not in old[0]
    run = folder("old", *old, environments=({"env_id": env_id} for env_id in {made["env_id"] for made in old}))
    for made in collecting.read(run)[0]:
        check_record(made)
    (file, _) = collect([run], tmp_path / "out")
    table = pq.ParquetFile(file).read()
    assert set(table["schema_version"].to_pylist()) == {records.SCHEMA_VERSION}
    assert set(table["host_load_cpus"].to_pylist()) == {None}


def test_records_of_the_third_schema_are_read_without_a_divergence(folder, tmp_path):
    old = read_lines(GOLDENS / "records_v3.jsonl")
    assert {made["schema_version"] for made in old} == {3} and "value" not in old[0]
    run = folder("old", *old, environments=({"env_id": env_id} for env_id in {made["env_id"] for made in old}))
    for made in collecting.read(run)[0]:
        check_record(made)
    (file, _) = collect([run], tmp_path / "out")
    assert set(pq.ParquetFile(file).read()["value"].to_pylist()) == {None}


def test_records_of_the_fourth_schema_are_read_without_a_residual_on_rounded_points(folder, tmp_path):
    old = read_lines(GOLDENS / "records_v4.jsonl")
    assert {made["schema_version"] for made in old} == {4} and "residual_solved_l1" not in old[0]
    run = folder("old", *old, environments=({"env_id": env_id} for env_id in {made["env_id"] for made in old}))
    for made in collecting.read(run)[0]:
        check_record(made)
    (file, _) = collect([run], tmp_path / "out")
    assert set(pq.ParquetFile(file).read()["residual_solved_l1"].to_pylist()) == {None}


def test_records_of_the_fifth_schema_are_read_without_numbers_of_the_solver_s_own(folder, tmp_path):
    old = read_lines(GOLDENS / "records_v5.jsonl")
    assert {made["schema_version"] for made in old} == {5} and "solver_stats" not in old[0]
    run = folder("old", *old, environments=({"env_id": env_id} for env_id in {made["env_id"] for made in old}))
    for made in collecting.read(run)[0]:
        check_record(made)
    (file, _) = collect([run], tmp_path / "out")
    assert set(pq.ParquetFile(file).read()["solver_stats"].to_pylist()) == {None}


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"speed": 1}, "unknown columns ['speed']"),
        ({"status": "fine"}, "fine"),
        ({"residual_l1": None}, "needs ['residual_l1']"),
        ({"env_id": None}, "needs ['env_id']"),
        ({"residual_l1": float("nan")}, "column residual_l1"),
        ({"time_to_solution_s": float("inf")}, "column time_to_solution_s"),
        ({"samples_s": [0.1, float("nan")]}, "column samples_s"),
        ({"curve": [{"iteration": 1, "seconds": 0.1, "residual": float("inf")}]}, "column curve"),
        ({"mode": "to_residual"}, "needs tol"),
        ({"n": "many"}, "many"),
    ],
)
def test_broken_records_are_refused_with_the_column_named(change, needle):
    made = record() | change
    with pytest.raises((ValueError, TypeError)) as error:
        check_record(made)
    assert needle in str(error.value)


@pytest.mark.parametrize("status", [Status.OOM, Status.TIMEOUT, Status.UNSUPPORTED, Status.ERROR])
def test_failures_carry_a_reason_and_no_result(status):
    with pytest.raises(ValueError, match="status_detail"):
        check_record(record(status=status) | {"status_detail": None})
    with pytest.raises(ValueError, match="must leave"):
        check_record(record(status=status) | {"residual_l1": 0.1})


def test_no_limit_is_null():
    check_record(record(timeout_s=None))
    assert records.describe(fake_cell("a", timeout_s=None))["timeout_s"] is None


def test_description_of_a_cell_fills_the_planned_columns():
    described = records.describe(fake_cell("a", speed=2))
    assert set(described) <= set(records.MEASUREMENTS.names)
    assert json.loads(described["solver_params"]) == {"name": "a", "speed": 2}
    assert (described["mode"], described["max_iterations"], described["tol"]) == ("fixed_iterations", 1, None)
    assert described["task"] == "forward"


def _append_many(path: Path, solver: str) -> None:
    for n in range(50):
        append(path, record(solver, n=n + 1))


def test_two_processes_append_to_one_file(tmp_path):
    path = tmp_path / "measurements.jsonl"
    workers = [multiprocessing.get_context("spawn").Process(target=_append_many, args=(path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({made["cell_id"] for made in read_lines(path)}) == 100


@pytest.mark.parametrize("cut", [1, 2, 50, 300])
def test_a_cut_line_is_dropped_and_the_next_is_whole(tmp_path, cut):
    path = tmp_path / "measurements.jsonl"
    append(path, record("a"))
    append(path, record("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    append(path, record("c"))
    # Without its newline alone, the second line is still whole.
    assert [made["solver"] for made in read_lines(path)] == (["a", "b", "c"] if cut == 1 else ["a", "c"])


def test_latest_is_by_cell_code_and_environment():
    rows = [record("a", time_s=1.0), record("a", time_s=2.0), record("a", code_id="other"), record("b")]
    assert latest(rows) == rows[1:]


@pytest.fixture
def folder(tmp_path):
    def make(name: str, *rows: dict, environments=(GPU, CPU)) -> Path:
        for made in rows:
            append(tmp_path / name / "measurements.jsonl", made)
        for row in environments:
            append(tmp_path / name / "environments.jsonl", row)
        return tmp_path / name

    return make


def published(out: Path, gpu: str = "h200") -> dict[str, dict]:
    return {row["record_id"]: row for row in pq.ParquetFile(out / gpu / "synthetic.parquet").read().to_pylist()}


def test_overlapping_runs_merge_to_one_row_a_cell_the_newest(folder, tmp_path):
    day1, day2 = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"
    old = folder("old", record("a", record_id="a1", started_at=day1), record("b", record_id="b1", started_at=day1))
    new = folder("new", record("b", record_id="b2", started_at=day2), record("c", record_id="c2", started_at=day2))
    for order, out in (([old, new], tmp_path / "out1"), ([new, old], tmp_path / "out2")):
        collect(order, out)
        assert set(published(out)) == {"a1", "b2", "c2"}
    collect([old], tmp_path / "out1")  # again: what is published and newer stays
    assert set(published(tmp_path / "out1")) == {"a1", "b2", "c2"}


def test_environments_go_along_and_gpus_apart(folder, tmp_path):
    run = folder("run", record("a"), record("b", env_id="cpu", device="cpu"))
    files = collect([run], tmp_path / "out")
    assert sorted(str(file.relative_to(tmp_path / "out")) for file in files) == [
        "cpu/environments.parquet", "cpu/synthetic.parquet", "h200/environments.parquet", "h200/synthetic.parquet"
    ]  # fmt: skip
    environments = pq.read_table(tmp_path / "out" / "h200" / "environments.parquet").to_pylist()
    assert [row["gpu_name"] for row in environments] == ["NVIDIA H200"]
    assert pq.ParquetFile(tmp_path / "out" / "h200" / "synthetic.parquet").schema_arrow.equals(records.MEASUREMENTS)


def test_shards_of_one_folder_are_read_together(folder, tmp_path):
    run = folder("run", record("a", record_id="a"))
    append(run / "measurements-shard-2-of-2.jsonl", record("b", record_id="b"))
    collect([run], tmp_path / "out")
    assert set(published(tmp_path / "out")) == {"a", "b"}


def test_old_schema_lost_environment_and_empty_folder_are_told(folder, tmp_path):
    old = folder("old", record("a") | {"schema_version": 0})
    with pytest.raises(ValueError, match="version 0; this fsbench reads versions 1, 2, 3, 4, 5, 6: run"):
        collect([old], tmp_path / "out")
    with pytest.raises(ValueError, match="has no environment"):
        collect([folder("lost", record("a"), environments=())], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no records"):
        collect([tmp_path / "nothing"], tmp_path / "out")


def test_a_newer_failure_replaces_a_success():
    rows = [record("a", started_at="2026-01-02"), record("a", status=Status.ERROR, started_at="2026-01-03")]
    assert [row["status"] for row in newest(rows)] == ["error"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
     (None, "cpu")],
)  # fmt: skip
def test_folder_name_of_a_gpu(name, slug):
    assert gpu_slug({"gpu_name": name}) == slug


def test_compare_puts_correctness_first(folder):
    samples = [1.0, 1.01, 1.02, 0.99, 0.98]
    old = folder("old", *(record(name, samples_s=samples) for name in ("a", "b", "c", "d")), record("gone"))
    new = folder(
        "new",
        record("a", samples_s=[2 * s for s in samples]),
        record("b", status=Status.ERROR),
        record("c", samples_s=[s / 2 for s in samples], residual_l1=0.1),
        record("d", samples_s=samples),
    )
    found = compare(old, new)
    assert [line.split()[0] for line in found.broken] == ["b", "c"]
    assert "residual 4.0e-03 -> 1.0e-01" in found.broken[1]
    ratios = {pair[0]["solver"]: pair[2:] for pair in found.pairs}
    assert set(ratios) == {"a", "d"}
    assert ratios["a"][0] == pytest.approx(2.0)
    assert ratios["a"][1] < 0.02
    assert ratios["d"] == (pytest.approx(1.0), pytest.approx(1.0))
    assert (found.n_only_old, found.n_only_new) == (1, 0)


def test_compare_says_how_far_two_runs_of_the_same_code_are_apart(folder):
    factors = {"a": 1.001, "b": 0.99, "c": 1.02, "d": 0.95, "e": 1.0}
    old = folder("old", *(record(name, time_s=0.01) for name in factors))
    new = folder("new", *(record(name, time_s=0.01 * factor) for name, factor in factors.items()))
    console = Console(width=120, file=io.StringIO())
    show(compare(old, new), console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    head = next(line for line in lines if line[:1] == ["cell"])
    assert head == ["cell", "old", "new", "difference", "p"]
    assert next(line for line in lines if line[:1] == ["d"])[-7:-1] == ["10", "ms", "9.5", "ms", "-5.0", "%"]
    assert " ".join(lines[-1]) == (
        "median time, new against old: differs by 1.0 % in the median cell, worst -5.0 % "
        "(d gaussian n=1000 d=64 eps=0.1); 4 of 5 within 3 %"
    )


def test_compare_says_which_side_was_measured_on_a_busy_machine(folder):
    """A quarter of 16 CPUs is not busy yet, and a load on a machine that nothing is known of says nothing."""
    machine = GPU | {"cpu_count": 16}
    loads = {"a": (4.0, 4.1), "b": (None, 6.04), "c": (0.0, 0.1)}
    quiet = folder("quiet", *(record(n, host_load_cpus=load[0]) for n, load in loads.items()), environments=(machine,))
    rows = [*(record(n, host_load_cpus=load[1]) for n, load in loads.items()), record("unmatched", host_load_cpus=9.0)]
    busy, unknown = folder("busy", *rows, environments=(machine,)), folder("unknown", *rows, environments=())
    line = "other processes kept up to 6.0 of 16 CPUs busy during sampling: times of 2 cells may be too long"
    for old, new, expected in (
        (quiet, busy, [f"new: {line}"]), (busy, quiet, [f"old: {line}"]), (quiet, quiet, []), (unknown, quiet, [])
    ):  # fmt: skip
        console = Console(width=60, file=io.StringIO())
        show(compare(old, new), console)
        assert [text for text in console.file.getvalue().splitlines() if "other processes" in text] == expected


def test_compare_reads_published_tables(folder, tmp_path):
    run = folder("run", record("a"))
    collect([run], tmp_path / "out")
    found = compare(tmp_path / "out" / "h200" / "synthetic.parquet", run)
    assert [pair[2] for pair in found.pairs] == [1.0]
    assert collecting.read(tmp_path / "out" / "h200")[1][0]["gpu_name"] == "NVIDIA H200"


def test_gate_is_red_on_a_significant_slowdown_and_on_a_missing_cell(folder, tmp_path):
    samples = [1 + 0.001 * k for k in range(12)]
    old = folder("old", record("a", samples_s=samples), record("b", samples_s=samples))
    collect([old], tmp_path / "baseline")
    baseline = baseline_for(old, tmp_path / "baseline")
    same = compare(baseline, old)
    assert same.passes and not same.slower
    slow = folder("slow", record("a", samples_s=[1.1 * s for s in samples]), record("b", samples_s=samples))
    found = compare(baseline, slow)
    assert [pair[1]["solver"] for pair in found.slower] == ["a"] and not found.passes
    noisy = folder("noisy", record("a", samples_s=[1.04 * s for s in samples]), record("b", samples_s=samples))
    assert compare(baseline, noisy).passes
    assert not compare(baseline, folder("fewer", record("a", samples_s=samples))).passes
    with pytest.raises(FileNotFoundError, match="fsbench collect"):
        baseline_for(old, tmp_path / "nowhere")

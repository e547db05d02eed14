"""Records from disk into a data frame: every layout, odd data, other schemas."""

import json
import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_factory import CPU, GPU, record

from fsbench.records import ENVIRONMENTS, MEASUREMENTS, SCHEMA_VERSION, Status, append
from fsbench.report import load
from fsbench.report.load import join


def write_run(folder, records, environments=(GPU, CPU)):
    for row in records:
        append(folder / "measurements.jsonl", row)
    for row in environments:
        append(folder / "environments.jsonl", row)
    return folder


def write_parquet(folder, name, records, environments=(GPU, CPU)):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(records), schema=MEASUREMENTS), folder / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist(list(environments), schema=ENVIRONMENTS), folder / "environments.parquet")
    return folder / f"{name}.parquet"


def test_run_folder_and_parquet_hold_the_same(tmp_path):
    rows = [
        record("keops", n=1000),
        record("pot", n=2000, status=Status.OOM),
        record("pot", env_id="cpu", device="cpu"),
    ]
    from_lines = load(write_run(tmp_path / "run", rows))
    file = write_parquet(tmp_path / "h200", "table2", rows)
    for frame in (load(file), load(file.parent)):
        assert frame.drop(columns=["samples_s", "curve"]).equals(from_lines.drop(columns=["samples_s", "curve"]))
        assert frame["samples_s"].tolist() == from_lines["samples_s"].tolist()
    assert from_lines["gpu_name"].tolist() == ["NVIDIA H200", "NVIDIA H200", None]
    assert from_lines["cpu_count"].tolist()[2] == 2


def test_the_last_record_of_a_cell_stays(tmp_path):
    first = record("keops", status=Status.ERROR)
    second = record("keops", time_s=0.5, started_at="2026-01-02T00:00:00+00:00")
    other_code = record("keops", time_s=0.7, code_id="newer")
    frame = load(write_run(tmp_path, [second, first, other_code]))
    assert sorted(frame["time_to_solution_s"]) == [0.5, 0.7]


def test_shards_are_merged_and_a_torn_line_is_dropped(tmp_path):
    append(tmp_path / "measurements.0.jsonl", record("keops"))
    append(tmp_path / "measurements.1.jsonl", record("pot"))
    with (tmp_path / "measurements.1.jsonl").open("a") as file:
        file.write('{"cell_id": "cut of')
    assert set(load(tmp_path)["solver"]) == {"keops", "pot"}


@pytest.mark.parametrize("version", [0, 99, None, "old"])
def test_another_schema_is_one_clear_line(tmp_path, version):
    row = {**record("keops"), "schema_version": version}
    (tmp_path / "measurements.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="schema version") as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_records_of_the_first_schema_load_as_forward_solves(tmp_path):
    row = {name: value for name, value in record("keops").items() if name != "task"} | {"schema_version": 1}
    loaded = load(write_run(tmp_path, [row]))
    assert loaded["task"].tolist() == ["forward"] and loaded["schema_version"].tolist() == [SCHEMA_VERSION]
    assert loaded["git_commit"].tolist() == [None] and loaded["gradient_rel_err"].isna().all()


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_no_records_is_one_clear_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no records"):
        load(tmp_path / name)


def test_odd_values_become_missing():
    odd = {
        **record("keops"),
        "time_to_solution_s": "?",
        "residual_l1": math.inf,
        "half_step_error": math.nan,
        "n": "2000",
        "status": "unheard of",
        "residual_reached": "true",
        "samples_s": None,
        "curve": "none",
        "problem": 7,
    }
    frame = join([odd])
    assert frame.loc[0, "n"] == 2000
    assert frame.loc[0, ["time_to_solution_s", "residual_l1", "half_step_error"]].isna().all()
    assert frame.loc[0, "status"] is None and frame.loc[0, "problem"] is None
    assert bool(frame.loc[0, "residual_reached"]) is True
    assert frame.loc[0, "samples_s"] == [] and frame.loc[0, "curve"] == []


def test_no_rows_keep_every_column():
    frame = join([])
    assert len(frame) == 0
    assert set(MEASUREMENTS.names) | set(ENVIRONMENTS.names) <= set(frame.columns)


def test_reports_need_no_solver_and_no_gpu_framework():
    code = (
        "import sys, experiments.memory, experiments.quickstart, experiments.table2, experiments.table3\n"
        "bad = {'torch', 'jax', 'triton', 'pykeops', 'solvers', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

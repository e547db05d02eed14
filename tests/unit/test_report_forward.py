"""The n x d report against the published package: its ratios, its least cell, how missing runs show, and a real run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_factory import record
from test_report_experiments import frame, rows_of

from experiments import forward
from fsbench.records import Status, read_lines

ROOT = Path(__file__).parents[2]
FAST, EXACT = "flash_sinkhorn_fast", "flash_sinkhorn"
TF32, FP32 = "flash_sinkhorn_pypi_tf32", "flash_sinkhorn_pypi_fp32"


def grid_records():
    """TF32 takes 2, 8, 4 times ours at (1k, 3), (1k, 64), (2k, 3); FP32 runs out of time; (2k, 64) is incomplete."""
    for (n, d), times in {(1000, 3): 2, (1000, 64): 8, (2000, 3): 4}.items():
        yield record(FAST, n=n, d=d, time_s=0.001, half_step_error=0.2)
        yield record(EXACT, n=n, d=d, time_s=0.002)
        yield record(TF32, n=n, d=d, time_s=0.001 * times, half_step_error=0.1 * times)
    yield record(FP32, n=1000, d=3, time_s=0.016)
    yield record(FP32, n=1000, d=64, status=Status.TIMEOUT)
    yield record(FP32, n=2000, d=3, status=Status.TIMEOUT, inferred_from="smaller")
    yield record(FAST, n=2000, d=64)
    yield record(EXACT, n=2000, d=64, status=Status.OOM)
    yield record(FP32, n=2000, d=64)


@pytest.fixture
def blocks(tmp_path):
    """Rows of each table of speedups.md: the summary and a grid a pair."""
    forward.report(frame(list(grid_records())), tmp_path)
    parts = (tmp_path / "speedups.md").read_text().split("\n\n**")
    found = {}
    for part in parts:
        path = tmp_path / "part.md"
        path.write_text(part)
        found[part.removeprefix("**").split(" on NVIDIA H200")[0]] = rows_of(path)
    return found


def test_the_summary_has_mean_least_cell_counts_and_errors(blocks):
    head, _, fast, exact, fp32 = blocks["Speed-ups"]
    assert head[2:] == [
        "cells", "geometric mean (×)", "median (×)", "least (×)", "least at", "cells not faster", "error, ours",
        "error, other",
    ]  # fmt: skip
    assert fast[:2] == ["FlashSinkhorn, 10-bit", "flash-sinkhorn PyPI, TF32"]
    assert fast[2:] == ["3 of 4", "4.00", "4.00", "2.00", "n = 1k, d = 3", "0", "0.200", "0.800"]
    assert exact[2:] == ["3 of 4", "2.00", "2.00", "1.00", "n = 1k, d = 3", "1", "3.00e-05", "0.800"]
    assert fp32[2:6] == ["1 of 4", "8.00", "8.00", "8.00"]


def test_a_grid_shows_every_cell_and_how_the_missing_ones_ended(blocks):
    assert blocks["Speed-up of FlashSinkhorn, 10-bit over flash-sinkhorn PyPI, TF32"][2:] == [
        ["1000", "2.00", "8.00"],
        ["2000", "4.00", "–"],
    ]
    assert blocks["Speed-up of FlashSinkhorn over flash-sinkhorn PyPI, FP32"][2:] == [
        ["1000", "8.00", "OOT"],
        ["2000", "OOT†", "ours OOM"],
    ]


def test_the_package_that_never_ran_is_a_grid_of_dashes(tmp_path):
    forward.report(frame([record(FAST, n=n) for n in (1000, 2000)]), tmp_path)
    rows = [row for row in rows_of(tmp_path / "speedups.md") if row[0] in ("1000", "2000")]
    assert rows == [["1000", "–"], ["2000", "–"]]


def test_what_differs_beyond_n_and_d_is_never_in_one_grid(tmp_path):
    rows = [record(s, eps=eps, time_s=t / eps) for eps in (0.1, 0.5) for s, t in ((FAST, 0.01), (TF32, 0.03))]
    rows += [record(s, m=500, time_s=t) for s, t in ((FAST, 0.01), (TF32, 0.05))]
    forward.report(frame(rows), tmp_path)
    text = (tmp_path / "speedups.md").read_text()
    for setting, ratio in (("eps = 0.1, m = n", "3.00"), ("eps = 0.5, m = n", "3.00"), ("eps = 0.1, m = 500", "5.00")):
        block = text.split(f"TF32 on NVIDIA H200 (gaussian, {setting})**")[1].split("**")[0]
        assert f"| 1000 | {ratio} |" in block


def test_runs_end_to_end_without_a_gpu(tmp_path):
    pytest.importorskip("pykeops")
    command = [sys.executable, "-m", "fsbench", "run", "experiment=forward", "device=cpu"]
    command += ["n=[50,70]", "d=[3]", "timing=quick", f"out_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    records = read_lines(tmp_path / "forward" / "measurements.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["solver"], row["n"], row["status"]) for row in records] == [
        (solver, n, "ok") for n in (50, 70) for solver in ("flash_sinkhorn", "keops")
    ]
    summary = rows_of(tmp_path / "forward" / "report" / "speedups.md")[2]
    assert summary[:3] == ["FlashSinkhorn", "KeOps", "2 of 2"] and float(summary[3]) > 0

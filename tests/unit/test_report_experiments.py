"""Every experiment's report: its columns and notes, and that it renders whatever the records are."""

import importlib
import math
from functools import cache
from pathlib import Path

import pytest
import yaml
from record_factory import CPU, GPU, record

from experiments import (
    common,
    forward,
    general,
    hvp,
    lowepsilon,
    memory,
    quickstart,
    residuals,
    table2,
    table3,
    time_to_residual,
)
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.load import join

pytestmark = pytest.mark.usefixtures("no_pixels")
SAVE = figures.save
CONF = Path(__file__).parents[2] / "conf" / "experiment"
REPORTS = [
    general.report,
    quickstart.report,
    table2.report,
    table3.report,
    memory.report,
    time_to_residual.report,
    lowepsilon.report,
    hvp.report,
    forward.report,
    residuals.report,
]
ONLY_OK = {"mode": "to_residual", "tol": 1e-2}
COUNTERS = {
    "hbm_read_bytes": 60e6, "hbm_write_bytes": 20e6, "sm_throughput_pct": 74.0, "memory_stall_pct": 3.0,
    "kernel_launches": 130,
}  # fmt: skip


def frame(records):
    return join(records, [GPU, CPU])


def rows_of(path):
    """Cells of every Markdown table row, by its first cell or cells."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def column(rows, name):
    return next(i for i, header in enumerate(rows[0]) if header.startswith(name))


def row(rows, name):
    return next(cells for cells in rows if cells[0] == name)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_names_its_report_and_its_question(path):
    settings = yaml.safe_load(path.read_text())
    assert settings["experiment"] == path.stem and settings["question"].endswith("?")
    module, _, function = settings["report"].rpartition(".")
    found = importlib.import_module(module)
    assert callable(getattr(found, function)) and "?" in found.__doc__.splitlines()[0]


def odd_records():
    """Records as no harness should write them, each kind by name."""
    good = [record(s, n=n) for s in ("flash_sinkhorn", "keops") for n in (1000, 2000)]
    nothing = {name: None for name in good[0]}
    yield "none", []
    yield "one", good[:1]
    yield "all failed", [record(s, status=Status.ERROR) for s in ("flash_sinkhorn", "keops")]
    yield (
        "reference failed",
        [record("flash_sinkhorn", n=r["n"], d=r["d"], status=Status.OOM) for r in good[:2]] + good[2:],
    )
    yield "partial", good[:3]
    yield "empty columns", [{**nothing, "solver": r["solver"], "cell_id": str(i)} for i, r in enumerate(good)]
    numbers = [name for name, found in good[0].items() if isinstance(found, float | int) and name != "eps"]
    for value in (math.nan, math.inf, "?", -1):
        yield f"{value!r} everywhere", [{**r, **dict.fromkeys(numbers, value)} for r in good]
    for value in (math.inf, "?", 0):
        yield f"{value!r} in times", [{**good[0], "time_to_solution_s": value, "time_q25_s": value}, *good[1:]]
    yield "no environment", [{**r, "env_id": "unknown"} for r in good]
    yield "odd traces", [{**r, **ONLY_OK, "curve": [None, {"seconds": "?"}], "ladder": "{oops"} for r in good]


ODD = dict(odd_records())


@cache
def odd_frame(kind):
    return frame(ODD[kind])


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__module__)
@pytest.mark.parametrize("kind", ODD)
def test_renders_whatever_the_records_are(report, kind, tmp_path):
    paths = report(odd_frame(kind).copy(), tmp_path)
    assert {path.suffix for path in paths} >= {".md", ".csv", ".tex", ".txt"}
    for path in paths:
        if path.suffix in (".md", ".txt", ".tex", ".csv"):
            words = path.read_text().replace("|", " ").replace("&", " ").replace(",", " ").split()
            assert not {"nan", "inf", "-inf", "None", "NaN", "?", "<NA>"} & set(words), path.read_text()
            assert all(len(line) <= 100 for line in path.read_text().splitlines() if path.suffix == ".txt")


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__module__)
def test_files_are_where_the_report_says(report, tmp_path, monkeypatch):
    if report is general.report:
        monkeypatch.setattr(figures, "save", SAVE)  # pixels too
    records = [record(s, n=n, d=d, **ONLY_OK) for s in ("keops", "pot") for n, d in ((1000, 3), (1000, 64), (2000, 3))]
    paths = report(frame(records), tmp_path / "new")
    assert all(path.is_file() and path.stat().st_size for path in paths)
    assert len(set(paths)) == len(paths)
    assert {path.suffix for path in paths} == {".md", ".csv", ".tex", ".txt", ".png", ".svg"}


def test_table2_on_a_gpu_has_counters_and_the_published_rows_apart(tmp_path):
    rows = [record("flash_sinkhorn_fast", n=10_000, time_s=0.004, **COUNTERS)]
    rows.append(record("pot", n=10_000, counters_detail="not measured (ncu may not read counters)"))
    rows.append(record("tensorized", n=10_000, status=Status.OOM))
    table2.report(frame(rows), tmp_path)
    cells = rows_of(tmp_path / "table.md")
    ours = row(cells, "FlashSinkhorn, 10-bit")
    expected = {"time (ms)": "4.00", "HBM read + write (GB)": "0.0800", "SM use (%)": "74", "memory stalls (%)": "3"}
    expected |= {
        "kernel launches": "130",
        "passes": "20",
        "half-step error / eps": "3.00e-05",
        "residual L1": "0.00400",
    }
    for name, text in expected.items():
        assert ours[cells[0].index(name)] == text
    published = row(cells, "FlashSinkhorn, published (A100)")
    assert published[column(cells, "time")] == "8.20" and published[column(cells, "kernel launches")] == "130"
    assert set(row(cells, "tensorized")[2:]) == {"OOM"}
    assert row(cells, "POT")[column(cells, "SM use")] == "not measured"
    text = (tmp_path / "table.md").read_text()
    assert "Counters: not measured (ncu may not read counters)." in text
    assert "not measured here" in text and "throughput test" in text


def test_table2_on_a_cpu_says_why_there_are_no_counters(tmp_path):
    cpu = {"device": "cpu", "env_id": "cpu", "counters_detail": "not measured (no GPU)"}
    table2.report(frame([record("keops", n=2000, **cpu), record("pot", n=2000, device="cpu", env_id="cpu")]), tmp_path)
    cells = rows_of(tmp_path / "table.md")
    for solver in ("KeOps", "POT"):
        assert row(cells, solver).count("not measured (no GPU)") == 4
    assert any(header.startswith("peak memory, host") for header in cells[0])


def table3_records():
    solvers = {"flash_sinkhorn": 1.0, "flash_sinkhorn_fast": 0.5, "flash_sinkhorn_pypi_tf32": 1.5, "keops": 8.0}
    for n in (10_000, 40_000):
        for solver, factor in solvers.items():
            yield record(solver, n=n, d=128, time_s=1e-3 * factor * (2 if n > 10_000 and solver == "keops" else 1))
        yield record("tensorized", n=n, d=128, **({"time_s": 0.002} if n < 20_000 else {"status": Status.OOM}))
    yield record("flash_sinkhorn", n=10_000, d=512)
    yield record("keops", n=10_000, d=512, status=Status.TIMEOUT)


def test_table3_compares_within_one_precision_and_shows_the_published_figures_apart(tmp_path):
    table3.report(frame(list(table3_records())), tmp_path)
    fp32, ten_bit = (tmp_path / "speedups.md").read_text().split("**Forward, ")[1:]
    assert fp32.startswith(common.FP32) and "KeOps" in fp32 and "TF32 (×)" not in fp32
    assert ten_bit.startswith(common.TEN_BIT) and "over KeOps" not in ten_bit
    rows = rows_of(tmp_path / "speedups.md")
    header = rows[0]
    first = next(cells for cells in rows if cells[:2] == ["128", "10000"])
    assert first[header.index("FlashSinkhorn over KeOps (×)")] == "8.00"
    assert first[header.index("over KeOps, published (A100) (×)")] == "9.4"
    second = next(cells for cells in rows if cells[:2] == ["128", "40000"])
    assert second[header.index("FlashSinkhorn over KeOps (×)")] == "16.0"
    assert second[header.index("FlashSinkhorn over tensorized (×)")] == "OOM"
    timed_out = next(cells for cells in rows if cells[:2] == ["512", "10000"])
    assert timed_out[header.index("FlashSinkhorn over KeOps (×)")] == "OOT"
    keops, tensorized = (header.index(f"FlashSinkhorn over {name} (×)") for name in ("KeOps", "tensorized"))
    mean, counts = row(rows, "geometric mean"), row(rows, "over")
    assert (mean[keops], counts[keops], counts[1]) == ("11.3", "2", "of 3 cells")
    assert (mean[tensorized], counts[tensorized]) == ("2.00", "1")
    assert "far from convergence" in fp32 and "only where both finished" in fp32


def test_table3_has_a_block_for_each_dimension(tmp_path):
    table3.report(frame(list(table3_records())), tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text.count("**Forward, FP32-grade: d = ") == 2 and text.count("**Forward, 10-bit: d = ") == 1


def test_table3_shows_the_others_when_ours_failed(tmp_path):
    rows = [record("flash_sinkhorn", status=Status.ERROR), record("keops", time_s=0.5)]
    table3.report(frame(rows), tmp_path)
    cells = next(c for c in rows_of(tmp_path / "speedups.md") if c[0] == "64")
    assert cells[2] == "ours err"
    assert any("KeOps" in c and "500" in c for c in rows_of(tmp_path / "table.md"))


def test_memory_has_both_numbers_and_exponents(tmp_path):
    rows = [
        record(s, n=n, d=d, peak_alloc_bytes=bytes_(n, d), peak_device_bytes=2 * bytes_(n, d))
        for s, bytes_ in (("flash_sinkhorn", lambda n, d: n * d), ("pot", lambda n, d: n * n))
        for n in (1000, 2000, 4000)
        for d in (64, 128)
    ]
    paths = memory.report(frame(rows), tmp_path)
    assert {"peak_alloc_n.png", "peak_device_n.png", "peak_alloc_d.svg"} <= {path.name for path in paths}
    cells = rows_of(tmp_path / "exponents.md")
    assert row(cells, "FlashSinkhorn")[1:] == ["1.00 (3)", "1.00 (3)", "1.00 (2)"]
    assert row(cells, "POT")[1:] == ["2.00 (3)", "2.00 (3)", "0.00 (2)"]
    text = (tmp_path / "table.md").read_text()
    assert "allocator" in text and "NVML" in text


QUICK = [
    record("keops", n=1000, d=3, time_per_pass_s=5e-4, **ONLY_OK),
    record("pot", n=1000, d=3, status=Status.NOT_CONVERGED, time_per_pass_s=7e-4, **ONLY_OK),
]


def test_quickstart_shows_times_only_where_the_target_was_reached(tmp_path):
    quickstart.report(frame(QUICK), tmp_path)
    rows = rows_of(tmp_path / "table.md")
    assert rows[0] == ["n", "solver", "time (ms)", "passes", "time per pass (µs)", "residual L1"]
    assert rows[2:] == [
        ["1000", "KeOps", "10.0", "20", "500", "0.00400"], ["1000", "POT", "n/c", "20", "700", "0.200"]
    ]  # fmt: skip
    text = (tmp_path / "table.md").read_text()
    assert "**Time to residual 0.01, median" in text
    assert "OTT-JAX and POT every 10th" in text and "compare time per pass" in text
    assert row(rows_of(tmp_path / "memory.md"), "1000")[1:] == ["50.0", "50.0"]


@pytest.mark.parametrize("write", [quickstart.report, general.report])
def test_a_run_of_fixed_iterations_says_nothing_of_targets(write, tmp_path):
    paths = write(frame([record("keops", max_iterations=10)]), tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("**Time of 10 iterations, median") and "residual target" not in text
    assert "look at their residual" not in text and "reached" not in {path.stem for path in paths}


def test_the_general_report_draws_d_where_it_varies(tmp_path):
    rows = [record("toy", n=n, d=d, **ONLY_OK) for n in (1000, 2000) for d in (3, 64)]
    stems = {path.stem for path in general.report(frame(rows), tmp_path)}
    both = {f"{name}_{x}" for name in ("time", "peak_alloc", "peak_device") for x in "nd"}
    assert stems == {"table", "memory", "reached", *both}
    one = {path.stem for path in general.report(frame(rows[:1]), tmp_path / "one")}
    assert one == {stem for stem in stems if not stem.endswith("_d")}


def residual_records():
    """Ours twice and four times as fast at two targets; KeOps misses the harder one, ours the hardest."""
    for tol, ours, keops in ((1e-2, 0.01, 0.02), (1e-3, 0.01, 0.04), (1e-5, None, 0.1)):
        for solver, time_s in (("flash_sinkhorn", ours), ("keops", keops), ("pot", None)):
            status = Status.OK if time_s else Status.NOT_CONVERGED
            columns = {"mode": "to_residual", "tol": tol, "group_id": str(tol), "cell_id": f"{solver}-{tol}"}
            yield record(solver, time_s=time_s or 1.0, status=status, **columns)


def test_time_to_residual_compares_what_both_reached(tmp_path):
    time_to_residual.report(frame(list(residual_records())), tmp_path)
    reached, ratios = (tmp_path / "speedups.md").read_text().split("**Speed-ups of FlashSinkhorn on")
    assert "| FlashSinkhorn | 1 of 1 | 1 of 1 | 0 of 1 | 1 n/c |" in reached
    assert "| POT | 0 of 1 | 0 of 1 | 0 of 1 | 3 n/c |" in reached
    assert "| KeOps | all | 2 | 2.83 | 3.00 | 2.00 | 0 | 1 |" in ratios  # sqrt(2 * 4)
    assert "| KeOps | 0.001 | 1 | 4.00 | 4.00 | 4.00 | 0 | 0 |" in ratios
    assert "| KeOps | 1e-05 | 0 | – | – | – | 0 | 1 |" in ratios
    assert "| POT | all | 0 | – | – | – | 2 | 0 |" in ratios
    times = rows_of(tmp_path / "table.md")
    assert ["1e-05", "1000", "n/c", "100", "n/c"] in times


def test_cells_that_one_of_two_solvers_was_not_given_are_no_failures_of_it(tmp_path):
    records = [each for each in residual_records() if (each["solver"], each["tol"]) != ("pot", 1e-2)]
    time_to_residual.report(frame(records), tmp_path)
    assert "| POT | all | 0 | – | – | – | 1 | 0 |" in (tmp_path / "speedups.md").read_text()


def test_time_to_residual_draws_time_against_the_target(tmp_path):
    stems = {path.stem for path in time_to_residual.report(frame(list(residual_records())), tmp_path)}
    assert stems == {"table", "speedups", "cells", "reached", "time_tol_n1k"}


def test_table3_with_gradients_has_their_error_and_its_own_published_figures(tmp_path):
    both = {"task": "forward_backward", "d": 512, "n": 10_000}
    rows = [record("flash_sinkhorn", gradient_rel_err=2e-6, **both)]
    rows += [record("keops", time_s=0.5, gradient_rel_err=3e-6, **both), record("pot", status=Status.OOM, **both)]
    paths = table3.report(frame(rows), tmp_path)
    assert "time_backward_n_fp32.png" in {path.name for path in paths}
    cells = rows_of(tmp_path / "speedups.md")
    (only,) = (row for row in cells if row[0] == "512")
    assert only[cells[0].index("FlashSinkhorn over KeOps (×)")] == "50.0"
    assert only[cells[0].index("over KeOps, published (A100) (×)")] == "161"
    text = (tmp_path / "table.md").read_text()
    assert "**Forward + backward, FP32-grade: d = 512" in text and "in both clouds" in text
    block = text[text.index("d = 512") :]
    assert "gradient error" in block and "2.00e-06" in block and "3.00e-06" in block


def test_tasks_are_never_compared_with_each_other(tmp_path):
    rows = [record("flash_sinkhorn"), record("keops", time_s=0.02)]
    rows += [
        record(name, time_s=time_s, task="forward_backward", group_id="both", cell_id=f"{name}-both")
        for name, time_s in (("flash_sinkhorn", 0.03), ("keops", 0.09))
    ]
    table3.report(frame(rows), tmp_path)
    forward, backward = (tmp_path / "speedups.md").read_text().split("**Forward + backward, ")
    assert "| 2.00 |" in forward and "| 3.00 |" in backward
    general.report(frame(rows), tmp_path / "general")
    tasks = [cells[0] for cells in rows_of(tmp_path / "general" / "table.md")]
    assert tasks.count("forward") == tasks.count("forward_backward") == 2


def test_lowepsilon_has_error_and_time_by_precision_and_budget(tmp_path):
    rows = []
    for eps in (0.1, 0.01):
        for solver, error in (("keops", 1e-4), ("flash_sinkhorn", 2e-5), ("flash_sinkhorn_fast", 0.3)):
            rows.append(record(solver, eps=eps, half_step_error=error / eps))
            to_residual = {"group_id": f"r{eps}", "cell_id": f"{solver}-r{eps}", "status": Status.NOT_CONVERGED}
            rows.append(record(solver, eps=eps, **to_residual, **ONLY_OK))
    stems = {path.stem for path in lowepsilon.report(frame(rows), tmp_path)}
    budgets = [f"{mode}_{grade}" for mode in ("fixed_iterations", "to_residual") for grade in ("fp32", "10bit")]
    assert stems == {"table", *(f"{name}_{budget}" for name in ("time", "error") for budget in budgets)}
    blocks = (tmp_path / "table.md").read_text().split("\n**")
    assert len(blocks) == 4
    assert "FP32-grade" in blocks[0] and "| 0.1 | 1000 | FlashSinkhorn | 10.0 |" in blocks[0]
    assert "4e-05 to 0.00077 in FP32, not measured here" in blocks[0] and "far from convergence" in blocks[0]
    assert "FlashSinkhorn, 10-bit" not in blocks[0] + blocks[1] and "KeOps" not in blocks[2] + blocks[3]
    assert "n/c" in blocks[1] and "residual 0.01" in blocks[1]


def test_hvp_has_error_beside_time_and_the_published_times_apart(tmp_path):
    shape = {"task": "hvp", "n": 50_000, "tol": 1e-4, "mode": "to_residual", "n_iterations": 9}
    rows = [record("flash_sinkhorn", hvp_rel_err=3e-5, hvp_residual_self=8e-5, **shape)]
    rows.append(record("keops", time_s=0.05, hvp_rel_err=4e-5, **shape))
    rows.append(record("flash_sinkhorn_pypi_fp32", status=Status.NOT_CONVERGED, hvp_rel_err=0.02, **shape))
    rows.append(record("pot", status=Status.UNSUPPORTED, **shape))
    hvp.report(frame(rows), tmp_path)
    cells = {row[1]: row for row in rows_of(tmp_path / "table.md")}
    head = cells["solver"]
    columns = [column([head], name) for name in ("time (", "time / FlashSinkhorn", "iterations", "error", "residual")]
    assert [cells["FlashSinkhorn"][c] for c in columns] == ["0.0100", "1.00", "9", "3.00e-05", "8.00e-05"]
    assert [cells["KeOps"][c] for c in columns] == ["0.0500", "5.00", "9", "4.00e-05", "–"]
    assert [cells["flash-sinkhorn PyPI, FP32"][c] for c in columns[:4]] == ["n/c", "–", "9", "0.0200"]
    assert cells["KeOps, published (A100)"][columns[0]] == "14.5"
    assert cells["OTT-JAX, published (A100)"][columns[0]] == "OOT"
    text = (tmp_path / "table.md").read_text()
    assert "not measured here" in text and "10 times the tolerance" in text and "tolerance 0.0001" in text

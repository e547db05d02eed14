"""Reports of FlashSinkhorn2's experiments: its parts, its growth, its limits, where the dense solver is faster."""

from __future__ import annotations

import json

import pytest
from record_factory import GPU, record

from experiments import ablation_fs2, dimension, limits_fs2, scaling_fs2
from fsbench.plan import make_plan
from fsbench.records import Status
from fsbench.report.analysis import solver_stat
from fsbench.report.load import join

TO_RESIDUAL = {"mode": "to_residual", "tol": 5e-3}


def counted(solver, *, kept=100.0, screens=2, returns=None, **columns):
    stats = {"kept_pairs_per_point": kept, "screens": screens}
    stats |= {} if returns is None else {"coarse_returns": returns}
    return record(solver, solver_stats=json.dumps(stats), **TO_RESIDUAL, **columns)


def written(report, records, folder):
    report(join(records, [GPU]), folder)
    return {path.stem: path.read_text() for path in folder.glob("*.md")}


def rows_of(text, head):
    lines = text.split(f"**{head}")[1].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_numbers_of_solvers_are_read_by_name():
    df = join([counted("a", kept=7.5), record("b", n=2000)], [GPU])
    assert solver_stat(df, "kept_pairs_per_point").tolist()[0] == 7.5
    assert solver_stat(df, "kept_pairs_per_point").isna().tolist() == [False, True]
    assert solver_stat(df, "coarse_returns").isna().all()


class TestAblation:
    @pytest.fixture
    def tables(self, tmp_path):
        """Two problems; alternating misses one, the published method is wrong about one."""
        made = []
        for problem, eps, seconds in (("clusters", 6.10352e-05, 1.0), ("uniform_gaussian", 0.000976562, 0.1)):
            what = {"problem": problem, "n": 2**21, "d": 3, "eps": eps}
            first = problem == "clusters"
            made += [
                counted("flash_sinkhorn2", time_s=seconds, n_passes=10.0, converged_self=True, **what),
                counted(
                    "flash_sinkhorn2_published", time_s=8 * seconds, n_passes=200.0 if first else 50.0, kept=400.0,
                    returns=2 if first else 0, converged_self=True,
                    status=Status.NOT_CONVERGED if first else Status.OK, residual_reached=not first, **what,
                ),
                counted(
                    "flash_sinkhorn2_plain", time_s=(2 if first else 8) * seconds, n_passes=90.0, kept=50.0,
                    converged_self=True, **what,
                ),
            ]  # fmt: skip
        made.append(record("flash_sinkhorn2_plain", problem="lidar", n=2**21, d=3, status=Status.OOM, **TO_RESIDUAL))
        return written(ablation_fs2.report, made, tmp_path)

    def test_parts_are_compared_on_the_problems_both_brought_to_the_target(self, tables):
        rows = {row[0]: row[1:] for row in rows_of(tables["parts"], "What each part of FlashSinkhorn2 is worth")}
        assert rows["FlashSinkhorn2 (ours)"] == ["2 of 2", "1.00", "1.00", "1.00", "–", "0"]
        assert rows["published method, our tiles"] == ["1 of 2", "8.00", "5.00", "4.00", "2", "1"]
        assert rows["FlashSinkhorn2, alternating"] == ["2 of 3", "4.00", "9.00", "0.500", "–", "0"]
        assert tables["table"].startswith(tables["parts"].rstrip())

    def test_every_cell_is_a_row(self, tables):
        rows = rows_of(tables["table"], "Every cell")
        assert len(rows) == 7
        # blurs 2^-7 and 2^-5 at a spacing of 2^-7
        assert [row[:4] for row in rows[:2]] == [
            ["clusters", "2097152", "1", "FlashSinkhorn2 (ours)"],
            ["clusters", "2097152", "1", "published method, our tiles"],
        ]
        assert rows[1][4:] == ["n/c", "200", "400", "2", "2", "0.200"]
        assert rows[-1][2] == "4" and rows[3][4:] == ["OOM"] * 6


class TestScaling:
    @pytest.fixture
    def tables(self, tmp_path):
        """Time n^1.25, memory n^1, passes n^0.5; the largest out of memory."""
        made = []
        for n, eps in ((2**18, 2.44141e-4), (2**20, 9.68873e-5), (2**22, 3.84492e-5)):
            what = {"problem": "clusters", "n": n, "d": 3, "eps": eps}
            if n == 2**22:
                made.append(record("flash_sinkhorn2", status=Status.OOM, **TO_RESIDUAL, **what))
                continue
            ratio = n / 2**18
            made.append(
                counted(
                    "flash_sinkhorn2", time_s=ratio**1.25, n_passes=10 * ratio**0.5, peak_alloc_bytes=600 * n, **what
                )
            )
        return written(scaling_fs2.report, made, tmp_path)

    def test_exponents_are_of_the_cells_that_finished(self, tables):
        (row,) = rows_of(tables["exponents"], "Growth with the number of points")
        assert row == ["FlashSinkhorn2 (ours)", "clusters", "1", "1.25 (2)", "0.00 (2)", "0.50 (2)", "0.00 (2)"]

    def test_memory_is_a_point_of_both_clouds(self, tables):
        rows = rows_of(tables["table"], "Every cell")
        assert [row[0] for row in rows] == ["262144", "1048576", "4194304"]
        assert rows[0][2:] == ["1.00", "10", "100", "2", "300", "0.00400"] and rows[2][2:] == ["OOM"] * 6


class TestDimension:
    @pytest.fixture
    def tables(self, tmp_path):
        """n = 4096: tiles pay in two dimensions, not in six; eight only the dense solver takes."""
        made = []
        for d, kept, seconds in ((2, 409.6, 0.1), (6, 4200.0, 0.5)):
            what = {"n": 4096, "d": d, "eps": float(f"{4 * 4096 ** (-2 / d):.6g}")}
            made.append(counted("flash_sinkhorn2", kept=kept, time_s=seconds, **what))
            made.append(record("flash_sinkhorn", time_s=0.25, **TO_RESIDUAL, **what))
        what = {"n": 4096, "d": 8, "eps": 0.5}
        made.append(record("flash_sinkhorn2", status=Status.UNSUPPORTED, **TO_RESIDUAL, **what))
        made.append(record("flash_sinkhorn", time_s=0.25, **TO_RESIDUAL, **what))
        return written(dimension.report, made, tmp_path)

    def test_says_what_is_kept_and_who_is_faster(self, tables):
        rows = rows_of(tables["table"], "Share of pairs kept")
        assert [row[2] for row in rows] == ["2", "6", "8"]
        assert [row[3] for row in rows] == ["10", "100", "n/s"]  # padding of tiles is no more than everything
        assert [row[-1] for row in rows] == ["2.50", "0.500", "ours n/s"]
        assert "faster where both finished: d = 6 at blur 2." in tables["table"]


class TestLimits:
    @pytest.fixture
    def tables(self, tmp_path):
        """The package takes clusters as it rounds them, has no time for the wider blur and no plane."""
        made = []
        for problem, d, eps in (
            ("clusters", 3, 9.68873e-05), ("clusters", 3, 9.68873e-03), ("uniform_gaussian", 2, 2.38419e-07),
        ):  # fmt: skip
            what = {"problem": problem, "n": 2**20, "d": d, "eps": eps}
            made.append(counted("flash_sinkhorn2", time_s=2.0, peak_alloc_bytes=2**30, **what))
            package = {"status": Status.TIMEOUT}
            if d == 2:
                package = {"status": Status.UNSUPPORTED, "status_detail": "it is for d=3\nand no other"}
            elif eps < 1e-3:
                package = {"status": Status.NOT_CONVERGED, "residual_solved_l1": 4e-3}
            made.append(record("flash_sinkhorn_pypi_multiscale", **package, **TO_RESIDUAL, **what))
        return written(limits_fs2.report, made, tmp_path)

    def test_counts_are_of_each_problem(self, tables):
        ours, package = rows_of(tables["reached"], "Problems that reached the residual target")
        assert ours == ["FlashSinkhorn2 (ours)", "2 of 2", "1 of 1", "3 of 3", "–", "–"]
        assert package[1:] == ["0 of 2", "0 of 1", "0 of 3", "1 of 3", "1 OOT, 1 n/c, 1 n/s"]
        assert "flash-sinkhorn PyPI multiscale, TF32 on uniform_gaussian: it is for d=3." in tables["reached"]
        assert "and no other" not in tables["reached"]

    def test_every_cell_says_how_wide_the_box_is(self, tables):
        rows = rows_of(tables["table"], "Every cell")
        assert [row[:5] for row in rows[::2]] == [
            ["clusters", "3", "1048576", "1", "101.6"], ["clusters", "3", "1048576", "10", "10.16"],
            ["uniform_gaussian", "2", "1048576", "0.5", "2048"],
        ]  # fmt: skip
        assert rows[0][6:] == ["2.00", "0.00400", "–", "512"] and rows[1][6:9] == ["n/c", "0.200", "0.00400"]
        assert rows[3][6:] == ["OOT"] * 4 and rows[5][6:] == ["n/s"] * 4


@pytest.mark.parametrize("experiment", [ablation_fs2, scaling_fs2, limits_fs2, dimension])
def test_reports_of_no_records_are_tables_without_rows(experiment, tmp_path):
    assert all(path.is_file() for path in experiment.report(join([]), tmp_path))


def test_grids_are_what_the_questions_ask():
    of_n = {cell.n for cell in make_plan(["experiment=scaling_fs2"], gpu=True).cells}
    assert of_n == {2**power for power in range(17, 25)}
    of_d = {cell.d for cell in make_plan(["experiment=dimension"], gpu=True).cells}
    assert of_d == set(range(1, 11))
    parts = {cell.solver: cell.solver_params for cell in make_plan(["experiment=ablation_fs2"], gpu=True).cells}
    assert parts["flash_sinkhorn2"] == {"correction": "full"} and len(parts) == 9
    assert {params.get("tile") for params in parts.values()} >= {16, 64}
    assert max(cell.n for cell in make_plan(["experiment=ablation_fs2"], gpu=False).cells) <= 4096


def test_limits_are_those_published():
    cells = make_plan(["experiment=limits_fs2"], gpu=True).cells
    assert {cell.solver for cell in cells} == {"flash_sinkhorn2", "flash_sinkhorn_pypi_multiscale"}
    blurs = {cell.eps**0.5 * cell.n ** (1 / 3) for cell in cells if cell.problem == "clusters" and cell.n == 2**22}
    assert sorted(blurs) == pytest.approx([3, 10], rel=1e-5)  # eps has six digits
    assert {cell.d for cell in cells if cell.eps <= 1 / 2000**2} == {2, 3}
    offsets = {cell.problem: cell.problem_params.get("offset") for cell in cells}
    assert offsets["uniform_gaussian_far"] == 1000 and offsets["uniform_gaussian"] is None
    on_cpu = make_plan(["experiment=limits_fs2"], gpu=False).cells
    assert {cell.problem for cell in on_cpu} == set(offsets) and max(cell.n for cell in on_cpu) <= 2**14
    assert min(cell.eps for cell in on_cpu) <= 1 / 2000**2

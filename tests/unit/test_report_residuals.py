"""The counts of the experiment residuals: who reached the target, on which points, and how the others ended."""

from __future__ import annotations

import pytest
from record_factory import GPU, record

from experiments import residuals
from fsbench.plan import make_plan
from fsbench.records import Status
from fsbench.report.load import join

SIZES = {262_144: 0.000244141, 1_048_576: 9.68873e-05}  # n -> squared spacing


def records():
    """Ours solves all of lidar, too late all of nbody; the package the wide blurs as given, and as rounded all but one;
    OTT-JAX none."""
    for n, square in SIZES.items():
        for multiple in (1, 16):
            columns = {"problem": "lidar", "n": n, "m": 3 * n // 4, "d": 3, "eps": multiple * square, "tol": 5e-3}
            columns |= {"mode": "to_residual"}
            yield record("flash_sinkhorn", time_s=0.5, **columns)
            wide = multiple == 16
            yield record(
                "flash_sinkhorn_pypi_multiscale", time_s=2.0, status=Status.OK if wide else Status.NOT_CONVERGED,
                residual_solved_l1=4e-3 if n < 1e6 or wide else 6e-3, n_passes=None, **columns,
            )  # fmt: skip
            status = Status.TIMEOUT if wide else Status.OOM
            yield record("ott_jax_online", status=status, **columns)
        late = {"problem": "nbody", "n": n, "d": 3, "eps": square, "mode": "to_residual", "tol": 5e-3}
        yield record("flash_sinkhorn", time_s=130.0, status=Status.NOT_CONVERGED, residual_reached=True, **late)


@pytest.fixture
def tables(tmp_path) -> dict[str, str]:
    residuals.report(join(list(records()), [GPU]), tmp_path)
    return {name: (tmp_path / f"{name}.md").read_text() for name in ("reached", "table")}


def test_counts_are_of_the_points_given_and_apart_of_rounded_ones(tables):
    text = tables["reached"]
    heads = [f"n = {n}, blur {blur}" for n in (262144, 1048576) for blur in (1, 4)]
    assert f"| solver | {' | '.join(heads)} | all | on its rounded points | others |" in text
    assert "| FlashSinkhorn | 1 of 2 | 1 of 1 | 1 of 2 | 1 of 1 | 4 of 6 | – | 2 late |" in text
    pypi = "| flash-sinkhorn PyPI multiscale, TF32 | 0 of 1 | 1 of 1 | 0 of 1 | 1 of 1 | 2 of 4 | 3 of 4 | 2 n/c |"
    assert pypi in text
    assert "| OTT-JAX online | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 4 | – | 2 OOM, 2 OOT |" in text
    assert "published (A100), on 32 problems that are not public: FlashSinkhorn 2 reached 32 of 32" in text
    assert text.split("|")[0] in tables["table"]


def test_every_problem_is_a_row_with_its_blur(tables):
    times = tables["table"].split("**Time to the residual target")[1].split("**Residual L1")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in times.splitlines() if "|" in line][2:]
    assert [row[:3] for row in rows] == [
        ["lidar", "262144", "1"], ["lidar", "262144", "4"], ["lidar", "1048576", "1"], ["lidar", "1048576", "4"],
        ["nbody", "262144", "1"], ["nbody", "1048576", "1"],
    ]  # fmt: skip
    assert rows[0][3:] == ["500", "n/c", "OOM"] and rows[1][3:] == ["500", "2000", "OOT"]  # ms
    assert rows[4][3:] == ["late", "–", "–"]


def test_speedups_are_where_others_reached_the_target_as_given_or_as_rounded(tmp_path):
    rows = list(records())
    columns = {"problem": "lidar", "d": 3, "mode": "to_residual", "tol": 5e-3}
    for n, square in SIZES.items():
        for multiple in (1, 16):
            own = {"n": n, "m": 3 * n // 4, "eps": multiple * square}
            rows.append(record("flash_sinkhorn2", time_s=0.25 * multiple, **own, **columns))
    residuals.report(join(rows, [GPU]), tmp_path)
    text = (tmp_path / "speedups.md").read_text()
    found = {
        tuple(cells[:3]): cells[3:]
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    }
    # FlashSinkhorn, the package as given, the package as rounded
    assert found["lidar", "262144", "1"] == ["2.00", "–", "8.00"]
    assert found["lidar", "262144", "4"] == ["0.125", "0.500", "0.500"]
    assert found["lidar", "1048576", "1"] == ["2.00", "–", "–"]
    assert found["median", "–", "–"] == ["1.06", "0.500", "0.500"]
    assert found["min", "–", "–"] == ["0.125", "0.500", "0.500"]
    assert found["problems", "–", "–"] == ["4", "2", "3"]
    assert not any(name == "nbody" for name, *_ in found)


def test_the_suite_is_eight_families_two_sizes_and_two_blurs():
    plan = make_plan(["experiment=residuals"], gpu=True)
    ours = [cell for cell in plan.cells if cell.solver == "flash_sinkhorn"]
    assert len(ours) == 32 and len({cell.problem for cell in ours}) == 8
    # A blur of the mean spacing: 2^-6 at 2^18 points, and of four.
    assert {cell.eps for cell in ours if cell.n == 2**18} == {0.000244141, 0.00390625}
    assert all(cell.m == cell.n * (0.75 if cell.problem == "lidar" else 1) for cell in ours)
    assert all(cell.budget.tol == 5e-3 and cell.budget.max_seconds == 120 for cell in ours)
    quick = make_plan(["experiment=residuals"], gpu=False)
    assert max(cell.n for cell in quick.cells) == 1000 and {cell.problem for cell in quick.cells} == {
        cell.problem for cell in ours
    }

"""The floor of a sweep on the chip: its formula at the corners, and its table."""

import pytest
from record_factory import record
from test_report_experiments import frame, rows_of

from experiments import floor, forward
from fsbench.records import Status
from solvers.flash_sinkhorn.sweeps import tiles

PAIRS = 1e10
EXP, DOT = PAIRS / 4.18176e12, 2 * PAIRS / 9.89e14


@pytest.mark.parametrize(
    ("solver", "d", "least", "bound"),
    [
        ("flash_sinkhorn_fast", 64, EXP, "exp"),
        ("flash_sinkhorn_fast", 128, 128 * DOT, "dot"),
        ("flash_sinkhorn_mixed", 128, 256 * DOT, "dot"),
        ("flash_sinkhorn", 64, 192 * DOT, "dot"),
        ("flash_sinkhorn", 16, EXP, "exp"),
        ("flash_sinkhorn", 3, EXP, "exp"),
        ("flash_sinkhorn_fast", 3, EXP, "exp"),
    ],
)
def test_the_slower_unit_sets_the_floor(solver, d, least, bound):
    assert floor.floor_s(solver, PAIRS, d) == (pytest.approx(least), bound)


def test_dimensions_are_those_of_the_kernels(monkeypatch):
    for name in ("LARGEST_DIRECT_DIMENSION", "LARGEST_PACKED_DIMENSION", "SMALLEST_DOT_DIMENSION"):
        assert getattr(floor, name) == getattr(tiles, name)
    monkeypatch.setattr(floor, "EXPONENTIALS_PER_S", 1e30)  # so that products alone are left
    products = {d: {name: floor.floor_s(name, PAIRS, d)[0] / DOT for name in floor.PRODUCTS} for d in (4, 5, 6)}
    fast, mixed, exact = floor.PRODUCTS
    assert products[4] == {fast: pytest.approx(16), mixed: pytest.approx(16), exact: pytest.approx(0, abs=1e-9)}
    assert products[5] == {fast: pytest.approx(16), mixed: pytest.approx(16), exact: pytest.approx(48)}
    assert products[6] == {fast: pytest.approx(16), mixed: pytest.approx(32), exact: pytest.approx(48)}


def test_the_table_has_ours_on_that_chip_alone(tmp_path):
    rows = [record(name, n=50_000, time_per_pass_s=1.2e-3) for name in ("flash_sinkhorn", "flash_sinkhorn_fast")]
    rows.append(record("flash_sinkhorn_pypi_tf32", n=50_000, time_per_pass_s=2.4e-3))
    rows.append(record("flash_sinkhorn_fast", n=1000, status=Status.OOM))
    forward.report(frame(rows), tmp_path)
    head, _, *body = rows_of(tmp_path / "floor.md")
    assert head[2:] == ["solver", "time per pass (ms)", "floor (ms)", "bound", "time / floor (×)"]
    assert [row[2] for row in body] == ["FlashSinkhorn", "FlashSinkhorn, 10-bit"]
    assert body[0][3:] == ["1.20", "0.971", "dot", "1.24"] and body[1][3:] == ["1.20", "0.598", "exp", "2.01"]
    title = (tmp_path / "floor.md").read_text().splitlines()[0]
    assert "max(n m / 4.18e+12, 2 K n m products / 9.89e+14) s" in title
    assert "chip's floor" in (tmp_path / "table.md").read_text()


def test_there_is_no_table_without_times_per_pass_or_on_another_chip(tmp_path):
    for columns in ({}, {"device": "cpu", "env_id": "cpu", "time_per_pass_s": 1.0}):
        forward.report(frame([record("flash_sinkhorn", **columns)]), tmp_path)
        assert not (tmp_path / "floor.md").exists()

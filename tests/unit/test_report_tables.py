"""The table model, its four forms, and the arithmetic of comparisons."""

import csv
import io
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_factory import CPU, GPU, record

from fsbench.records import Status
from fsbench.report import Column, Table, Unit, summary
from fsbench.report.analysis import by_device, geometric_means, newest, power_fit, speedups
from fsbench.report.load import join
from fsbench.report.style import styles
from fsbench.report.tables import significant, to_csv, to_latex, to_markdown, to_terminal

SOLVERS = [
    "flash_sinkhorn", "flash_sinkhorn_fast", "flash_sinkhorn_pypi_fp32", "flash_sinkhorn_pypi_tf32", "keops",
    "tensorized", "ott_jax_dense", "ott_jax_online", "geomloss_multiscale", "pot", "somebody_elses_solver", "toy",
]  # fmt: skip


def frame(records):
    return join(records, [GPU, CPU])


def markdown_rows(table):
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROUNDED = {
    0.00123456: "0.00123", 1.2345: "1.23", 9.996: "10.0", 45.67: "45.7", 789.4: "789", 12345.6: "12346",
    1.234e-5: "1.2e-05", 0.0: "0", -2.5: "-2.50", 999.7: "1000", 1.0: "1.00",
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), ROUNDED.items())
def test_significant_digits(value, text):
    assert significant(value) == text


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_significant_digits_lose_at_most_half_a_unit(value):
    # Two digits in scientific notation: half a unit of the second digit is at most 5 %; three digits: 0.5 %.
    assert float(significant(value)) == pytest.approx(value, rel=0.05 if value < 1e-3 else 0.00501)


def test_units_are_in_headers_and_columns_of_one_scale_share_it():
    columns = [Column("solver"), Column("a", Unit.SECONDS, "time"), Column("b", Unit.SECONDS, "time")]
    columns += [Column("memory", Unit.BYTES), Column("traffic", Unit.GIGABYTES), Column("n", Unit.EXACT)]
    table = Table("t", columns, [["x", 0.00123, 0.0456, 4.5e9, 8e7, 10_000.0], ["y", 0.002, None, 1e9, None, 5e4]])
    rows = markdown_rows(table)
    assert rows[0] == ["solver", "a (ms)", "b (ms)", "memory (GB)", "traffic (GB)", "n"]
    assert rows[2] == ["x", "1.23", "45.6", "4.50", "0.0800", "10000"]
    assert rows[3] == ["y", "2.00", "–", "1.00", "–", "50000"]


def test_csv_is_in_base_units_with_status_words_in_place():
    columns = [Column("solver"), Column("time", Unit.SECONDS), Column("memory", Unit.BYTES)]
    text = to_csv(Table("t", columns, [["a, b", 0.001234567, "OOM†"], ["c", None, 5e9]]))
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [["solver", "time (s)", "memory (B)"], ["a, b", "0.001234567", "OOM†"], ["c", "", "5000000000"]]


def test_latex_is_booktabs_and_escaped():
    text = to_latex(Table("50 % of a_b & c", [Column("x_y"), Column("r", Unit.RATIO)], [["a|b", 2.0], ["q", "OOM†"]]))
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"50 \% of a\_b \& c", r"x\_y", r"r ($\times$) \\"):
        assert part in text
    assert r"OOM$^\dagger$" in text and text.count(r"\begin") == text.count(r"\end")
    assert text.isascii()


def test_markdown_escapes_bars():
    assert r"a\|b" in to_markdown(Table("t", [Column("x")], [["a|b"]]))


@pytest.mark.parametrize("count", range(1, 13))
def test_terminal_fits_a_hundred_columns_and_breaks_no_word(count):
    names = SOLVERS[:count]
    table = summary(frame([record(s, n=n, time_s=n / 1e4) for s in names for n in (1000, 50_000)]))[0]
    text = to_terminal(table)
    assert max(map(len, text.splitlines())) <= 100
    for style in styles(names).values():
        assert all(word in text for word in style.label.split())
    assert "…" not in text


WORDS = [
    (Status.OOM, "OOM"), (Status.TIMEOUT, "OOT"), (Status.UNSUPPORTED, "n/s"), (Status.ERROR, "err"),
    (Status.NOT_CONVERGED, "n/c"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "word"), WORDS)
@pytest.mark.parametrize("inferred", [False, True])
def test_failures_stand_in_their_place_and_are_explained(status, word, inferred):
    mode = {"mode": "to_residual", "tol": 1e-2}
    failed = record("keops", n=2000, status=status, inferred_from="keops-1" if inferred else None, **mode)
    table = summary(frame([record("keops", n=1000, **mode), failed]))[0]
    rows = markdown_rows(table)
    assert rows[2] == ["1000", "10.0"]
    assert rows[3] == ["2000", word + "†" * inferred]
    assert any(f"{word} " in note and ("†" in note) == inferred for note in table.notes)


def test_cells_of_a_partial_sweep_are_marked_missing():
    done = [record("a", n=1000), record("b", n=1000), record("a", n=2000)]
    rows = markdown_rows(summary(frame(done))[0])
    assert rows[3] == ["2000", "10.0", "–"]


def test_what_varies_is_in_the_rows_and_what_does_not_is_in_the_title():
    table = summary(frame([record("keops", n=n, eps=eps) for n in (1000, 2000) for eps in (0.1, 0.01)]))[0]
    assert [column.name for column in table.columns[:2]] == ["eps", "n"]
    assert "gaussian" in table.title and "d = 64" in table.title and "NVIDIA H200" in table.title


def test_different_clouds_and_budgets_have_rows_of_their_own():
    rows = [record("keops", n=1000, m=500), record("keops", n=1000, max_iterations=10, group_id="other")]
    rows += [record("pot", n=1000, max_iterations=20, group_id="another", cell_id="pot-20")]
    table = summary(frame(rows))[0]
    assert [column.name for column in table.columns[:3]] == ["max_iterations", "n", "m"]
    assert len(table.rows) == 3


def test_devices_are_never_mixed():
    rows = [record("keops", time_s=0.001), record("keops", time_s=1.0, env_id="cpu", device="cpu")]
    tables = summary(frame(rows))
    assert ["NVIDIA H200" in table.title for table in tables] == [True, False]
    assert "Some CPU (2 cores)" in tables[1].title
    suffixes = [suffix for _, suffix, _ in by_device(frame(rows))]
    assert len(set(suffixes)) == 2 and all(suffixes)


def test_the_newest_record_of_a_comparison_wins():
    rows = [record("keops", time_s=2.0, code_id="b", started_at="2026-03-01"), record("keops", time_s=1.0)]
    assert newest(frame(rows))["time_to_solution_s"].tolist() == [2.0]


def test_speedups_only_where_both_finished():
    rows = [record("ours", n=n, time_s=1.0) for n in (1000, 2000)] + [record("ours", n=4000, status=Status.OOM)]
    rows += [record("keops", n=1000, time_s=3.0), record("keops", n=2000, status=Status.TIMEOUT)]
    rows += [record("keops", n=4000, time_s=5.0)]
    ratios = speedups(frame(rows), "ours")["keops"].dropna()
    assert ratios.tolist() == [3.0]


def test_speedups_of_a_reference_that_never_finished_are_empty():
    rows = [record("ours", status=Status.ERROR), record("keops")]
    assert speedups(frame(rows), "ours").empty or speedups(frame(rows), "ours").isna().all(axis=None)


def test_means_use_the_cells_that_all_finished():
    ratios = pd.DataFrame({"a": [1.0, 4.0, 2.0, 100.0], "b": [2.0, 8.0, 4.0, np.nan], "never": [np.nan] * 4})
    means, count = geometric_means(ratios)
    assert count == 3
    assert means["a"] == pytest.approx(2.0) and means["b"] == pytest.approx(4.0)
    assert math.isnan(means["never"])
    means, count = geometric_means(pd.DataFrame({"a": [1.0, np.nan], "b": [np.nan, 2.0]}))
    assert count == 0 and means.isna().all()


def test_power_fit_recovers_an_exponent_and_counts_points():
    n = pd.Series([1e3, 2e3, 5e3, 1e4, 2e4])
    assert power_fit(n, 7 * n**1.7) == (pytest.approx(1.7), 5)
    assert power_fit(n, (7 * n**1.7).where(n < 1e4)) == (pytest.approx(1.7), 3)
    assert power_fit(n[:1], n[:1]) is None
    assert power_fit(n, 0 * n) is None

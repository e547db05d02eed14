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
from fsbench.report.analysis import by_device, geometric_means, newest, power_fit, speedups, time_words
from fsbench.report.load import join
from fsbench.report.style import styles
from fsbench.report.tables import cells, significant, to_csv, to_latex, to_markdown, to_terminal

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
    1.234e-5: "1.23e-05", 0.0: "0", -2.5: "-2.50", 999.7: "1000", 1.0: "1.00",
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), ROUNDED.items())
def test_significant_digits(value, text):
    assert significant(value) == text


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_significant_digits_lose_at_most_half_a_unit(value):
    # Three digits: half a unit of the third is at most 0.5 %.
    assert float(significant(value)) == pytest.approx(value, rel=0.00501)


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


def test_a_target_reached_too_late_is_not_called_missed():
    mode = {"mode": "to_residual", "tol": 1e-2}
    late = {"status": Status.NOT_CONVERGED, "residual_l1": 0.004, "residual_reached": True}
    rows = [record("keops", **mode), record("pot", **late, **mode)]
    table = summary(frame(rows))[0]
    assert markdown_rows(table)[2] == ["1000", "10.0", "late"]
    assert "late residual target reached, but after max_seconds." in table.notes
    both = summary(frame([*rows, record("toy", status=Status.NOT_CONVERGED, **mode)]))[0]
    assert both.notes == ["n/c residual target not reached; late residual target reached, but after max_seconds."]


def test_memory_of_a_cell_that_did_not_converge_is_a_number():
    mode = {"mode": "to_residual", "tol": 1e-2}
    rows = [record("keops", status=Status.NOT_CONVERGED, **mode), record("pot", status=Status.OOM, **mode)]
    rows.append(record("toy", status=Status.NOT_CONVERGED, peak_alloc_bytes=None, **mode))
    table = summary(frame(rows), value="peak_alloc_bytes", unit=Unit.BYTES)[0]
    assert markdown_rows(table)[2] == ["1000", "50.0", "OOM", "–"]
    assert markdown_rows(summary(frame(rows))[0])[2] == ["1000", "n/c", "OOM", "n/c"]


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("make", [
    lambda df: summary(df, value="peak_host_bytes", unit=Unit.BYTES),
    lambda df: cells(df, {"peak_host_bytes": Column("peak memory", Unit.BYTES)}),
], ids=["summary", "cells"])  # fmt: skip
def test_host_memory_that_cannot_be_measured_is_a_dash_with_its_reason(framework, make):
    cpu = {"device": "cpu", "env_id": "cpu"}
    rows = [record("keops", **cpu), record("ott_jax_dense", framework=framework, peak_host_bytes=None, **cpu)]
    (table,) = make(frame(rows))
    assert "–" in markdown_rows(table)[-1]
    said = any("Host memory of JAX on a CPU cannot be measured in its process" in note for note in table.notes)
    assert said == (framework == "jax")
    assert not any("JAX" in note for note in summary(frame(rows))[0].notes)


def test_a_row_for_each_cell_has_what_was_asked_of_it():
    rows = [
        record(s, n=n, residual_l1=0.010449) for n in (2000, 1000) for s in ("pot", "keops") if (s, n) != ("pot", 2000)
    ]
    values = {"n_passes": Column("passes", Unit.EXACT), "residual_l1": Column("residual", Unit.NUMBER)}
    (table,) = cells(frame(rows), values, title="Passes", notes=["a note"])
    assert markdown_rows(table) == [
        ["n", "solver", "passes", "residual"], ["--:", ":--", "--:", "--:"], ["1000", "KeOps", "20", "0.0104"],
        ["1000", "POT", "20", "0.0104"], ["2000", "KeOps", "20", "0.0104"],
    ]  # fmt: skip
    assert table.key_columns == 2 and "a note" in table.notes and table.title.startswith("Passes, on NVIDIA H200 (gaus")


TITLES = [
    ({"mode": "to_residual", "tol": 1e-2}, "Time to residual 0.01"),
    ({"max_iterations": 10}, "Time of 10 iterations"),
    ({}, "Time of a fixed number of iterations"),
]


@pytest.mark.parametrize(("columns", "words"), TITLES)
def test_titles_follow_the_mode_of_the_records(columns, words):
    assert time_words(frame([record("keops", **columns)])) == words


def test_time_of_both_modes_is_time_to_solution():
    rows = [record("keops"), record("keops", mode="to_residual", tol=1e-2)]
    assert time_words(frame(rows)) == "Time to solution"


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


def test_means_are_over_the_cells_of_their_column_and_say_how_many():
    ratios = pd.DataFrame({"a": [1.0, 4.0, 2.0, 100.0], "b": [2.0, 8.0, 4.0, np.nan], "never": [np.nan] * 4})
    means, counts = geometric_means(ratios)
    assert counts.tolist() == [4, 3, 0]
    assert means["a"] == pytest.approx(800**0.25) and means["b"] == pytest.approx(4.0)
    assert math.isnan(means["never"])


def test_power_fit_recovers_an_exponent_and_counts_points():
    n = pd.Series([1e3, 2e3, 5e3, 1e4, 2e4])
    assert power_fit(n, 7 * n**1.7) == (pytest.approx(1.7), 5)
    assert power_fit(n, (7 * n**1.7).where(n < 1e4)) == (pytest.approx(1.7), 3)
    assert power_fit(n[:1], n[:1]) is None
    assert power_fit(n, 0 * n) is None


def test_passes_are_whole_or_have_one_decimal_and_are_exact_in_csv():
    table = Table("t", [Column("passes", Unit.PASSES)], [[48.092752], [337.0], [None]])
    assert "| 48.1 |" in to_markdown(table) and "| 337 |" in to_markdown(table)
    assert to_csv(table).split() == ["passes", "48.092752", "337", '""']

"""Figures: what they draw is read back from the artists."""

import math

import numpy as np
import pytest
from matplotlib.text import Annotation
from record_factory import CPU, GPU, record
from test_report_tables import SOLVERS

from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME
from fsbench.report.load import join
from fsbench.report.style import count_text, styles

SIZES = (1000, 2000, 4000)


def frame(records):
    return join(records, [GPU, CPU])


def grid(solvers, **columns):
    return [record(s, n=n, time_s=1e-3 * (n / 1e3) ** 2, **columns) for s in solvers for n in SIZES]


def legend_texts(figure):
    legends = [*figure.legends, *[ax.get_legend() for ax in figure.axes if ax.get_legend()]]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def words(figure):
    """Status words drawn at failures: (word, size)."""
    found = [a for ax in figure.axes for a in ax.findobj(Annotation)]
    return sorted((a.get_text(), a.xy[0]) for a in found)


@pytest.mark.parametrize("count", range(1, 13))
def test_each_solver_is_in_the_legend_once(count, tmp_path):
    figure = figures.scaling(frame(grid(SOLVERS[:count])), x="n", y=TIME, title="t")
    assert legend_texts(figure) == [style.label for style in styles(SOLVERS[:count]).values()]
    png, svg = figures.save(figure, tmp_path, "t")
    assert png.stat().st_size > 5000 and svg.read_text().startswith("<?xml")


def test_styles_do_not_depend_on_company_and_are_all_different():
    everyone = styles(SOLVERS)
    assert all(
        styles([name])[name] == everyone[name] for name in SOLVERS if name not in ("toy", "somebody_elses_solver")
    )
    assert styles(["toy"])["toy"] == styles(["keops", "toy"])["toy"]
    assert len({(s.colour, s.marker) for s in everyone.values()}) == len(SOLVERS)
    many = styles([f"solver{i}" for i in range(25)]).values()
    assert len({(s.colour, s.marker) for s in many}) == 25 and len({s.colour for s in list(many)[:8]}) == 8


def test_axes_are_logarithmic_with_units():
    (ax,) = figures.scaling(frame(grid(["keops"])), x="n", y=TIME, title="t").axes
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert ax.yaxis.get_major_formatter()(0.01) == "10 ms"
    (ax,) = figures.scaling(frame(grid(["keops"])), x="n", y="peak_alloc_bytes", title="t").axes
    assert ax.yaxis.get_major_formatter()(5e9) == "5 GB"


def test_points_and_quartiles_are_the_records_own():
    (ax,) = figures.scaling(frame(grid(["keops"])), x="n", y=TIME, title="t").axes
    line = next(line for line in ax.lines if line.get_marker() == "^")
    np.testing.assert_allclose(line.get_xydata(), [[n, 1e-3 * (n / 1e3) ** 2] for n in SIZES])
    bar = ax.containers[0].lines[2][0].get_segments()[0]
    np.testing.assert_allclose(bar[:, 1], [0.97e-3, 1.05e-3])


def test_failures_are_marked_where_they_fell_above_all_points():
    rows = [*grid(["keops"]), record("pot", n=1000), record("pot", n=2000, status=Status.OOM)]
    rows += [record("pot", n=4000, status=Status.OOM, inferred_from="pot-2000")]
    rows += [record("toy", n=1000), record("toy", n=2000, status=Status.ERROR), record("toy", n=4000)]
    figure = figures.scaling(frame(rows), x="n", y=TIME, title="t")
    assert words(figure) == [("OOM", 2000), ("err", 2000)]  # the inferred one is a pale cross without a word
    (ax,) = figure.axes
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert sorted(line.get_xdata()[0] for line in crosses) == [2000, 2000, 4000]
    figure.canvas.draw()
    highest = max(ax.transData.transform((n, 1e-3 * (n / 1e3) ** 2))[1] for n in SIZES)
    assert all(line.get_transform().transform(line.get_xydata())[0, 1] > highest for line in crosses)


def many_failing(count):
    kinds = [Status.OOM, Status.TIMEOUT, Status.ERROR, Status.UNSUPPORTED]
    rows = grid(["keops"])
    for i in range(count):
        rows += [record(f"solver{i}", n=1000), *(record(f"solver{i}", n=n, status=kinds[i % 4]) for n in SIZES[1:])]
    return rows


@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_failure_marks_have_a_bounded_strip_and_never_move_the_data(count):
    without = [row for row in many_failing(count) if row["status"] == "ok"]
    marked, bare = (figures.scaling(frame(rows), x="n", y=TIME, title="t") for rows in (many_failing(count), without))
    (ax,), (bare_ax,) = marked.axes, bare.axes
    assert ax.get_ylim() == bare_ax.get_ylim() and ax.get_xlim() == bare_ax.get_xlim()
    marked.canvas.draw()
    panel = ax.get_window_extent()
    marks = [a.get_window_extent() for a in [*ax.findobj(Annotation), *(x for x in ax.lines if x.get_marker() == "x")]]
    above_pt = [72 / marked.dpi * (edge - panel.y1) for box in marks for edge in (box.y0, box.y1)]
    assert min(above_pt) >= 0 and max(above_pt) < 60
    assert panel.height > 0.5 * marked.bbox.height


def test_many_failing_solvers_share_a_mark_with_their_number():
    shown = words(figures.scaling(frame(many_failing(25)), x="n", y=TIME, title="t"))
    assert [word for word, size in shown if size == 2000] == ["6×", "6×", "6×", "7×"]
    assert {word for word, size in shown if size == 0} == {"OOM", "OOT", "err", "n/s"}


def test_a_late_cell_is_marked_as_such_alone_and_among_many():
    late = {"mode": "to_residual", "tol": 1e-2, "status": Status.NOT_CONVERGED, "residual_reached": True}
    rows = [*grid(["keops"], mode="to_residual", tol=1e-2), record("pot", n=2000, **late)]
    assert words(figures.scaling(frame(rows), x="n", y=TIME, title="t")) == [("late", 2000)]
    rows += [record(f"solver{i}", n=2000, **late) for i in range(9)]
    assert words(figures.scaling(frame(rows), x="n", y=TIME, title="t")) == [("10×", 2000), ("late", 0)]


def test_memory_of_a_cell_that_did_not_converge_is_drawn():
    mode = {"mode": "to_residual", "tol": 1e-2}
    rows = [record("keops", n=n, status=Status.NOT_CONVERGED, **mode) for n in SIZES]
    (ax,) = figures.scaling(frame(rows), x="n", y="peak_alloc_bytes", title="t").axes
    assert any(len(line.get_xdata()) == 3 and line.get_marker() == "^" for line in ax.lines)
    assert words(ax.figure) == []
    assert len(words(figures.scaling(frame(rows), x="n", y=TIME, title="t"))) == 3


def test_a_solver_that_supports_nothing_here_is_said_in_the_legend():
    rows = [*grid(["keops"]), *(record("geomloss_multiscale", n=n, status=Status.UNSUPPORTED) for n in SIZES)]
    figure = figures.scaling(frame(rows), x="n", y=TIME, title="t")
    assert "GeomLoss multiscale  (n/s)" in legend_texts(figure)
    assert words(figure) == []


def test_the_first_solver_may_fail_everywhere():
    rows = [*(record("flash_sinkhorn", n=n, status=Status.ERROR) for n in SIZES), *grid(["keops"])]
    figure = figures.scaling(frame(rows), x="n", y=TIME, title="t")
    assert legend_texts(figure) == ["FlashSinkhorn  (err)", "KeOps"]
    assert any(line.get_marker() == "^" and len(line.get_xdata()) == 3 for line in figure.axes[0].lines)


def test_fitted_exponent_and_count_are_in_the_legend_over_ok_cells_only():
    rows = [record("keops", n=n, peak_alloc_bytes=40 * n) for n in SIZES]
    rows += [record("pot", n=n, peak_alloc_bytes=n * n) for n in SIZES[:2]] + [record("pot", n=4000, status=Status.OOM)]
    texts = legend_texts(figures.scaling(frame(rows), x="n", y="peak_alloc_bytes", title="t", fit=True))
    assert texts == ["KeOps  $n^{1.00}$, 3 points", "POT  $n^{2.00}$, 2 points"]


def test_panels_are_what_else_varies():
    rows = [record("keops", n=n, d=d) for n in SIZES for d in (64, 1024)]
    titles = [ax.get_title(loc="left") for ax in figures.scaling(frame(rows), x="n", y=TIME, title="t").axes]
    assert titles == ["d = 64, eps = 0.1", "d = 1024, eps = 0.1"]
    titles = [ax.get_title(loc="left") for ax in figures.scaling(frame(rows), x="d", y=TIME, title="t").axes]
    assert [title for title in titles if title] == [f"n = {count_text(n)}, eps = 0.1" for n in SIZES]


def test_against_the_target_a_row_of_panels_is_a_dimension():
    rows = [
        record("keops", d=d, eps=eps, mode="to_residual", tol=tol, group_id=f"{d}{eps}{tol}", cell_id=f"{d}{eps}{tol}")
        for d in (64, 2)
        for eps in (0.01, 0.1)
        for tol in (1e-2, 1e-5)
    ]
    axes = figures.scaling(frame(rows), x="tol", y=TIME, title="t").axes
    titles = [ax.get_title(loc="left") for ax in axes]
    assert titles == ["d = 2, eps = 0.1", "d = 2, eps = 0.01", "d = 64, eps = 0.1", "d = 64, eps = 0.01"]
    assert all(sorted(ax.lines[0].get_xdata()) == [1e-5, 1e-2] for ax in axes)
    assert "residual target" in axes[0].get_xlabel()


def test_against_eps_a_panel_is_a_size():
    rows = [
        record("keops", n=n, d=64, eps=eps, half_step_error=1e-5 / eps) for n in (1000, 2000) for eps in (0.1, 0.01)
    ]
    axes = figures.scaling(frame(rows), x="eps", y="half_step_error", title="t").axes
    assert [ax.get_title(loc="left") for ax in axes] == ["n = 1k, d = 64", "n = 2k, d = 64"]
    assert all(sorted(ax.lines[0].get_xdata()) == [0.01, 0.1] for ax in axes)
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("eps", "half-step error / eps")


def test_different_budgets_are_never_one_line():
    rows = [
        record("keops", n=n, max_iterations=k, group_id=f"{n}-{k}", cell_id=f"{n}-{k}") for n in SIZES for k in (5, 9)
    ]
    figure = figures.scaling(frame(rows), x="n", y=TIME, title="t")
    assert len(figure.axes) == 2 and len(legend_texts(figure)) == 1


def test_counts_reached_out_of_all():
    mode = {"mode": "to_residual", "tol": 1e-2}
    rows = [record("keops", n=n, **mode) for n in SIZES]
    rows += [record("pot", n=1000, **mode), record("pot", n=2000, status=Status.NOT_CONVERGED, **mode)]
    rows += [record("pot", n=4000, status=Status.OOM, **mode)]
    (ax,) = figures.counts(frame(rows), title="t").axes
    texts = [text.get_text().split() for text in ax.texts]
    assert texts[0] == ["3/3"]
    assert texts[1][0] == "1/3" and "1 n/c" in " ".join(texts[1]) and "1 OOM" in " ".join(texts[1])
    assert sorted(bar.get_width() for bar in ax.patches) == [1, 3, 3, 3]


def test_anytime_draws_traces_rungs_and_ends():
    mode = {"mode": "to_residual", "tol": 1e-2}
    curve = [{"iteration": i, "seconds": 0.1 * i, "residual": 0.5**i} for i in range(4)]
    untimed = [{"iteration": i, "seconds": None, "residual": 0.5**i} for i in range(4)]
    ladder = '[{"params": {}, "seconds": 1.0, "residual": 0.1}, {"params": {}, "seconds": 2.0, "residual": null}]'
    rows = [record("keops", curve=curve, **mode), record("pot", time_s=3.0, curve=untimed, **mode)]
    rows += [record("geomloss_multiscale", ladder=ladder, **mode)]
    figure = figures.anytime(frame(rows), title="t")
    drawn = {line.get_marker(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn["h"] == [[3.0, 0.004]] and drawn["*"] == [[1.0, 0.1]]
    trace = next(line for line in figure.axes[0].lines if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(trace.get_ydata(), [0.5, 0.25, 0.125])  # the point at zero seconds has no place
    assert len(legend_texts(figure)) == 3


def test_bars_have_values_or_status_words():
    rows = [record("keops", time_s=0.00123), record("pot", status=Status.OOM)]
    (ax,) = figures.bars(frame(rows), y=TIME, title="t").axes
    assert [text.get_text().strip() for text in ax.texts] == ["1.23 ms", "OOM"]


def test_one_size_is_bars_with_failures_marked_not_a_column_of_dots():
    rows = [record("keops", d=d, time_s=0.001 * d) for d in (3, 64)] + [record("pot", d=3, status=Status.OOM)]
    rows += [record("pot", d=64, time_s=0.02)]
    figure = figures.scaling(frame(rows), x="n", y=TIME, title="t")
    assert [ax.get_title(loc="left") for ax in figure.axes] == [f"n = 1k, d = {d}, eps = 0.1" for d in (3, 64)]
    assert [[text.get_text().strip() for text in ax.texts] for ax in figure.axes] == [
        ["3 ms", "OOM"],
        ["64 ms", "20 ms"],
    ]
    assert all(ax.get_xscale() == "linear" for ax in figure.axes)
    against_d = figures.scaling(frame(rows), x="d", y=TIME, title="t")
    assert against_d.axes[0].get_xscale() == "log"


def test_bars_of_one_size_say_what_tells_them_apart_and_draw_what_did_not_converge():
    to_residual = {"mode": "to_residual", "half_step_error": 3e-5}
    rows = [
        record("keops", problem="gaussian", tol=0.01, group_id="1", **to_residual),
        record("keops", problem="clusters", tol=0.001, group_id="2", status=Status.NOT_CONVERGED, **to_residual),
    ]
    figure = figures.scaling(frame(rows), x="n", y="half_step_error", title="t")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [
        f"n = 1k, d = 64, eps = 0.1, {p}, tol = {tol}" for p, tol in (("gaussian", 0.01), ("clusters", 0.001))
    ]
    assert [ax.texts[0].get_text().strip() for ax in figure.axes] == ["3e-05", "3e-05"]
    assert [ax.texts[0].get_text().strip() for ax in figures.scaling(frame(rows), x="n", y=TIME, title="t").axes] == [
        "10 ms", "n/c"
    ]  # fmt: skip


def test_the_same_records_give_the_same_bytes(tmp_path):
    rows = frame(grid(["keops", "pot"]))
    first = figures.save(figures.scaling(rows, x="n", y=TIME, title="t"), tmp_path / "a", "t")
    second = figures.save(figures.scaling(rows, x="n", y=TIME, title="t"), tmp_path / "b", "t")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_matplotlib_settings_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.scaling(frame(grid(["keops"])), x="n", y=TIME, title="t")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("size", [500, 1000, 1024, 2500, 100_000, 1_000_000, 134_217_728])
def test_sizes_print_without_loss(size):
    text = count_text(size)
    scale = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kM")) * scale, size)

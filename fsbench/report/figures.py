"""Figures from records: matplotlib without a display, one style a solver, failures marked where they fell."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, TypeGuard

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from fsbench.records import Status
from fsbench.report.analysis import TIME, counted, power_fit
from fsbench.report.failures import mark_failures
from fsbench.report.style import (
    MISSING,
    SolverStyle,
    count_text,
    exponent_text,
    number_text,
    shape_text,
    status_word,
    styles,
)

_RC: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#E4E4E4", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "svg.hashsalt": "fsbench", "lines.linewidth": 1.5, "lines.markersize": 5,
}  # fmt: skip
MEMORY_NAMES = {"peak_alloc_bytes": "allocator", "peak_device_bytes": "NVML", "peak_host_bytes": "host"}
_Y = {TIME: ("time to solution, median", "s")} | {
    column: (f"peak memory, {name}", "B") for column, name in MEMORY_NAMES.items()
}
_Y |= {"half_step_error": ("half-step error / eps", ""), "n_passes": ("passes", "")}
_Y |= {"bytes_per_point": ("peak memory a point", "B"), "share_kept": ("share of pairs kept", "")}
_X = {"n": "points a side n", "d": "dimension d", "tol": "residual target, L1 of marginals", "eps": "eps"}
_BUDGET = ("dtype", "task", "mode", "tol", "max_iterations")
_PANELS = {"n": ("eps", "d"), "d": ("eps", "n"), "tol": ("d", "eps"), "eps": ("n", "d")}  # in the order of panels


@matplotlib.rc_context(_RC)
def scaling(
    df: pd.DataFrame, *, x: str, y: str, title: str, fit: bool = False, by: tuple[str, ...] | None = None
) -> Figure:
    """`y` against `x` ("n", "d", "tol" or "eps") on log axes, one panel for each value of what else varies.

    `by` names what that is, where it is not eps with n or d: columns of numbers.
    Time has quartile bars. With `fit` each legend entry carries the exponent fitted over ok cells and their count.
    Cells that failed are marked over their sizes in a strip above the panel. Where all records are at one `x`, which
    would be a column of dots, this is `bars`.
    """
    if df.loc[df[x] > 0, x].nunique() == 1:
        return bars(df, y=y, title=title)
    facts = _PANELS[x] if by is None else by
    # Different budgets or precisions are never one line; seeds are, as their median.
    keys = [*(["n"] if x == "tol" else []), *_BUDGET]
    more = [key for key in keys if key != x and df[key].nunique(dropna=False) > 1]
    grouped = df.groupby(["problem", *facts, *more], dropna=False)
    panels = [part for _, part in grouped if part[x].notna().any() and part["problem"].notna().any()]
    panels.sort(key=lambda part: (part["problem"].iloc[0], *(_falling_eps(part, key) for key in facts)))
    if not panels:
        return _empty(title)
    columns = 2 if fit and len(panels) > 1 else _columns(len(panels))
    rows = math.ceil(len(panels) / columns)
    width = 6.6 if fit else 3.9
    height = max(3.1, 0.23 * df["solver"].nunique() + 0.9)
    figure = _figure(columns * width + (0 if fit else 2.2), rows * height + 0.5, title)
    look = styles(df["solver"].dropna())
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for index, ax in enumerate(axes.flat):
        if index >= len(panels):
            ax.set_axis_off()
            continue
        part, first = panels[index], panels[index].iloc[0]
        _lines(ax, part, x, y, look)
        said = [f"{key} = {count_text(first[key])}" for key in facts if key != "eps"]
        said += [f"eps = {number_text(first['eps'])}"] if "eps" in facts else []
        said += [first["problem"]] if df["problem"].nunique() > 1 else []
        said += [f"{key} = {first[key]}" for key in more if pd.notna(first[key])]
        ax.set_title(", ".join(said), loc="left")
        ax.set_xlabel(_X[x])
        _axes(ax, part, x, y)
        if index % columns == 0:
            ax.set_ylabel(_Y[y][0])
        if fit:
            ax.legend(handles=_handles(part, look, x, y, fit), loc="upper left", bbox_to_anchor=(1, 1.02), fontsize=8)
    if not fit:
        figure.legend(handles=_handles(df, look, x, y, fit), loc="outside right center")
    mark_failures(list(axes.flat[: len(panels)]), panels, x=x, y=y)
    return figure


@matplotlib.rc_context(_RC)
def counts(df: pd.DataFrame, *, title: str) -> Figure:
    """How many problems each solver brought to the residual target, as bars, out of those it was given."""
    look = styles(df["solver"].dropna())
    if not look:
        return _empty(title)
    figure = _figure(6.4, 0.34 * len(look) + 1.1, title)
    ax = figure.subplots()
    names = list(look)
    totals = [int((df["solver"] == name).sum()) for name in names]
    for place, (name, total) in enumerate(zip(names, totals, strict=True)):
        cells = df[df["solver"] == name]
        reached = int(((cells["status"] == Status.OK) & cells["residual_reached"].fillna(False).astype(bool)).sum())
        ax.barh(place, total, color="#F0F0F0", height=0.7)
        ax.barh(place, reached, color=look[name].colour, height=0.7)
        lost = cells[cells["status"] != Status.OK]
        words = lost.apply(status_word, axis=1).value_counts() if len(lost) else {}
        failed = ", ".join(f"{number} {word}" for word, number in words.items())
        ax.text(total, place, f" {reached}/{total}" + (f"  ({failed})" if failed else ""), va="center")
    ax.set_yticks(range(len(names)), [look[name].label for name in names])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlim(0, max(totals) * 1.45)
    ax.set_xticks(sorted({0, max(totals)}))
    ax.set_xlabel("problems that reached the residual target")
    return figure


@matplotlib.rc_context(_RC)
def bars(df: pd.DataFrame, *, y: str, title: str) -> Figure:
    """`y` of each solver as a bar with quartiles, its value or status word beside it; a group of bars a comparison."""
    look = styles(df["solver"].dropna())
    panels = [part for _, part in df.groupby("group_id", sort=False)]
    if not panels:
        return _empty(title)
    columns = 1 if len(panels) < 3 else 2
    rows = math.ceil(len(panels) / columns)
    figure = _figure(6.8 * columns, rows * (0.32 * len(look) + 0.9) + 0.3, title)
    more = [key for key in _BUDGET if df[key].nunique(dropna=False) > 1]
    axes = figure.subplots(rows, columns, squeeze=False)
    for index, ax in enumerate(axes.flat):
        if index >= len(panels):
            ax.set_axis_off()
            continue
        part = panels[index]
        records = {record["solver"]: record for _, record in part.iterrows()}
        names = [name for name in look if name in records]
        valid = counted(part, y)
        values = valid[valid[y] > 0].set_index("solver")[y]
        scale = EngFormatter(unit=_Y[y][1], sep=" ") if _Y[y][1] else FuncFormatter(lambda value, _: f"{value:.3g}")
        for place, name in enumerate(names):
            record = records[name]
            if name not in values:
                ax.text(0, place, f" {status_word(record)}", va="center", color=look[name].colour)
                continue
            ax.barh(place, values[name], color=look[name].colour, height=0.7)
            low, high = (
                record[q] if y == TIME and record[q] > 0 else values[name] for q in ("time_q25_s", "time_q75_s")
            )
            spread = [[max(values[name] - low, 0)], [max(high - values[name], 0)]]
            ax.errorbar(values[name], place, xerr=spread, fmt="none", ecolor="#333333", capsize=2, linewidth=1)
            ax.text(max(values[name], high), place, f"  {scale(float(f'{values[name]:.2e}'))}", va="center")
        ax.set_yticks(range(len(names)), [look[name].label for name in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(False, axis="y")
        ax.set_xlim(0, 1.18 * (values.max() if len(values) else 1.0))
        ax.xaxis.set_major_formatter(scale)
        said = [shape_text(part.iloc[0]), *([part["problem"].iloc[0]] if df["problem"].nunique() > 1 else [])]
        said += [f"{key} = {part[key].iloc[0]}" for key in more if pd.notna(part[key].iloc[0])]
        ax.set_title(", ".join(said), loc="left")
        ax.set_xlabel(_Y[y][0])
    return figure


@matplotlib.rc_context(_RC)
def anytime(df: pd.DataFrame, *, title: str) -> Figure:
    """Residual against seconds, a panel for each comparison.

    A line is the solver's own trace of one solve; a solver that reports none is the points it ended at: one for each
    rung of its ladder, or one.
    """
    df = df.assign(points=[_points(record) for _, record in df.iterrows()])
    traced = df[df["points"].map(lambda found: len(found[0]) > 0).astype(bool)]
    panels = sorted(
        traced.groupby(["problem", "d", "eps", "n"]), key=lambda panel: (*panel[0][:2], -panel[0][2], panel[0][3])
    )
    if not panels:
        return _empty(title)
    sizes = traced["n"].nunique()
    columns = sizes if 2 <= sizes <= 4 and len(panels) > sizes else _columns(len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = _figure(columns * 3.2 + 2.2, rows * 2.6 + 0.5, title)
    look = styles(df["solver"].dropna())
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for index, ax in enumerate(axes.flat):
        if index >= len(panels):
            ax.set_axis_off()
            continue
        _, part = panels[index]
        for name in reversed(look):
            style = look[name]
            for _, cell in part[part["solver"] == name].iterrows():
                points, is_trace = cell["points"]
                seconds, residuals = zip(*points, strict=True)
                if not is_trace:
                    ax.plot(seconds, residuals, style.marker, color=style.colour)
                    continue
                ax.plot(seconds, residuals, style.line, color=style.colour)
                ax.plot(seconds[-1], residuals[-1], style.marker, color=style.colour)
        for tol in part["tol"].dropna().unique():
            ax.axhline(tol, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
            ax.text(0.01, tol, "target", transform=ax.get_yaxis_transform(), va="bottom", fontsize=7)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title(shape_text(part.iloc[0]), loc="left")
        if index + columns >= len(panels):
            ax.set_xlabel("time in the solve")
        if index % columns == 0:
            ax.set_ylabel("residual, L1 of marginals")
    handles = [_handle(style, style.label) for name, style in look.items() if name in set(traced["solver"])]
    figure.legend(handles=handles, loc="outside right center")
    return figure


@matplotlib.rc_context(_RC)
def save(figure: Figure, out_dir: Path, stem: str) -> list[Path]:
    """Write stem.png and stem.svg, the same bytes for the same records; returns the paths."""
    out_dir.mkdir(parents=True, exist_ok=True)
    png, svg = out_dir / f"{stem}.png", out_dir / f"{stem}.svg"
    figure.savefig(png, dpi=150, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _falling_eps(part: pd.DataFrame, key: str) -> float:
    return -part["eps"].iloc[0] if key == "eps" else part[key].iloc[0]


def _columns(panels: int) -> int:
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


class _Shown(Figure):
    """A figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()


def _figure(width: float, height: float, title: str) -> Figure:
    figure = _Shown(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def _empty(title: str) -> Figure:
    figure = _figure(5.0, 1.6, title)
    figure.text(0.5, 0.4, "no records to draw yet", ha="center", color="#777777")
    return figure


def _points(record: pd.Series) -> tuple[list[tuple[float, float]], bool]:
    """(seconds, residual) that log axes show, of a record's curve, else of its ladder's rungs, else of its end.

    The flag says whether they are one solve's trace.
    """
    end = [{"seconds": record[TIME], "residual": record["residual_l1"]}]
    for trace in (record["curve"], _rungs(record["ladder"]), end):
        pairs = [(point.get("seconds"), point.get("residual")) for point in trace if isinstance(point, dict)]
        if drawable := [(float(s), float(r)) for s, r in pairs if _drawable(s) and _drawable(r)]:
            return drawable, trace is record["curve"]
    return [], False


def _rungs(ladder: str | None) -> list:
    try:
        rungs = json.loads(ladder) if ladder else []
    except json.JSONDecodeError:
        rungs = []
    return rungs if isinstance(rungs, list) else []


def _drawable(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and 0 < value < math.inf


def _drawn(cells: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """What a line shows of one solver's cells: medians by `x` of the valid ones that log axes can show."""
    shown = counted(cells, y)
    shown = shown[(shown[y] > 0) & (shown[x] > 0)]
    return shown.groupby(x)[list(dict.fromkeys([y, "time_q25_s", "time_q75_s"]))].median()


def _lines(ax: Axes, part: pd.DataFrame, x: str, y: str, look: dict[str, SolverStyle]) -> None:
    for name in reversed(look):  # the first solver lies on top
        points = _drawn(part[part["solver"] == name], x, y)
        if points.empty:
            continue
        style = look[name]
        ax.plot(points.index, points[y], style.line, color=style.colour, marker=style.marker)
        if y == TIME:
            low, high = points["time_q25_s"].fillna(points[y]), points["time_q75_s"].fillna(points[y])
            bars = [(points[y] - low).clip(lower=0), (high - points[y]).clip(lower=0)]
            ax.errorbar(points.index, points[y], yerr=bars, fmt="none", ecolor=style.colour, capsize=2, linewidth=1)


def _handles(df: pd.DataFrame, look: dict[str, SolverStyle], x: str, y: str, fit: bool) -> list[Line2D]:
    """A legend entry for each solver: with the fitted exponent, or the status words of one without a point."""
    handles = []
    for name in (name for name in look if name in set(df["solver"])):
        cells = df[df["solver"] == name]
        points = _drawn(cells, x, y)
        text = look[name].label
        exponent = power_fit(points.index.to_series(), points[y]) if fit else None
        if exponent:
            text += f"  ${x}^{{{exponent_text(exponent[0])}}}$, {exponent[1]} points"
        elif points.empty:
            words = sorted({word for word in cells.apply(status_word, axis=1) if word != MISSING})
            text += f"  ({', '.join(words) or MISSING})"
        handles.append(_handle(look[name], text))
    return handles


def _handle(style: SolverStyle, text: str) -> Line2D:
    return Line2D([], [], linestyle=style.line, color=style.colour, marker=style.marker, label=text)


def _axes(ax: Axes, part: pd.DataFrame, x: str, y: str) -> None:
    sizes = sorted(size for size in part[x].dropna().unique() if size > 0)
    if sizes:
        margin = max(sizes[-1] / sizes[0], 2.0) ** 0.12
        ax.set_xlim(sizes[0] / margin, sizes[-1] * margin)
        ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator(_spread(sizes)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    low, high = ax.get_ylim()
    if high / low < 40:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if _Y[y][1]:
        ax.yaxis.set_major_formatter(EngFormatter(unit=_Y[y][1], sep=" "))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _spread(sizes: list[float]) -> list[float]:
    """Those sizes, from the largest down, that leave room for each other's tick label on a log axis."""
    if not sizes:
        return []
    gap = max(math.log(sizes[-1] / sizes[0]), 0.7) * 0.11
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if math.log(kept[-1] / size) >= gap:
            kept.append(size)
    return kept[::-1]

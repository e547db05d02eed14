"""The strip above a panel where failed cells are marked over their sizes. It takes no room from the data."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, Transform

from fsbench.records import Status
from fsbench.report.analysis import counted
from fsbench.report.style import LATE, WORDS, SolverStyle, reason_word, status_word, styles

_WORDS = (*WORDS.values(), LATE)  # from top to bottom
LINES = len(_WORDS)  # of the highest strip
_LINE = 9.0  # height of one, in points
_FONT = 6.5
_SHARED = "#444444"  # a mark that stands for several solvers
_PALE = 0.35  # opacity of inferred failures


def mark_failures(axes: Sequence[Axes], parts: Sequence[pd.DataFrame], *, x: str, y: str) -> None:
    """Mark the cells of each panel's part that have no number in `y`, at their `x`; titles move above the strip.

    Up to LINES failing solvers have a line of crosses each, in their colour, with the status word. More of them share
    one line for each status word, which says how many failed at each size.
    """
    look = styles(name for part in parts for name in part["solver"].dropna())
    cells = [_failed(part, x, y) for part in parts]
    deepest = max(part["solver"].nunique() for part in cells)
    if not deepest:
        return
    shared = deepest > LINES
    words = [word for word in _WORDS if any((part["word"] == word).any() for part in cells)]
    depth = len(words) if shared else deepest
    for ax, part in zip(axes, cells, strict=True):
        if shared:
            _counts(ax, part, x, words)
        else:
            _crosses(ax, part, x, {name: look[name] for name in look if name in set(part["solver"])})
        ax.set_title(ax.get_title(loc="left"), loc="left", pad=_LINE * (depth + 1))


def _failed(part: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """One failed cell for each solver and size, with its `word`; a solver that supports nothing is in the legend."""
    known = part[part["status"].notna() & (part[x] > 0)]
    nowhere = known.groupby("solver")["status"].agg(lambda found: (found == Status.UNSUPPORTED).all())
    lost = known.drop(index=counted(known, y).index)
    lost = lost[~lost["solver"].isin(nowhere.index[nowhere.astype(bool)])].drop_duplicates(["solver", x])
    return lost.assign(word=[reason_word(cell) for _, cell in lost.iterrows()])


def _crosses(ax: Axes, part: pd.DataFrame, x: str, look: dict[str, SolverStyle]) -> None:
    for line, (name, style) in enumerate(look.items()):
        place = _place(ax, line)
        for _, cell in part[part["solver"] == name].iterrows():
            inferred = isinstance(cell["inferred_from"], str)
            cross = Line2D([cell[x]], [1], marker="x", markeredgewidth=1.5, color=style.colour, transform=place)
            cross.set(alpha=_PALE if inferred else 1.0, clip_on=False)
            ax.add_artist(cross)
            if not inferred:
                _write(ax, status_word(cell), (cell[x], 1), place, (-5, 0), "right", style.colour)


def _counts(ax: Axes, part: pd.DataFrame, x: str, words: list[str]) -> None:
    for line, word in enumerate(words):
        place = _place(ax, line)
        beside = ax.transAxes + _lift(ax, line)
        _write(ax, word, (0, 1), beside, (-4, 0), "right", _SHARED)
        for size, cells in part[part["word"] == word].groupby(x):
            _write(ax, f"{len(cells)}×", (size, 1), place, (0, 0), "center", _SHARED)


def _place(ax: Axes, line: int) -> Transform:
    """Sizes across, and the middle of a line of the strip at 1."""
    return ax.get_xaxis_transform() + _lift(ax, line)


def _lift(ax: Axes, line: int) -> Transform:
    return ScaledTranslation(0, _LINE * (line + 0.8) / 72, ax.figure.dpi_scale_trans)


def _write(
    ax: Axes, text: str, at: tuple[float, float], place: Transform, offset: tuple[float, float], side: str, colour: str
) -> None:
    ax.annotate(
        text, at, xycoords=place, textcoords="offset points", xytext=offset, ha=side, va="center", fontsize=_FONT,
        color=colour, annotation_clip=False,
    )  # fmt: skip

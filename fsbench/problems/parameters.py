"""What sizes and settings a problem family takes, said once: ranges in its signature, what ties them together beside
it. Checked before any cell runs, and again when the family is called."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

SIZES = "n", "m", "d", "eps", "seed"  # what every family takes besides its own settings


@dataclass(frozen=True)
class Within:
    """A number from least to most, for `Annotated[float, Within(0, 1)]`; whole for int. Within(3, 3) is 3 alone."""

    least: float
    most: float


P = ParamSpec("P")
R = TypeVar("R")


def checked(*ties: Callable[..., None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the family raises ValueError where `check` does.

    ties: of several sizes and settings, which one range cannot say. Each is called with all of them by name, and
    raises ValueError, one line.
    """

    def decorate(family: Callable[P, R]) -> Callable[P, R]:
        @wraps(family)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check(call, kwargs)
            return family(*args, **kwargs)

        call.ties = ties  # type: ignore[attr-defined]
        return call

    return decorate


@cache
def settings(family: Callable[..., Any]) -> dict[str, tuple[Any, str]]:
    """Default and range, in words, of each of its own settings."""
    hints = _hints(family)
    own = inspect.signature(family).parameters
    return {name: (own[name].default, _range(hints.get(name))) for name in own if name not in SIZES}


def check(family: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """ValueError, one line that names what is wrong, its range and what was given, unless the family takes them all.

    given: its own settings, or those and all the sizes; ties are looked at in the second case.
    """
    hints, known = _hints(family), settings(family)
    for name, value in given.items():
        if name not in known and name not in SIZES:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}"
            raise ValueError(f"{name} is no setting of it; {hint}")
        if not _fits(hints.get(name), value):
            raise ValueError(f"{name} must be {_range(hints.get(name))}, got {value!r}")
    if all(name in given for name in SIZES):
        defaults = {name: value for name, (value, _) in known.items()}
        for tie in getattr(family, "ties", ()):
            tie(**(defaults | dict(given)))


@cache
def _hints(family: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(family, include_extras=True)


def _range(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is Annotated:
        kind, limits = get_args(hint)[:2]
        if limits.least == limits.most:
            return f"{limits.least:.10g}"
        if limits.most == math.inf:
            return f"a {'whole ' if kind is int else ''}number of at least {limits.least:.10g}"
        return f"a {'whole ' if kind is int else ''}number from {limits.least:.10g} to {limits.most:.10g}"
    return "true or false" if hint is bool else "as the family says"


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is bool:
        return isinstance(value, bool)
    if get_origin(hint) is not Annotated:
        return True
    kind, limits = get_args(hint)[:2]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return limits.least <= value <= limits.most and (kind is not int or isinstance(value, int))

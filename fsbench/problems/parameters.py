"""What the settings of a problem family may be, said once, in its signature: checked before any cell runs, and again
when it is called."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

SIZES = "n", "m", "d", "eps", "seed"  # what every family takes besides its own settings


@dataclass(frozen=True)
class Within:
    """A number from least to most, for `Annotated[float, Within(0, 1)]`; whole for int."""

    least: float
    most: float


P = ParamSpec("P")
R = TypeVar("R")


def checked(family: Callable[P, R]) -> Callable[P, R]:
    """The family, raising ValueError where `check` does."""

    @wraps(family)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check(family, {name: value for name, value in kwargs.items() if name not in SIZES})
        return family(*args, **kwargs)

    return call


def settings(family: Callable[..., Any]) -> dict[str, tuple[Any, str]]:
    """Default and range, in words, of each of its own settings."""
    hints = get_type_hints(family, include_extras=True)
    own = inspect.signature(family).parameters
    return {name: (own[name].default, _range(hints.get(name))) for name in own if name not in SIZES}


def check(family: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """ValueError, one line that names the setting, its range and what was given, unless the family takes them all."""
    hints, known = get_type_hints(family, include_extras=True), settings(family)
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}"
            raise ValueError(f"{name} is no setting of it; {hint}")
        if not _fits(hints.get(name), value):
            raise ValueError(f"{name} must be {known[name][1]}, got {value!r}")


def _range(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is Annotated:
        kind, limits = get_args(hint)[:2]
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

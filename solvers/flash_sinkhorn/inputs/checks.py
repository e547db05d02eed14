"""Input checks: every refusal is a ValueError that names the argument and the fix."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch

from .far import Far
from .survey import Summary, survey

LARGEST_EXPONENT = 1e34  # cost / eps in float32, with room for the sums and products that form it
FAR = 1.0  # spans: sweeps have points without weight no farther out, where fp16 pairs, and float32 sums, hold them
LARGEST_IN_UNITS = 2.0**9  # of `Inputs.unit`: the span of both clouds, rounded up to a power of two
FARTHEST = 2.0**15  # likewise, and what fp16 holds
MASS_TOLERANCE = 1e-4  # relative: float32 weights that sum to one only in float32 are accepted
RELAX = "relax the marginals (rho, reach)"  # what else than weights of equal sum would do


@dataclass(frozen=True)
class Inputs:
    """x [n, d], y [m, d] in float32 or float64, a [n], b [m] float64.

    Balanced weights have sums of one, and mass is what they were divided by; with a relaxed marginal they are as given
    and mass is one. mass_x, mass_y: the sums of a and b as they are here.
    centre [d], float64: where coordinates are moved to before any squaring. unit: a power of two; centred coordinates
    over it are at most 2^9, which fp16 holds well.
    far_x, far_y: the points without weight that are farther out than x and y have them.
    """

    x: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    centre: torch.Tensor
    unit: float
    mass: float
    mass_x: float
    mass_y: float
    far_x: Far | None = None
    far_y: Far | None = None

    def rounded(self, points: torch.Tensor) -> torch.Tensor:
        """[n, d] float64: points as fp16 holds them, centred and in units of `unit`. Without weight they may be as far
        out as to overflow."""
        stored = ((points.double() - self.centre) / self.unit).clamp(-FARTHEST, FARTHEST).float().half()
        return stored.double() * self.unit + self.centre

    @property
    def direct_centre(self) -> torch.Tensor:
        """`centre` of direct differences: float32 points need no move, float64 ones only before they are rounded."""
        return torch.zeros_like(self.centre) if self.x.dtype is torch.float32 else self.centre


def checked_inputs(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    eps: float,
    cost_scale: float,
    balanced: bool = True,
    relax: str = RELAX,
) -> Inputs:
    """All checks of `solve`; balanced: both marginals are; relax: how else, for messages. Reads back from the device
    once, and once more a cloud where there are points without weight."""
    check_points(x, y)
    a, b = checked_weights("a", a, x), checked_weights("b", b, y)
    dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x, y = x.detach().to(dtype).contiguous(), y.detach().to(dtype).contiguous()
    found_x, found_y = survey(x, a, y, b)
    of_x, of_y = found_x.summary, found_y.summary
    check_values(of_x, of_y, d=x.shape[1], eps=eps, cost_scale=cost_scale, balanced=balanced, relax=relax)
    mass_x, mass_y, mass = of_x.mass, of_y.mass, 1.0
    if balanced:
        mass = (mass_x + mass_y) / 2
        a, b, mass_x, mass_y = a / mass_x, b / mass_y, 1.0, 1.0
    low, high = span(of_x, of_y)
    far_x = far_y = None
    if of_x.least_weight == 0 or of_y.least_weight == 0:  # far points without weight must not overflow
        (given_x, given_y), (least, most) = (x, y), reach(low, high)
        x, y = x.clamp(least, most), y.clamp(least, most)
        far_x, far_y = Far.of(given_x[None], x[None]), Far.of(given_y[None], y[None])
    # By mass: points without any must not matter.
    centre = torch.add(found_x.weighted_sum * (0.5 / of_x.mass), found_y.weighted_sum, alpha=0.5 / of_y.mass)
    centre = centre.to(dtype).double()  # so that points of that type move there without a digit lost
    return Inputs(x, y, a, b, centre, unit(high - low), mass, mass_x, mass_y, far_x, far_y)


def check_points(x: torch.Tensor, y: torch.Tensor) -> None:
    """Kind, shape and device. ValueError unless x [n, d] and y [m, d] are clouds."""
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor) or not points.is_floating_point() or points.layout != torch.strided:
            raise ValueError(f"{name} must be a dense floating-point torch tensor, got {kind_of(points)}")
        if points.ndim != 2 or 0 in points.shape:
            raise ValueError(f"{name} must have shape [points, d] with neither zero, got {tuple(points.shape)}")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have the same d, got {x.shape[1]} and {y.shape[1]}")
    if x.device != y.device:
        raise ValueError(f"y must be on the device of x, got {y.device} and {x.device}")


def check_values(
    of_x: Summary, of_y: Summary, *, d: int, eps: float, cost_scale: float, balanced: bool, relax: str = RELAX
) -> None:
    """ValueError unless eps suits the clouds, in R^d, and they are finite and weighted, equally where balanced."""
    bad_counts = (("x", of_x.bad_coordinates), ("y", of_y.bad_coordinates), ("a", of_x.bad_weights),
                  ("b", of_y.bad_weights))  # fmt: skip
    for name, count in bad_counts:
        if count:
            raise ValueError(f"{name} contains NaN or infinite values: remove or replace them first")
    for name, summary in (("a", of_x), ("b", of_y)):
        if summary.least_weight < 0:
            least = summary.least_weight
            raise ValueError(f"{name} has negative weights (least {least:g}): weights must be non-negative")
        if summary.mass == 0:
            raise ValueError(f"{name} sums to zero: at least one weight must be positive")
    if balanced and abs(of_x.mass - of_y.mass) > MASS_TOLERANCE * max(of_x.mass, of_y.mass):
        raise ValueError(
            f"a and b must have the same mass, got {of_x.mass:g} and {of_y.mass:g}: normalise them first (in "
            f"float32 or float64), or {relax}"
        )
    low, high = span(of_x, of_y)
    width = high - low
    if cost_scale * d * width * width / eps > LARGEST_EXPONENT or eps < 1.0 / LARGEST_EXPONENT:
        raise ValueError(
            f"eps = {eps:g} is too small for clouds of span {width:g}: cost / eps exceeds float32's range, choose at "
            f"least {1.1 * max(cost_scale * d * width * width, 1.0) / LARGEST_EXPONENT:.1e}"
        )


def span(of_x: Summary, of_y: Summary) -> tuple[float, float]:
    """Least and largest coordinate of the points with weight of both clouds."""
    return min(of_x.low, of_y.low), max(of_x.high, of_y.high)


def reach(low: float, high: float) -> tuple[float, float]:
    """Where points without weight are moved to from beyond, for clouds from low to high: those with weight stay."""
    far = FAR * ((high - low) or 1.0)
    return low - far, high + far


def unit(width: float) -> float:
    """`Inputs.unit` of clouds of that span."""
    return 2.0 ** math.ceil(math.log2(width)) / LARGEST_IN_UNITS if width > 0 else 1.0


def positive(name: str, value: Any) -> float:
    """value as a float. ValueError unless it is a positive finite number."""
    is_scalar = isinstance(value, Real) or (isinstance(value, torch.Tensor | np.generic) and value.ndim == 0)
    try:
        number = float(value) if is_scalar and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int beyond float64's range
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return number


E = TypeVar("E", bound=StrEnum)


def member(name: str, options: type[E], value: E | str) -> E:
    """The option of that value. ValueError unless there is one, with the nearest."""
    if value not in list(options):
        close = difflib.get_close_matches(str(value), list(options), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}{hint}")
    return options(value)


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """value as an int. ValueError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def switch(name: str, value: Any) -> bool:
    """value. ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def checked_weights(name: str, weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor:
    """float64 [points], uniform if None."""
    check_weights(name, weight, points)
    if weight is None:
        return torch.full((points.shape[0],), 1.0 / points.shape[0], dtype=torch.float64, device=points.device)
    return weight.detach().double().contiguous()


def check_weights(name: str, weight: torch.Tensor | None, points: torch.Tensor) -> None:
    """Kind, shape and device. ValueError unless weight [points] may be that of the points."""
    if weight is None:
        return
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ValueError(f"{name} must be a floating-point torch tensor or None, got {kind_of(weight)}")
    if weight.shape != points.shape[:1]:
        raise ValueError(f"{name} must have shape [{points.shape[0]}], one weight a point, got {tuple(weight.shape)}")
    if weight.device != points.device:
        raise ValueError(f"{name} must be on {points.device} like its points, got {weight.device}")


def kind_of(value: object) -> str:
    """What was given instead of what is asked for, for messages."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__

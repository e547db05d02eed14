"""Fixed iterations of one small problem on a GPU, replayed on the clouds as given: the host reads what it must know of
their values afterwards, so that it waits once and launches next to nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ..inputs.checks import Inputs, check_points, check_values, check_weights, span, unit
from ..inputs.survey import MASS, Summary, numbers_of
from ..sweeps import replay
from ..sweeps.tiles import Precision
from .fixed import iterate
from .loop import Method

KEPT = 64  # kinds whose unit is known


@dataclass(frozen=True)
class AsGiven:
    """What `solve` was given. The unit that points are stored in is a number of a recording, and follows from their
    values: it is taken to be that of the last problem of the kind, and the result counts if it turns out to be."""

    x: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor | None
    b: torch.Tensor | None
    levels: tuple[float, ...]
    method: Method
    precision: Precision

    def iterated(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """f [n] and g [m], the same bits as of `checked_inputs` and `iterated`; None where only these can tell.

        Raises ValueError as `checked_inputs`.
        """
        check_points(self.x, self.y)
        check_weights("a", self.a, self.x)
        check_weights("b", self.b, self.y)
        unit_then = _units.get(self._kind)
        if unit_then is None or not is_small(self.x, self.y):
            return None
        weights = [w.detach()[None] for w in (self.a, self.b) if w is not None]
        found_f, found_g, numbers = replay.replayed(
            ("as given", self._kind), (unit_then,), self._compute, self._points(self.x), self._points(self.y), *weights
        )
        of_x, of_y = (Summary(*row) for row in numbers[0].tolist())
        method, eps, balanced = self.method, self.levels[-1], self.method.balanced
        check_values(of_x, of_y, d=self.x.shape[1], eps=eps, cost_scale=method.cost_scale, balanced=balanced)
        low, high = span(of_x, of_y)
        if unit(high - low) != unit_then or 0 in (of_x.least_weight, of_y.least_weight):
            _units.pop(self._kind, None)
            return None
        shift = eps * math.log((of_x.mass + of_y.mass) / 2) / 2 if balanced else 0.0
        return found_f[0] - shift, found_g[0] - shift

    def expect_like(self, inputs: Inputs) -> None:
        """That the next problem of the kind is stored in the unit of this one. Points without weight may be stored
        nearer than they are, which the host must see to: of such a kind nothing is expected."""
        if is_small(self.x, self.y) and inputs.far_x is None and inputs.far_y is None:
            if len(_units) >= KEPT:
                _units.clear()
            _units[self._kind] = inputs.unit

    def _compute(self, unit: float, x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> replay.Tensors:
        """f [n], g [m] for weights over their mass, and both clouds' numbers [2, 6]."""
        given = iter(weights)
        a, b = (
            points.new_full(points.shape[:1], 1.0 / len(points), dtype=torch.float64)
            if weight is None
            else next(given).double().contiguous()
            for weight, points in ((self.a, x), (self.b, y))
        )
        (numbers,), (sums,) = numbers_of(x[None], a[None], y[None], b[None])
        by_mass = 1.0 / numbers[:, MASS]
        if self.method.balanced:
            a, b = a * by_mass[0], b * by_mass[1]
        half = 0.5 / numbers[:, MASS]
        centre = torch.addcmul(sums[0] * half[0], sums[1], half[1]).to(x.dtype).double()
        inputs = Inputs(x, y, a, b, centre, unit, mass=1.0, mass_x=1.0, mass_y=1.0)
        return *iterate(inputs, self.levels, self.method, self.precision), numbers

    def _points(self, points: torch.Tensor) -> torch.Tensor:
        return points.detach().to(self._dtype).contiguous()[None]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if torch.float64 in (self.x.dtype, self.y.dtype) else torch.float32

    @property
    def _kind(self) -> Hashable:
        weights = self.a is None, self.b is None
        return (
            self.levels,
            self.method,
            self.precision,
            *weights,
            self.x.shape,
            self.y.shape,
            self._dtype,
            self.x.device,
        )


def is_small(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the host, not the GPU, would take the time of a problem with these clouds."""
    return replay.small_together(x[None], y[None]) > 0


_units: dict[Hashable, float] = {}

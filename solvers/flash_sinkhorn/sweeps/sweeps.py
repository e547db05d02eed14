"""The two Sinkhorn updates, written once against `sweep` and `settle`; one subclass a device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

ROUNDINGS = 4.0  # plain iterations end at 0.05 to 0.6 of `Sweeps.rounding`, mixed ones at tiny eps up to 4


@dataclass(eq=False)
class Cloud:
    """What the loop sees of one side: n points, and per point (padding of no weight beyond n may follow)

    weight: float64. potential: float64, u = f log2(e) / eps; used: the potential that the last sweep started from, as
    it was rounded; residual: [1], sum_i weight_i |2^(used_i - F_i) - 1|, where F is the half-step's full update of
    `used`. With a balanced marginal used - F = L, so that this is the L1 marginal residual of `used`.
    half_square: float64, |q|^2 / 2 of the points as they are stored, zero for direct differences. damping: rho /
    (rho + eps) of a relaxed marginal, 1 for a balanced one.
    """

    n: int
    weight: torch.Tensor
    potential: torch.Tensor
    used: torch.Tensor
    residual: torch.Tensor
    half_square: torch.Tensor
    damping: float = field(default=1.0, kw_only=True)


C = TypeVar("C", bound=Cloud)


class Sweeps(ABC, Generic[C]):
    """Both clouds of one problem, and the half-steps between them; or of a batch of B problems of the same sizes, whose
    tensors have B as their first axis.

    A half-step is a sweep over all n * m pairs, which yields L = log2 of each row's sum of P over its weight, and a
    settling step from u towards F = damping * (u - L), `relaxation` of the way. Sums of which nothing is known, as
    after `set_epsilon`, are guarded against overflow.
    """

    x: C
    y: C
    scale: float  # of scores q.k or |q - k|^2 of stored points in base-2 exponents
    exponent_dtype: torch.dtype
    rounded: bool  # whether the stored points are rounded beyond float32, so that a rounded problem is solved
    improvable: bool  # whether exact sweeps reach smaller residuals, of the points as given

    @abstractmethod
    def set_epsilon(self, eps: float, ratio: float) -> None:
        """Scale scores by eps, and the base-2 potentials by `ratio`, old eps over new."""

    @abstractmethod
    def sweep(self, rows: C, cols: C) -> torch.Tensor:
        """log2 sums of the rows, as partial sums [splits, points]."""

    @abstractmethod
    def settle(self, rows: C, partial: torch.Tensor, *, relaxation: float, damping: float) -> None:
        """Combine partial sums, move the rows' potential, and leave the residual before the move behind."""

    @abstractmethod
    def take_potential(self, cloud: C, potential: torch.Tensor) -> None:
        """Replace the potential of a side that was just settled. potential [as cloud.potential], at the same eps."""

    def rounding(self) -> float:
        """`roundings` of the only problem. Waits for the device."""
        return self.roundings().item()

    def roundings(self) -> torch.Tensor:
        """The residual over the mass that half an ulp of the largest bias makes in every exponent: a scalar, [B] of a
        batch.

        Exponents are rounded anew each time that a bias changes, as the rows' and as the columns', so that not even a
        converged pair meets its marginals to much less.
        """
        half_ulp = torch.finfo(self.exponent_dtype).eps / 2
        of_x, of_y = (torch.where(c.weight > 0, self.bias(c), 0.0).abs().amax(-1) for c in (self.x, self.y))
        return math.log(2) * half_ulp * torch.maximum(of_x, of_y)

    def bias(self, cloud: C) -> torch.Tensor:
        """What a sweep adds to the scores of the cloud's rows, in base-2 exponents: float64 [as cloud.potential]."""
        return cloud.potential - self.scale * cloud.half_square

    def suffices(self, tol: float) -> bool:
        """Whether exact sweeps would tell no more of a residual of tol: what these round is well below it, or exact
        ones round as much. Waits for the device."""
        return not self.improvable or not (self.rounded or tol < ROUNDINGS * self.rounding())

    def half_step(self, rows: C, cols: C) -> None:
        self.settle(rows, self.sweep(rows, cols), relaxation=1.0, damping=rows.damping)

    def symmetric_step(self) -> None:
        """Both potentials from the old pair, each moved half-way (averaged Jacobi)."""
        partial_x = self.sweep(self.x, self.y)
        partial_y = self.sweep(self.y, self.x)
        self.settle(self.x, partial_x, relaxation=0.5, damping=self.x.damping)
        self.settle(self.y, partial_y, relaxation=0.5, damping=self.y.damping)

    def take_potentials(self, other: Sweeps) -> None:
        """Start from another object's potentials at the same eps; to be followed by `set_epsilon`."""
        for mine, theirs in ((self.x, other.x), (self.y, other.y)):
            mine.potential[: mine.n] = theirs.potential[: theirs.n]

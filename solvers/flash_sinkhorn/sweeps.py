"""The two Sinkhorn updates, written once against `sweep` and `settle`; one subclass a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass
class Cloud:
    """What the loop sees of one side: n points, and per point (padding beyond n may follow)

    potential: float64, f log2(e) / eps; log2_sum: L of the last sweep; residuals: their sum is
    sum_i weight_i |2^L_i - 1|, the marginal residual of the potentials before that sweep's update.
    """

    n: int
    potential: torch.Tensor
    log2_sum: torch.Tensor
    residuals: torch.Tensor


C = TypeVar("C", bound=Cloud)


class Sweeps(ABC, Generic[C]):
    """Both clouds of one problem, and the half-steps between them.

    A half-step is a sweep over all n * m pairs, which yields L = log2 of each row's sum of P over its weight, and a
    settling step potential -= relaxation * L. cold: nothing is known yet of the sums, guard against overflow.
    """

    x: C
    y: C
    rounded: bool  # whether the stored points are rounded beyond float32, so that a rounded problem is solved

    @abstractmethod
    def set_epsilon(self, eps: float, ratio: float) -> None:
        """Scale scores by eps, and the base-2 potentials by `ratio`, old eps over new."""

    @abstractmethod
    def sweep(self, rows: C, cols: C, *, relaxation: float, cold: bool) -> torch.Tensor:
        """log2 sums of the rows, as partial sums [splits, points]; relaxation as in all half-steps of this solve."""

    @abstractmethod
    def settle(self, rows: C, partial: torch.Tensor, *, relaxation: float) -> None:
        """Combine partial sums, move the rows' potential, and leave the residual before the move behind."""

    def half_step(self, rows: C, cols: C, *, cold: bool) -> None:
        self.settle(rows, self.sweep(rows, cols, relaxation=1.0, cold=cold), relaxation=1.0)

    def symmetric_step(self, *, cold: bool) -> None:
        """Both potentials from the old pair, each moved half-way (averaged Jacobi)."""
        partial_x = self.sweep(self.x, self.y, relaxation=0.5, cold=cold)
        partial_y = self.sweep(self.y, self.x, relaxation=0.5, cold=cold)
        self.settle(self.x, partial_x, relaxation=0.5)
        self.settle(self.y, partial_y, relaxation=0.5)

    def take_potentials(self, other: Sweeps) -> None:
        """Start from another object's potentials at the same eps; to be followed by `set_epsilon`."""
        for mine, theirs in ((self.x, other.x), (self.y, other.y)):
            mine.potential[: mine.n] = theirs.potential[: theirs.n]

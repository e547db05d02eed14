"""The two Sinkhorn updates, written once against `sweep` and `settle`; one subclass a device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .cloud import SweptCloud


class Sweeps(ABC):
    """Both clouds of one problem, and the half-steps between them. Potentials are base 2: f log2(e) / eps.

    A half-step is a sweep over all n * m pairs, which yields L = log2 of each row's sum of P over its weight, and a
    settling step potential -= relaxation * L. |2^L - 1| summed with the weights is the marginal residual of the
    potentials before the step: it costs nothing.
    """

    x: SweptCloud
    y: SweptCloud
    rounded: bool  # whether the stored points are rounded beyond float32, so that a rounded problem is solved

    @abstractmethod
    def set_epsilon(self, eps: float, f: torch.Tensor, g: torch.Tensor) -> None:
        """Scale scores by eps and start from base-2 potentials f [n], g [m] in units of the new eps."""

    @abstractmethod
    def sweep(self, rows: SweptCloud, cols: SweptCloud, *, safe: bool) -> torch.Tensor:
        """log2 sums of the rows, as partial sums [splits, n_padded]; safe: with a running maximum throughout."""

    @abstractmethod
    def settle(self, rows: SweptCloud, cols: SweptCloud, partial: torch.Tensor, *, relaxation: float) -> None:
        """Combine partial sums, move the rows' potential, and leave the residual before the move behind."""

    def half_step(self, rows: SweptCloud, cols: SweptCloud, *, safe: bool, relaxation: float = 1.0) -> None:
        self.settle(rows, cols, self.sweep(rows, cols, safe=safe), relaxation=relaxation)
        rows.turn()

    def symmetric_step(self, *, safe: bool, relaxation: float = 0.5) -> None:
        """Both potentials from the old pair, each moved part of the way (averaged Jacobi)."""
        partial_x = self.sweep(self.x, self.y, safe=safe)
        partial_y = self.sweep(self.y, self.x, safe=safe)
        self.settle(self.x, self.y, partial_x, relaxation=relaxation)
        self.settle(self.y, self.x, partial_y, relaxation=relaxation)
        self.x.turn()
        self.y.turn()

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Base-2 potentials (f [n], g [m]), float64."""
        return self.x.potential[: self.x.n].clone(), self.y.potential[: self.y.n].clone()

"""Conjugate gradients on the Schur complement of the linearised Sinkhorn equations, streamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .averages import RowMeans


@dataclass(frozen=True)
class SchurSolution:
    """phi [n, k] and gamma [m, k] solving kappa_x phi + A gamma = p, B phi + kappa_y gamma = q.

    residual: largest |rhs - S gamma| / |rhs| of the k Schur systems in the Euclidean norm, measured at the end by a
    product of its own, not by the recursion.
    """

    phi: torch.Tensor
    gamma: torch.Tensor
    residual: float
    n_iterations: int


class SchurSystem:
    """S = diag(c) K, K = kappa_y - B A / kappa_x, with A, B the row- and column-normalised plan and c = P^T 1.

    K is self-adjoint for the inner product weighted by c, in which conjugate gradients are run: that is Jacobi
    preconditioning by diag(c). With kappa_x = kappa_y = 1 it is singular on constants, which are projected out.
    """

    def __init__(self, averages: RowMeans, col_sums: torch.Tensor, *, kappa_x: float, kappa_y: float):
        self.averages = averages
        self.c = col_sums[:, None]  # [m, 1]
        self.kappa_x, self.kappa_y = kappa_x, kappa_y
        self.singular = kappa_x == kappa_y == 1.0

    def solve(
        self, p: torch.Tensor, back: torch.Tensor, q: torch.Tensor, *, tol: float, max_iterations: int
    ) -> SchurSolution:
        """p [n, k], back = B p [m, k] and q [m, k], float64: k systems share each sweep.

        When the recursion says that all are solved the residual is measured; conjugate gradients start again from it
        until it is below tol, or no longer halves: then the arithmetic of the sweeps allows no less.
        """
        rhs = self._project(q - back / self.kappa_x)
        scale = self._norms(rhs)
        gamma, left = torch.zeros_like(rhs), rhs
        forward = torch.zeros_like(p)  # A gamma
        residual, n_iterations = float(scale.amax() > 0), 0
        while residual > tol and n_iterations < max_iterations:
            step, count = self._conjugate_gradients(left, scale, tol, max_iterations - n_iterations)
            gamma = gamma + step
            forward = self._means(gamma)
            left = self._project(rhs - self._product(gamma, forward))
            previous, residual = residual, self._relative(left, scale)
            n_iterations += count
            if not residual < previous / 2:
                break
        # Columns without weight do not enter S's inner product: their own equation gives them.
        gamma = torch.where(self.c > 0, gamma, gamma + left / self.kappa_y)
        return SchurSolution((p - forward) / self.kappa_x, gamma, residual, n_iterations)

    def _conjugate_gradients(
        self, rhs: torch.Tensor, scale: torch.Tensor, tol: float, max_iterations: int
    ) -> tuple[torch.Tensor, int]:
        """K step = rhs until the recursion's residual is below tol * scale; the number of iterations."""
        step, left, direction, count = torch.zeros_like(rhs), rhs, rhs, 0
        square = self._inner(left, left)
        while count < max_iterations and self._relative(left, scale) > tol:
            image = self._product(direction, self._means(direction))
            length = _ratio(square, self._inner(direction, image))
            step = step + length * direction
            left = self._project(left - length * image)
            previous, square = square, self._inner(left, left)
            direction = left + _ratio(square, previous) * direction
            count += 1
        return step, count

    def _product(self, gamma: torch.Tensor, forward: torch.Tensor) -> torch.Tensor:
        """K gamma from forward = A gamma."""
        return self.kappa_y * gamma - self._means(forward, transpose=True) / self.kappa_x

    def _means(self, values: torch.Tensor, *, transpose: bool = False) -> torch.Tensor:
        return self.averages.means(values, transpose=transpose).double()

    def _project(self, gamma: torch.Tensor) -> torch.Tensor:
        return gamma - (self.c * gamma).sum(0) / self.c.sum() if self.singular else gamma

    def _inner(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (self.c * left * right).sum(0)

    def _norms(self, gamma: torch.Tensor) -> torch.Tensor:
        return (self.c * gamma).norm(dim=0)

    def _relative(self, left: torch.Tensor, scale: torch.Tensor) -> float:
        return _ratio(self._norms(left), scale).amax().item()


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """numerator / denominator, zero where a system is already solved exactly."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)

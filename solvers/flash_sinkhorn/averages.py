"""What a plan does to values: weighted means over its rows, streamed. Written once; one subclass a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from .checks import Inputs
from .sweeps import Cloud, Sweeps
from .tiles import LARGEST_DIRECT_DIMENSION, LOG2_E

C = TypeVar("C", bound=Cloud)


@dataclass(frozen=True)
class Motion:
    """Rows move along v [n, d] and columns along w [m, d], None: not at all; rows and columns are those of a sweep.

    C then changes by dC_ij = 2 cost_scale (x_i - y_j).(v_i - w_j).
    """

    v: torch.Tensor | None
    w: torch.Tensor | None


class Averages(ABC, Generic[C]):
    """Means with the weights P_ij / (P 1)_i over j of one plan (transpose: P_ij / (P^T 1)_j over i).

    Rows are normalised by their own sum inside each sweep, so nothing overflows whatever the potentials, and the
    rounding of a row's bias drops out. The first sweep over a side keeps a running maximum and leaves the side's sums
    L_i = log2((P 1)_i / a_i) behind; later ones subtract them from the exponents instead.
    """

    eps: float

    def __init__(self, inputs: Inputs, sweeps: Sweeps[C], *, cost_scale: float):
        self.inputs = inputs
        self.cost_scale = cost_scale
        self.sweeps = sweeps
        self.centre = _centre(inputs)
        self._log2_sums: dict[bool, torch.Tensor] = {}

    def set_potentials(self, f: torch.Tensor, g: torch.Tensor, eps: float) -> None:
        """f [n], g [m] in units of the cost."""
        for cloud, potential in ((self.sweeps.x, f), (self.sweeps.y, g)):
            cloud.potential[: cloud.n] = potential.double() * (LOG2_E / eps)
        self.sweeps.set_epsilon(eps, 1.0)
        self.eps = eps
        self._log2_sums.clear()

    def log2_sums(self, *, transpose: bool = False) -> torch.Tensor:
        """L [n] in float64."""
        if transpose not in self._log2_sums:
            self._log2_sums[transpose] = self._sweep_sums(*self._sides(transpose))
        return self._log2_sums[transpose]

    def means(self, values: torch.Tensor, *, transpose: bool = False) -> torch.Tensor:
        """sum_j P_ij values_j / (P 1)_i [n, k] of values [m, k], in the precision of the sweeps."""
        means, sums = self._means(*self._sides(transpose), values, self._log2_sums.get(transpose))
        self._log2_sums.setdefault(transpose, sums)
        return means

    def point_means(self, *, transpose: bool = False) -> torch.Tensor:
        """The means [n, d] of the opposite points, about `centre`."""
        means, sums = self._point_means(*self._sides(transpose), self._log2_sums.get(transpose))
        self._log2_sums.setdefault(transpose, sums)
        return means

    def cost_change_means(self, motion: Motion, *, transpose: bool = False) -> torch.Tensor:
        """Means [n] of dC_ij."""
        rows, cols = self._sides(transpose)
        sums = self.log2_sums(transpose=transpose)
        alpha, beta = torch.zeros_like(rows.potential[: rows.n]), torch.zeros_like(cols.potential[: cols.n])
        means, _ = self._moments(rows, cols, alpha, beta, motion, sums, with_points=False)
        return -means

    def moments(
        self, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, *, transpose: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of q_ij = alpha_i + beta_j - dC_ij [n] and of q_ij y_j + eps w_j [n, d], y about `centre`.

        With alpha, beta the changes of the potentials (and eps times those of the log-weights) that is eps times the
        change of (P 1)_i and (P y)_i, over (P 1)_i. alpha [n], beta [m] are those of the rows and columns of the sweep.
        """
        rows, cols = self._sides(transpose)
        sums = self.log2_sums(transpose=transpose)
        return self._moments(rows, cols, alpha, beta, motion, sums, with_points=True)

    def _sides(self, transpose: bool) -> tuple[C, C]:
        return (self.sweeps.y, self.sweeps.x) if transpose else (self.sweeps.x, self.sweeps.y)

    @abstractmethod
    def _sweep_sums(self, rows: C, cols: C) -> torch.Tensor: ...

    @abstractmethod
    def _means(
        self, rows: C, cols: C, values: torch.Tensor, log2_sums: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def _point_means(self, rows: C, cols: C, log2_sums: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def _moments(
        self,
        rows: C,
        cols: C,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        motion: Motion,
        log2_sums: torch.Tensor,
        *,
        with_points: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def _centre(inputs: Inputs) -> torch.Tensor:
    """[d], float64: values are taken about it, so that a common offset does not cancel digits.

    Clouds stored for direct differences of float32 points are about zero.
    """
    if inputs.x.shape[1] > LARGEST_DIRECT_DIMENSION or inputs.x.dtype is torch.float64:
        return inputs.centre
    return inputs.a @ inputs.x.double() / inputs.a.sum()

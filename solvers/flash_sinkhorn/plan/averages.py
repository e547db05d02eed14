"""What a plan does to values: weighted means over its rows, streamed. Written once; one subclass a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from ..inputs.checks import Inputs
from ..sweeps.sweeps import Cloud, Sweeps
from ..sweeps.tiles import LOG2_E

C = TypeVar("C", bound=Cloud)


@dataclass(frozen=True)
class Motion:
    """Rows move along v [n, d] and columns along w [m, d], None: not at all; rows and columns are those of a sweep.

    C then changes by dC_ij = 2 cost_scale (x_i - y_j).(v_i - w_j).
    """

    v: torch.Tensor | None
    w: torch.Tensor | None


class RowMeans(Protocol):
    """What a plan needs of its means, whichever pairs they go over; members as of `Averages`."""

    inputs: Inputs
    cost_scale: float
    eps: float
    centre: torch.Tensor
    n_passes: int

    def masses(self, *, transpose: bool = False) -> torch.Tensor: ...

    def means(self, values: torch.Tensor, *, transpose: bool = False) -> torch.Tensor: ...

    def point_means(self, *, transpose: bool = False) -> torch.Tensor: ...

    def displacement(self, *, transpose: bool = False) -> torch.Tensor: ...

    def cost_change_means(self, motion: Motion, *, transpose: bool = False) -> torch.Tensor: ...

    def moments(
        self, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, *, transpose: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


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
        self.centre = inputs.centre  # values are taken about it: a common offset cancels no digits
        self.n_passes = 0  # sweeps over all pairs so far
        self._log2_sums: dict[bool, torch.Tensor] = {}
        self._settled: dict[bool, C] = {}

    def set_potentials(self, f: torch.Tensor, g: torch.Tensor, eps: float) -> None:
        """f [n], g [m] in units of the cost."""
        for cloud, potential in ((self.sweeps.x, f), (self.sweeps.y, g)):
            cloud.potential[: cloud.n] = potential.double() * (LOG2_E / eps)
        self.sweeps.set_epsilon(eps, 1.0)
        self.eps = eps
        self._log2_sums.clear()
        self._settled.clear()

    def log2_sums(self, *, transpose: bool = False) -> torch.Tensor:
        """L [n] in float64."""
        if transpose not in self._log2_sums:
            self._log2_sums[transpose] = self._sweep_sums(*self._sides(transpose))
            self.n_passes += 1
        return self._log2_sums[transpose]

    def masses(self, *, transpose: bool = False) -> torch.Tensor:
        """Row sums P 1 [n] in float64; zero where the weight is."""
        weight = self.inputs.b if transpose else self.inputs.a
        sums = weight * torch.exp2(self.log2_sums(transpose=transpose))
        return torch.where(weight > 0, sums, 0.0)

    def means(self, values: torch.Tensor, *, transpose: bool = False) -> torch.Tensor:
        """sum_j P_ij values_j / (P 1)_i [n, k] of values [m, k], in the precision of the sweeps."""
        return self._means_of(values, transpose)

    def point_means(self, *, transpose: bool = False) -> torch.Tensor:
        """The means [n, d] of the opposite points, about `centre`."""
        return self._means_of(None, transpose)

    def displacement(self, *, transpose: bool = False) -> torch.Tensor:
        """x_i less the mean of the opposite points [n, d]; a common offset costs no digits."""
        points = self.inputs.y if transpose else self.inputs.x
        return (points - self.centre.to(points.dtype)).sub_(self.point_means(transpose=transpose))

    def cost_change_means(self, motion: Motion, *, transpose: bool = False) -> torch.Tensor:
        """Means [n] of dC_ij."""
        rows, cols = self._sides(transpose)
        alpha, beta = torch.zeros_like(rows.potential[: rows.n]), torch.zeros_like(cols.potential[: cols.n])
        self.n_passes += 1
        return -self._moments(self._settled_rows(transpose), cols, alpha, beta, motion, with_points=False)[0]

    def moments(
        self, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, *, transpose: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of q_ij = alpha_i + beta_j - dC_ij [n] and of q_ij y_j [n, d], y about `centre`.

        With alpha, beta the changes of the potentials (and eps times those of the log-weights), P_ij q_ij / eps is the
        change of P_ij. alpha [n], beta [m] are those of the rows and columns of the sweep.
        """
        _, cols = self._sides(transpose)
        self.n_passes += 1
        return self._moments(self._settled_rows(transpose), cols, alpha, beta, motion, with_points=True)

    def _means_of(self, values: torch.Tensor | None, transpose: bool) -> torch.Tensor:
        rows, cols = self._sides(transpose)
        self.n_passes += 1
        if transpose in self._log2_sums:
            return self._means(self._settled_rows(transpose), cols, values, settled=True)[0]
        means, self._log2_sums[transpose] = self._means(rows, cols, values, settled=False)
        return means

    def _settled_rows(self, transpose: bool) -> C:
        if transpose not in self._settled:
            sums = self.log2_sums(transpose=transpose)
            self._settled[transpose] = self._settle(self._sides(transpose)[0], sums)
        return self._settled[transpose]

    def _sides(self, transpose: bool) -> tuple[C, C]:
        return (self.sweeps.y, self.sweeps.x) if transpose else (self.sweeps.x, self.sweeps.y)

    @abstractmethod
    def _sweep_sums(self, rows: C, cols: C) -> torch.Tensor:
        """L [n] in float64."""

    @abstractmethod
    def _settle(self, rows: C, log2_sums: torch.Tensor) -> C:
        """The rows with their sums taken out of their bias."""

    @abstractmethod
    def _means(
        self, rows: C, cols: C, values: torch.Tensor | None, *, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means [n, k] of values [m, k] (None: the columns' centred points), and L [n] of the rows as given."""

    @abstractmethod
    def _moments(
        self, rows: C, cols: C, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, *, with_points: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `moments`, of settled rows; the second only with_points."""

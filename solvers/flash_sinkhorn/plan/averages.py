"""What a plan does to values: weighted means over its rows, streamed. Written once; one subclass a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from ..inputs.checks import FAR, LARGEST_EXPONENT, LARGEST_IN_UNITS, Inputs
from ..inputs.far import Far, Seen
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
    L_i = log2((P 1)_i / a_i) behind; later ones subtract them from the exponents instead. Means over the rows of far
    points without weight are sums of their own, in float64.
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
        """f [n], g [m] in units of the cost. Far points' may be more than sweeps can hold; their rows are not used."""
        inputs, unit = self.inputs, LOG2_E / eps
        farthest = 2.0 * FAR * LARGEST_IN_UNITS * inputs.unit  # from the centre, where sweeps have a point
        largest = min(LARGEST_EXPONENT, self.cost_scale * unit * inputs.x.shape[1] * farthest**2)
        for cloud, potential, weight in ((self.sweeps.x, f, inputs.a), (self.sweeps.y, g, inputs.b)):
            exponents = potential.double() * unit
            cloud.potential[: cloud.n] = torch.where(weight > 0, exponents, exponents.clamp(max=largest))
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
        own, opposite = self._far(transpose)
        means = self._means_of(opposite.without(values) if opposite else values, transpose)
        return self._put(own, means, values, transpose) if own else means

    def point_means(self, *, transpose: bool = False) -> torch.Tensor:
        """The means [n, d] of the opposite points, about `centre`."""
        means, (own, _) = self._means_of(None, transpose), self._far(transpose)
        return self._put(own, means, self._about_centre(not transpose), transpose) if own else means

    def displacement(self, *, transpose: bool = False) -> torch.Tensor:
        """x_i less the mean of the opposite points [n, d]; a common offset costs no digits."""
        points, means = self._about_centre(transpose), self.point_means(transpose=transpose)
        own, _ = self._far(transpose)
        if own:
            points = own.put(points[None], own.points - self.centre)[0]
        return points.sub_(means)

    def cost_change_means(self, motion: Motion, *, transpose: bool = False) -> torch.Tensor:
        """Means [n] of dC_ij."""
        own, opposite = self._far(transpose)
        means = self._cost_change_means(_without(motion, own, opposite), transpose)
        return own.put(means.double()[None], self._far_cost_changes(own, motion, transpose))[0] if own else means

    def _cost_change_means(self, motion: Motion, transpose: bool) -> torch.Tensor:
        rows, cols = self._sides(transpose)
        alpha, beta = torch.zeros_like(rows.potential[: rows.n]), torch.zeros_like(cols.potential[: cols.n])
        self.n_passes += 1
        return -self._moments(self._settled_rows(transpose), cols, alpha, beta, motion, with_points=False)[0]

    def moments(
        self, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, *, transpose: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of q_ij = alpha_i + beta_j - dC_ij [n] and of q_ij y_j [n, d], y about `centre`.

        With alpha, beta the changes of the potentials (and eps times those of the log-weights), P_ij q_ij / eps is the
        change of P_ij. alpha [n], beta [m] are those of the rows and columns of the sweep. Rows of far points without
        weight are left out: zero.
        """
        own, opposite = self._far(transpose)
        alpha, beta = own.without(alpha) if own else alpha, opposite.without(beta) if opposite else beta
        motion = _without(motion, own, opposite)
        _, cols = self._sides(transpose)
        self.n_passes += 1
        found = self._moments(self._settled_rows(transpose), cols, alpha, beta, motion, with_points=True)
        return (own.without(found[0]), own.without(found[1])) if own else found

    def _means_of(self, values: torch.Tensor | None, transpose: bool) -> torch.Tensor:
        rows, cols = self._sides(transpose)
        self.n_passes += 1
        if transpose in self._log2_sums:
            return self._means(self._settled_rows(transpose), cols, values, settled=True)[0]
        means, self._log2_sums[transpose] = self._means(rows, cols, values, settled=False)
        return means

    def _far(self, transpose: bool) -> tuple[Far | None, Far | None]:
        """Of the rows and of the columns."""
        far = self.inputs.far_x, self.inputs.far_y
        return far[::-1] if transpose else far

    def _about_centre(self, transpose: bool) -> torch.Tensor:
        """[n, d]: the rows' points."""
        points = self.inputs.y if transpose else self.inputs.x
        return points - self.centre.to(points.dtype)

    def _put(self, far: Far, means: torch.Tensor, values: torch.Tensor, transpose: bool) -> torch.Tensor:
        return far.put(means[None], far.means(self._seen(transpose), values[None]))[0]

    def _seen(self, transpose: bool) -> Seen:
        points, weight = (self.inputs.x, self.inputs.a) if transpose else (self.inputs.y, self.inputs.b)
        _, cols = self._sides(transpose)
        potential = cols.potential[: cols.n] * (self.eps / LOG2_E)
        return Seen.of(points[None], weight[None], potential[None], eps=self.eps, cost_scale=self.cost_scale)

    def _far_cost_changes(self, far: Far, motion: Motion, transpose: bool) -> torch.Tensor:
        """[1, r] float64: means of dC_ij over far rows."""
        seen, x = self._seen(transpose), far.points[0] - self.centre
        y = self._about_centre(not transpose).double()
        v = torch.zeros_like(x) if motion.v is None else motion.v[far.index[0]].double()
        w = torch.zeros_like(y) if motion.w is None else motion.w.double()
        values = torch.cat([y, w, (y * w).sum(1, keepdim=True)], 1)
        of_y, of_w, of_both = far.means(seen, values[None])[0].split([y.shape[1], y.shape[1], 1], 1)
        return 2.0 * self.cost_scale * ((x - of_y) * v - x * of_w + of_both / x.shape[1]).sum(1)[None]

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


def _without(motion: Motion, rows: Far | None, cols: Far | None) -> Motion:
    """Far points without weight stay where they are: their motion may be as large as to leave others no digits."""
    v, w = motion.v, motion.w
    return Motion(rows.without(v) if rows and v is not None else v, cols.without(w) if cols and w is not None else w)

"""The transport plan as an operator: applied to vectors, its barycentric map, and the gradient of the OT value."""

from __future__ import annotations

import torch

from ..inputs.batches import Batch, problem
from ..inputs.checks import LARGEST_EXPONENT, Inputs, checked_inputs, member, positive
from ..sweeps.replay import replayed
from ..sweeps.tiles import LOG2_E, Precision
from .averages import Averages, RowMeans


class Plan:
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps), C = cost_scale |x - y|^2, applied without being stored.

    x [n, d], y [m, d]: points of any float dtype, CPU or CUDA. a [n], b [m]: non-negative weights (uniform if None;
    their masses may differ). f [n], g [m]: any finite potentials, as `solve` returns them; those of points without
    weight do not matter. Not differentiable.
    precision as in `solve`: "exact" is FP32 grade on a GPU (the points' own type on a CPU); "fast" and "mixed" round
    points, so the plan is that of the rounded clouds.

    Raises ValueError, naming the argument and the fix, as `solve` does, and for potentials of the wrong shape, NaN, or
    so large at points with weight that f / eps leaves float32's range.

    Source: arXiv 2602.03067, Prop. 3.
    """

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        f: torch.Tensor,
        g: torch.Tensor,
        *,
        eps: float,
        cost_scale: float = 1.0,
        precision: Precision | str = Precision.EXACT,
    ):
        eps, cost_scale = positive("eps", eps), positive("cost_scale", cost_scale)
        precision = member("precision", Precision, precision)
        inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, balanced=False)
        self._set(inputs, *_checked_potentials(f, g, inputs, eps), eps, cost_scale, precision)
        self.dtype = x.dtype

    @classmethod
    def of_checked(
        cls, inputs: Inputs, f: torch.Tensor, g: torch.Tensor, *, eps: float, cost_scale: float, precision: Precision
    ) -> Plan:
        """Of weights as given and finite float64 potentials, without a look at any of them: nothing waits."""
        plan = cls.__new__(cls)
        plan._set(inputs, f, g, eps, cost_scale, precision)
        return plan

    def _set(
        self, inputs: Inputs, f: torch.Tensor, g: torch.Tensor, eps: float, cost_scale: float, precision: Precision
    ) -> None:
        averages = _averages(inputs, cost_scale, precision)
        averages.set_potentials(f, g, eps)
        self.precision = precision
        self.take(averages, inputs.x.dtype)

    def take(self, means: RowMeans, dtype: torch.dtype) -> None:
        """Be the plan that these are the means of; dtype: of what is returned in x's."""
        self.averages, self.inputs, self.dtype = means, means.inputs, dtype
        self.eps, self.cost_scale = means.eps, means.cost_scale

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """P v: v [m] or [m, k], any float dtype -> [n] or [n, k] in x's dtype."""
        return self._apply("v", v, transpose=False)

    def apply_transpose(self, u: torch.Tensor) -> torch.Tensor:
        """P^T u: u [n] or [n, k], any float dtype -> [m] or [m, k] in x's dtype."""
        return self._apply("u", u, transpose=True)

    def row_sums(self) -> torch.Tensor:
        """P 1: float64 [n]; zero where a is."""
        return self.sums()

    def col_sums(self) -> torch.Tensor:
        """P^T 1: float64 [m]; zero where b is."""
        return self.sums(transpose=True)

    def sums(self, *, transpose: bool = False) -> torch.Tensor:
        """`row_sums`, or with transpose `col_sums`."""
        return self.averages.masses(transpose=transpose)

    def means(self, v: torch.Tensor, *, transpose: bool = False) -> torch.Tensor:
        """(P v)_i / (P 1)_i, defined for rows without weight too: v [m] or [m, k] -> [n] or [n, k] in x's dtype.

        transpose: (P^T v)_j / (P^T 1)_j, from [n] or [n, k] to [m] or [m, k].
        """
        v = self._checked_values("v", v, transpose)
        means = self.averages.means(v if v.ndim == 2 else v[:, None], transpose=transpose)
        return means.reshape(-1, *v.shape[1:]).to(self.dtype)

    def barycentre(self, *, transpose: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(P 1 float64 [n], P y [n, d] in x's dtype) from one sweep; transpose: (P^T 1 [m], P^T x [m, d])."""
        means = self.averages.point_means(transpose=transpose)
        means += self.averages.centre.to(means.dtype)
        sums = self.sums(transpose=transpose)
        return sums, (means * sums.to(means.dtype)[:, None]).to(self.dtype)

    def displacement(self, *, transpose: bool = False) -> torch.Tensor:
        """x_i - (P y)_i / (P 1)_i [n, d] in x's dtype, taken about a common centre: an offset costs no digits.

        transpose: y_j - (P^T x)_j / (P^T 1)_j [m, d].
        """
        return self.averages.displacement(transpose=transpose).to(self.dtype)

    def _apply(self, name: str, v: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        v = self._checked_values(name, v, transpose)
        means = self.averages.means(v if v.ndim == 2 else v[:, None], transpose=transpose)
        applied = means * self.sums(transpose=transpose).to(means.dtype)[:, None]
        return applied.reshape(-1, *v.shape[1:]).to(self.dtype)

    def _checked_values(self, name: str, v: torch.Tensor, transpose: bool) -> torch.Tensor:
        n = self.inputs.a.shape[0] if transpose else self.inputs.b.shape[0]
        device = self.inputs.x.device
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            raise ValueError(f"{name} must be a floating-point torch tensor, got {type(v).__name__}")
        if v.ndim not in (1, 2) or v.shape[0] != n or 0 in v.shape:
            raise ValueError(f"{name} must have shape [{n}] or [{n}, k], got {tuple(v.shape)}")
        if v.device != device:
            raise ValueError(f"{name} must be on {device} like the points, got {v.device}")
        return v.detach()


def plan_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    v: torch.Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    transpose: bool = False,
    precision: Precision | str = Precision.EXACT,
) -> torch.Tensor:
    """P v for v [m] or [m, k], or P^T v for v [n] or [n, k] (transpose). Shapes, dtypes and errors as of `Plan`."""
    plan = Plan(x, y, a, b, f, g, eps=eps, cost_scale=cost_scale, precision=precision)
    return plan.apply_transpose(v) if transpose else plan.apply(v)


def barycentric_projection(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    values: torch.Tensor | None = None,
    precision: Precision | str = Precision.EXACT,
) -> torch.Tensor:
    """Where the plan sends each x_i on average: (P values)_i / (P 1)_i [n, k] in x's dtype.

    values [m] or [m, k]: y if None. One-hot labels of y give the label probabilities of x. Rows without weight are
    mapped like any other point. Other arguments and errors as of `Plan`.
    """
    plan = Plan(x, y, a, b, f, g, eps=eps, cost_scale=cost_scale, precision=precision)
    if values is not None:
        return plan.means(values)
    means = plan.averages.point_means()
    return means.add_(plan.averages.centre.to(means.dtype)).to(plan.dtype)


def gradient(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    balanced: bool = True,
    precision: Precision | str = Precision.EXACT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of OT_eps in the points: 2 cost_scale a_i (x_i - (P y)_i / (P 1)_i) [n, d], and likewise in y [m, d].

    Each side is normalised by its own sums: at converged potentials that is the gradient of the value. Otherwise each
    side is the exact gradient of the semi-dual value that holds the opposite potential and takes its own from a
    half-step, so that after a fixed number of iterations too it belongs to a value. balanced=False: rows weigh their
    own sums (P 1)_i instead of a_i, as the value with relaxed marginals asks for. Points without weight get exactly
    zero. In the dtypes of x and y. Arguments and errors as of `Plan`.

    Source: arXiv 2602.03067, Cor. 4.
    """
    eps, cost_scale = positive("eps", eps), positive("cost_scale", cost_scale)
    precision = member("precision", Precision, precision)
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, balanced=False)
    f, g = _checked_potentials(f, g, inputs, eps)
    dtypes = x.dtype, y.dtype

    def compute(unit: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *own, f, g = tensors
        averages = _averages(problem(unit, *own), cost_scale, precision)
        averages.set_potentials(f, g, eps)
        gradients = []
        for transpose, weight, dtype in ((False, own[2], dtypes[0]), (True, own[3], dtypes[1])):
            displacement = averages.displacement(transpose=transpose)
            mass = weight if balanced else averages.masses(transpose=transpose)
            factor = (2.0 * cost_scale * mass).to(displacement.dtype)[:, None]
            gradients.append(displacement.mul_(factor).to(dtype))
        return tuple(gradients)

    kind = "gradient", eps, cost_scale, balanced, precision, dtypes
    batch = Batch.of(inputs)
    of_x, of_y = replayed(kind, batch.units, compute, *batch.tensors, f[None], g[None])
    return of_x[0], of_y[0]


def _checked_potentials(
    f: torch.Tensor, g: torch.Tensor, inputs: Inputs, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, potential, weight in (("f", f, inputs.a), ("g", g, inputs.b)):
        if not isinstance(potential, torch.Tensor) or not potential.is_floating_point():
            raise ValueError(f"{name} must be a floating-point torch tensor, got {type(potential).__name__}")
        if potential.shape != weight.shape:
            raise ValueError(f"{name} must have shape [{weight.shape[0]}], got {tuple(potential.shape)}")
        if potential.device != weight.device:
            raise ValueError(f"{name} must be on {weight.device} like the points, got {potential.device}")
    f, g = f.detach().double(), g.detach().double()
    sides = ((f, inputs.a), (g, inputs.b))  # far points without weight have large ones
    largest_of = [torch.where((weight > 0) | v.isnan(), v, 0.0).abs().amax() for v, weight in sides]
    for name, largest in zip("fg", torch.stack(largest_of).tolist(), strict=True):
        if not largest * LOG2_E / eps < LARGEST_EXPONENT:  # true for nan too
            raise ValueError(f"{name} contains NaN, infinite values, or values beyond float32's range times eps")
    return f, g


def _averages(inputs: Inputs, cost_scale: float, precision: Precision) -> Averages:
    if inputs.x.device.type == "cpu":
        from .blocked_averages import BlockedAverages

        return BlockedAverages(inputs, cost_scale=cost_scale)
    from .triton_averages import TritonAverages  # Triton is there only where a GPU is

    return TritonAverages(inputs, cost_scale=cost_scale, precision=precision)

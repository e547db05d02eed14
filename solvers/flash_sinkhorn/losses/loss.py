"""The OT value of converged potentials as a function that autograd differentiates, once and twice, by the envelope
theorem: nothing is propagated through iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..inputs.checks import Inputs, positive
from ..plan.hvp import HessianProduct, hvp
from ..plan.operators import Plan
from ..sweeps.tiles import Precision
from .functions import Gradients, Term, apart, full_precision
from .notices import NotConverged, tell
from .values import balance, dual_value, relative_marginal, weight_gradient_slope, weight_gradients


@dataclass(frozen=True)
class Regularisation:
    """What a value is of: eps and rho in units of C = cost_scale |x - y|^2; rho None is a constraint.

    precision: of the sweeps of gradients. hessian_tol: on the linear systems of second derivatives, relative.
    """

    eps: float
    cost_scale: float = 1.0
    rho_x: float | None = None
    rho_y: float | None = None
    precision: Precision = Precision.EXACT
    hessian_tol: float = 1e-6

    @property
    def balanced(self) -> bool:
        return self.rho_x is None and self.rho_y is None

    def plan(self, *tensors: torch.Tensor, checked: Inputs | None = None) -> Plan:
        """Of x, y, a, b, f, g. checked: what takes the place of the first four, which are then not looked at."""
        options: dict[str, Any] = {"eps": self.eps, "cost_scale": self.cost_scale, "precision": self.precision}
        return Plan(*tensors, **options) if checked is None else Plan.of_checked(checked, *tensors[4:], **options)


def ot_value(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho_x: float | None = None,
    rho_y: float | None = None,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float = 1e-6,
) -> torch.Tensor:
    """OT_eps from converged potentials f [n], g [m], float64 scalar; differentiable twice in x, y, a and b.

    Arguments as of `hvp`, whose tol is hessian_tol here; f and g are constants to autograd. The value is off by the
    square of the residual, first derivatives by the residual. With balanced marginals the weights count as if
    normalised to their mean mass, and their gradients are f - eps (1 - |b|) and g - eps (1 - |a|), taken with
    <a, f> / |a| = <b, g> / |b|; `values.weight_gradients` has the rest. Where a marginal is relaxed the value takes a
    sweep, else none; a gradient takes one sweep a cloud, a second derivative one linear solve.

    Raises ValueError as `Plan` does; in backward also for second derivatives in the weight of a point without any, and
    NotImplementedError for third derivatives.

    Source: gradients arXiv 2602.03067, Cor. 4; second derivatives Th. 5.
    """
    problem = Regularisation(
        eps=positive("eps", eps),
        cost_scale=positive("cost_scale", cost_scale),
        rho_x=None if rho_x is None else positive("rho_x", rho_x),
        rho_y=None if rho_y is None else positive("rho_y", rho_y),
        precision=Precision(precision),
        hessian_tol=positive("hessian_tol", hessian_tol),
    )

    def solved(
        x: torch.Tensor,
        y: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        f: torch.Tensor,
        g: torch.Tensor,
    ) -> tuple[None, list[Term]]:
        tensors = (*promoted(x, y, a, b), f.double(), g.double())
        problem.plan(*tensors)  # its checks, now rather than in backward
        return None, [pair_term(*tensors, problem)]

    with full_precision(x):
        _, (term,) = apart(solved, x, y, a, b, f, g)
        return term.attached(*promoted(x, y, a, b))


def promoted(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clouds in float64 if one of them is, else in float32; weights in float64, uniform if None. Differentiable."""
    dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return x.to(dtype), y.to(dtype), _weights(a, x), _weights(b, y)


def _weights(weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor:
    if weight is not None:
        return weight.double()
    return torch.full(points.shape[:-1], 1.0 / points.shape[-2], dtype=torch.float64, device=points.device)


def pair_term(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    problem: Regularisation,
) -> Term:
    """`ot_value` of checked and promoted constants."""
    derivatives = Pair(problem)
    return Term(derivatives.value((x, y, a, b, f, g)), f, g, derivatives)


def self_term(x: torch.Tensor, a: torch.Tensor, f: torch.Tensor, update: torch.Tensor, problem: Regularisation) -> Term:
    """OT_eps of x [n, d], a [n] with itself from `self_transport.solve_self`'s f and update; otherwise as `pair_term`.

    The value takes no sweep, because the pair meets its column marginal; one sweep serves both sides of the gradient.
    """
    derivatives = SelfPair(problem)
    return Term(derivatives.value((x, a, update, f)), f, update, derivatives, symmetric=True)


class Pair:
    """OT_eps and its first and second derivatives in (x, y, a, b), given (x, y, a, b, f, g).

    checked: the first four of these where they are known to be sound: values and gradients then take no look at them.
    """

    def __init__(self, problem: Regularisation, checked: Inputs | None = None):
        self.problem, self.checked = problem, checked

    def plan(self, tensors: Sequence[torch.Tensor]) -> Plan:
        """Of the values' first derivatives."""
        return self.problem.plan(*tensors, checked=self.checked)

    def value(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """float64 scalar."""
        problem, (a, b, f, g) = self.problem, tensors[2:]
        mass = None if problem.balanced else self.plan(tensors).row_sums().sum()
        return dual_value(a, b, f, g, eps=problem.eps, rho_x=problem.rho_x, rho_y=problem.rho_y, plan_mass=mass)

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        """Only those needed: points' in the dtype of x and y, weights' in float64."""
        a, b, f, g = tensors[2:]
        problem = self.problem
        plan = self.plan(tensors) if needed[0] or needed[1] else None
        points: list[torch.Tensor | None] = []
        mean_mass = (a.sum() + b.sum()) / 2 if problem.balanced else None
        sides = (False, needed[0], a, problem.rho_x), (True, needed[1], b, problem.rho_y)
        for transpose, is_needed, weight, rho in sides:
            if plan is None or not is_needed:
                points.append(None)
                continue
            displacement = plan.displacement(transpose=transpose)
            mass = weight if rho is None else plan.sums(transpose=transpose)
            if mean_mass is not None:
                mass = mass * (mean_mass / mass.sum())
            points.append((2.0 * problem.cost_scale * mass).to(displacement.dtype)[:, None] * displacement)
        weights: Gradients = (None, None)
        if needed[2] or needed[3]:
            weights = weight_gradients(a, b, f, g, eps=problem.eps, rho_x=problem.rho_x, rho_y=problem.rho_y)
        return *points, *weights

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        """Change of the four gradients along a direction in (x, y, a, b); None is zero."""
        a, b, f, g = tensors[2:]
        problem = self.problem
        v_x, v_y, v_a, v_b = direction
        if all(v is None for v in direction):
            return (None,) * 4
        for name, v, weight in (("a", v_a, a), ("b", v_b, b)):
            if v is not None and bool(((weight == 0) & (v != 0)).any()):
                raise ValueError(f"second derivatives in {name} need positive weights: remove the points without any")
        in_weights = v_a is not None or v_b is not None
        u_a = torch.zeros_like(a) if v_a is None else v_a
        u_b = torch.zeros_like(b) if v_b is None else v_b
        tangent = _onto_equal_masses(a, b, u_a, u_b) if problem.balanced else (u_a, u_b)
        product = self.product(tensors, (v_x, v_y, *(tangent if in_weights else (None, None))))
        if not product.converged:
            tell(
                f"second derivatives: the linear solve ended at relative residual {product.residual:.0e} (hessian_tol "
                f"{problem.hessian_tol:.0e}), for potentials of marginal residual {product.marginal_residual:.0e}",
                NotConverged,
            )
        slope_a = weight_gradient_slope(f, problem.rho_x, problem.eps)
        slope_b = weight_gradient_slope(g, problem.rho_y, problem.eps)
        h_a = slope_a * product.h_a + problem.eps * tangent[1].sum()
        h_b = slope_b * product.h_b + problem.eps * tangent[0].sum()
        if problem.balanced:
            h_a, h_b = balance(a, b, h_a, h_b)
            c_a, c_b = _curvature_of_normalisation(a, b, f, g, u_a, u_b)
            h_a, h_b = h_a + c_a, h_b + c_b
        return product.h_x, product.h_y, h_a, h_b

    def product(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> HessianProduct:
        """The Hessian times a direction that keeps masses equal where they must be."""
        problem = self.problem
        return hvp(
            *tensors,
            *direction,
            eps=problem.eps,
            cost_scale=problem.cost_scale,
            rho_x=problem.rho_x,
            rho_y=problem.rho_y,
            tol=problem.hessian_tol,
            precision=problem.precision,
        )


class SelfPair:
    """The same of OT_eps(a, a) in (x, a), given (x, a, f): both sides are alike."""

    def __init__(self, problem: Regularisation, checked: Inputs | None = None):
        self.pair = Pair(problem, checked)

    def value(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of (x, a, update, potential): with the update the potential's plan meets its column marginal."""
        _, a, update, potential = tensors
        problem, rho = self.pair.problem, self.pair.problem.rho_x
        mass = (a * relative_marginal(update, rho)).sum()
        return dual_value(a, a, potential, update, eps=problem.eps, rho_x=rho, rho_y=rho, plan_mass=mass)

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        x, a, f = tensors
        of_x, _, of_a, _ = self.pair.gradients([x, x, a, a, f, f], [needed[0], False, needed[1], False])
        return tuple(half if half is None else 2.0 * half for half in (of_x, of_a))

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        x, a, f = tensors
        v_x, v_a = direction
        h_x, h_y, h_a, h_b = self.pair.hessian_times([x, x, a, a, f, f], (v_x, v_x, v_a, v_a))
        sides = (h_x, h_y), (h_a, h_b)
        return tuple(left if left is None or right is None else left + right for left, right in sides)


def _onto_equal_masses(
    a: torch.Tensor, b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How weights normalised to their mean mass move when the weights as given move along (v_a, v_b)."""
    excess = (v_a.sum() - v_b.sum()) / 2
    return v_a - excess * a / a.sum(), v_b + excess * b / b.sum()


def _curvature_of_normalisation(
    a: torch.Tensor,
    b: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    v_a: torch.Tensor,
    v_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the second derivative of that normalisation adds to the change of the weights' gradients."""
    f, g = balance(a, b, f, g)
    mass = a.sum()
    excess = (v_a.sum() - v_b.sum()) / (2 * mass)
    mean = torch.where(a > 0, a * f, 0.0).sum() / mass
    shift = 2 * excess * mean - (_dot(f, v_a) - _dot(g, v_b)) / (2 * mass)
    return shift - excess * f, excess * g - shift


def _dot(potential: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return torch.where(direction == 0, 0.0, potential * direction).sum()

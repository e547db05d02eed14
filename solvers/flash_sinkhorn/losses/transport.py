"""Entropic OT of two weighted clouds as one differentiable result: value, debiased value, linear cost, plan."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from ..inputs.checks import checked_inputs, positive, whole
from ..iteration.loop import Limits
from ..iteration.self_transport import solve_self
from ..iteration.solver import Result, solve
from ..plan.averages import Motion
from ..plan.operators import Plan
from ..sweeps.tiles import Precision
from .functions import Term, apart, full_precision
from .loss import Regularisation, pair_term, promoted, self_term
from .near_copies import ATTEMPT_PASSES, NearCopy, solve_near_copy
from .notices import tell_not_converged
from .tolerances import default_tols, tell_if_eps_hides_the_costs

LEAST_SECONDS = 1e-6  # a problem that has none left ends after its first iteration
HESSIAN_TOL = 1e-4  # or tol, where that is less


@dataclass(frozen=True, repr=False)
class Transport:
    """What OT_eps of x, a and y, b came to, with C = cost_scale |x - y|^2 and eps, rho in units of C.

    ot: OT_eps = min <P, C> + eps KL(P | a x b) (+ rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b)), where KL(P | Q) = sum P
    ln(P / Q) - P + Q. divergence: S_eps = OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2 (+ eps (|a| - |b|)^2 / 2),
    or None without debiasing. Both are squared distances, no root is taken; float64 scalars, differentiable twice.

    f [n], g [m]: potentials of OT_eps(a, b), of P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps); f_self, g_self: those of
    the two self problems, or None. All float64 constants to autograd. residual: the largest of the problems, None
    after a fixed number of iterations; converged: whether all of them are; both as of `solve`. n_passes: sweeps over
    all pairs, the three problems' together.
    """

    ot: torch.Tensor
    divergence: torch.Tensor | None
    f: torch.Tensor
    g: torch.Tensor
    f_self: torch.Tensor | None
    g_self: torch.Tensor | None
    residual: float | None
    converged: bool | None
    tol: float | None
    problem: Regularisation
    n_passes: float
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def value(self) -> torch.Tensor:
        """The divergence if it was asked for, else the OT value."""
        return self.ot if self.divergence is None else self.divergence

    @cached_property
    def plan(self) -> Plan:
        """The plan of OT_eps(a, b) as an operator."""
        return self.problem.plan(*self.inputs, self.f, self.g)

    @cached_property
    def linear_cost(self) -> float:
        """<P, C> of that plan, without any entropy. Two sweeps on first use."""
        plan = self.plan
        # For points that move away from the centre at half their distance from it, dC is C itself.
        motion = Motion(*((points - plan.averages.centre.to(points)) / 2 for points in self.inputs[:2]))
        row_costs = plan.averages.cost_change_means(motion).double()
        return (plan.row_sums() * row_costs).sum().item()

    def __repr__(self) -> str:
        problem = self.problem
        name = "OT value" if self.divergence is None else "Sinkhorn divergence (debiased)"
        sides = (("P1", problem.rho_x), ("P^T1", problem.rho_y))
        marginals = ", ".join(
            f"{side} {'fixed' if rho is None else f'relaxed with rho {rho:g}'}" for side, rho in sides
        )
        if self.residual is None:
            state = "fixed number of iterations, residual not measured"
        else:
            state = (
                f"{'converged' if self.converged else 'NOT converged'}: residual {self.residual:.2e}, tol {self.tol:g}"
            )
        return (
            f"{name}: {self.value.item():.8g}\n"
            f"  OT_eps {self.ot.item():.8g}, linear cost <P, C> {self.linear_cost:.8g}\n"
            f"  C = {problem.cost_scale:g} |x - y|^2, eps = {problem.eps:g}; {marginals}\n"
            f"  {state}; {self.n_passes:g} passes"
        )


def transport(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    rho_x: float | None = None,
    rho_y: float | None = None,
    debias: bool = False,
    tol: float | None = None,
    n_iterations: int | None = None,
    max_iterations: int = 1_000,
    max_seconds: float | None = None,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float | None = None,
) -> Transport:
    """Solve OT_eps(a, b), and with debias its two self problems too; the values are differentiable in x, y, a and b.

    x [n, d], y [m, d], a [n], b [m]: as of `solve`, of any float dtype, strides and device; uniform weights if None.
    Solved to tol on the L1 marginal residual, or for n_iterations; max_seconds is for all problems together. tol None
    is 1e-4, or up to 1e-2 where float32's rounding of |x|^2 / eps allows no less: a RuntimeWarning says so, and the
    result states it. The warning NotConverged states the residual of a solve that ended above tol, at a limit or where
    rounding lets the residual fall no further. Gradients are off by the residual times the distances between points
    that share mass, values by eps times the residual, or its square where convergence is quick: ask for a smaller tol
    where that counts. So `converged` is about marginals: a share of the mass below tol that has far to go is not seen,
    however much its cost. With float32 clouds values are
    known to 1e-7 of eps at best, which counts where eps is above the costs. Gradients have the dtypes of their
    inputs, and no input without requires_grad costs anything. hessian_tol: on the linear systems of second
    derivatives; the lesser of tol and 1e-4 if None.

    The self problems have the same rho_x and rho_y as the first, so that S(a, a) = 0. With a tolerance and
    balanced marginals clouds that are nearly copies, or translated copies, of each other are solved from theirs.

    Raises ValueError as `solve` does, NotImplementedError in forward mode and under torch.func.vmap, which takes a
    `SamplesLoss` instead.

    Source: Feydy et al. 2019 (1810.08278); Sejourne et al. 2019 (1910.12958).
    """
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor):
            raise ValueError(f"{name} must be a floating-point torch tensor, got {type(points).__name__}")
    options: dict[str, Any] = {"eps": eps, "cost_scale": cost_scale, "rho": rho, "rho_x": rho_x, "rho_y": rho_y}
    options |= {"tol": tol, "n_iterations": n_iterations, "max_iterations": max_iterations, "max_seconds": max_seconds}
    options |= {"debias": debias, "precision": precision, "hessian_tol": hessian_tol}
    found, terms = apart(functools.partial(find, **options), x, y, a, b)
    ot, divergence = attached(terms, x, y, a, b, found.problem)
    return dataclasses.replace(found, ot=ot, divergence=divergence)


def find(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    rho_x: float | None = None,
    rho_y: float | None = None,
    debias: bool = False,
    tol: float | None = None,
    n_iterations: int | None = None,
    max_iterations: int = 1_000,
    max_seconds: float | None = None,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float | None = None,
) -> tuple[Transport, list[Term]]:
    """`transport` of constants, and the terms that `attached` makes differentiable values of."""
    tol = tol if tol is None else positive("tol", tol)
    problem = checked_problem(eps, cost_scale, rho, rho_x, rho_y, precision, hessian_tol, tol)
    budget = _Budget(tol, n_iterations, max_iterations, max_seconds)
    with full_precision(x):
        inputs = checked_inputs(x, y, a, b, eps=problem.eps, cost_scale=problem.cost_scale, balanced=problem.balanced)
        x, y, a, b = promoted(x, y, a, b)
        tell_if_eps_hides_the_costs(x, inputs.unit, problem)
        if tol is None and n_iterations is None:
            (budget.tol,) = default_tols(problem, *(v[None] for v in (x, y, a, b)))
        own = []
        if debias:
            own.append(_solve_self(x, a, problem, budget, rounded=not problem.precision.splits_x))
            own.append(_solve_self(y, b, problem, budget, rounded=not problem.precision.splits_y))
        pair = _solve(x, y, a, b, problem, budget, own)
        terms = [pair_term(x, y, a, b, pair.f, pair.g, pair.problem)]
        if own:
            terms += [_self_term(x, a, own[0]), _self_term(y, b, own[1])]
        ot, divergence = combined([term.value for term in terms], a, b, problem)
    solved = [pair, *own]
    residual, converged = judged(solved, budget.tol, in_float64=x.device.type == "cpu" and x.dtype is torch.float64)
    found = Transport(
        ot=ot,
        divergence=divergence,
        f=pair.f,
        g=pair.g,
        f_self=(own[0].g if own[0].symmetric else own[0].f) if own else None,
        g_self=own[1].g if own else None,
        residual=residual,
        converged=converged,
        tol=budget.tol,
        problem=pair.problem,
        n_passes=sum(each.n_passes for each in solved),
        inputs=(x, y, a, b),
    )
    return found, terms


def attached(
    terms: Sequence[Term],
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    problem: Regularisation,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """OT value and divergence of the terms as functions of the inputs as they were given, in any batch shape."""
    with full_precision(x):
        x, y, a, b = promoted(x, y, a, b)
        sides = ((x, y, a, b), (x, x, a, a), (y, y, b, b))
        values = [term.attached(*inputs) for term, inputs in zip(terms, sides, strict=False)]
        return combined(values, a, b, problem)


def combined(
    values: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor, problem: Regularisation
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first of one or three values, scalars, or [B] of weights a [B, n], b [B, m]; and the divergence of three."""
    if len(values) == 1:
        return values[0], None
    ot, of_x, of_y = values
    divergence = ot - of_x / 2 - of_y / 2
    return ot, divergence if problem.balanced else divergence + problem.eps * (a.sum(-1) - b.sum(-1)).square() / 2


class Ended(Protocol):
    """How a solve ended, as of `Result`."""

    @property
    def residual(self) -> float | None: ...
    @property
    def converged(self) -> bool | None: ...
    @property
    def stalled(self) -> bool: ...


def judged(solved: Sequence[Ended], tol: float | None, *, in_float64: bool) -> tuple[float | None, bool | None]:
    """The largest residual of one problem's solves and whether all have converged, else it is told; None if there was
    no tolerance."""
    residuals = [each.residual for each in solved if each.residual is not None]
    if tol is None or not residuals:
        return None, None
    converged = all(each.converged for each in solved)
    if not converged:
        by_rounding = all(each.stalled for each in solved if not each.converged)
        tell_not_converged(max(residuals), tol, by_rounding=by_rounding, in_float64=in_float64)
    return max(residuals), converged


def checked_problem(
    eps: float,
    cost_scale: float,
    rho: float | None,
    rho_x: float | None,
    rho_y: float | None,
    precision: Precision | str,
    hessian_tol: float | None,
    tol: float | None,
) -> Regularisation:
    """Of the arguments of `transport`. ValueError where one is bad."""
    if precision not in list(Precision):
        raise ValueError(f"precision must be one of {', '.join(Precision)}, got {precision!r}")
    hessian_tol = min(HESSIAN_TOL, tol or HESSIAN_TOL) if hessian_tol is None else positive("hessian_tol", hessian_tol)
    rho = None if rho is None else positive("rho", rho)
    rho_x, rho_y = rho if rho_x is None else rho_x, rho if rho_y is None else rho_y
    return Regularisation(
        eps=positive("eps", eps),
        cost_scale=positive("cost_scale", cost_scale),
        rho_x=None if rho_x is None else positive("rho_x", rho_x),
        rho_y=None if rho_y is None else positive("rho_y", rho_y),
        precision=Precision(precision),
        hessian_tol=hessian_tol,
    )


def self_problem(problem: Regularisation, *, rounded: bool) -> Regularisation:
    """Of OT_eps(a, a); rounded: the cloud is in OT_eps(a, b)."""
    return dataclasses.replace(problem, precision=Precision.FAST if rounded else Precision.EXACT)


@dataclass(frozen=True)
class _Solved:
    """Potentials of two clouds, or of one with itself (symmetric); problem: in the precision of the last sweeps.
    stalled: not converged, and rounding ended it rather than a limit."""

    f: torch.Tensor
    g: torch.Tensor
    residual: float | None
    converged: bool | None
    n_passes: float
    problem: Regularisation
    stalled: bool
    symmetric: bool


def _solve(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    problem: Regularisation,
    budget: _Budget,
    own: Sequence[_Solved] = (),
) -> _Solved:
    """own: OT_eps(a, a) and OT_eps(b, b), a start where the clouds are near copies."""
    options: dict[str, Any] = {"eps": problem.eps, "cost_scale": problem.cost_scale}
    found: NearCopy | Result | None = None
    failed_passes = 0
    if own and problem.balanced and budget.tol is not None:
        found = solve_near_copy(x, y, a, b, own[0].f, own[1].f, tol=budget.tol, limits=budget.limits(), **options)
        failed_passes = ATTEMPT_PASSES if found is None else 0
    if found is None:
        options |= {"rho_x": problem.rho_x, "rho_y": problem.rho_y, "precision": problem.precision}
        found = solve(x, y, a, b, **options, **budget.left())
    problem = dataclasses.replace(problem, precision=found.precision)
    return _Solved(
        found.f,
        found.g,
        found.residual,
        found.converged,
        found.n_passes + failed_passes,
        problem,
        stalled=found.stalled,
        symmetric=False,
    )


def _solve_self(
    x: torch.Tensor, a: torch.Tensor, problem: Regularisation, budget: _Budget, *, rounded: bool
) -> _Solved:
    """OT_eps(a, a); rounded: the cloud is in OT_eps(a, b)."""
    if budget.tol is not None:  # all end exact then; two copies that get there alike are rounded alike, and it cancels
        rounded = problem.precision is not Precision.EXACT
    problem = self_problem(problem, rounded=rounded)
    if problem.rho_x != problem.rho_y:
        return _solve(x, x, a, a, problem, budget)
    own = solve_self(
        x,
        a,
        eps=problem.eps,
        cost_scale=problem.cost_scale,
        rho=problem.rho_x,
        precision=problem.precision,
        **budget.left(),
    )
    problem = dataclasses.replace(problem, precision=own.precision)
    return _Solved(
        own.f, own.update, own.residual, own.converged, own.n_passes, problem, stalled=own.stalled, symmetric=True
    )


def _self_term(x: torch.Tensor, a: torch.Tensor, own: _Solved) -> Term:
    if own.symmetric:
        return self_term(x, a, own.f, own.g, own.problem)
    return pair_term(x, x, a, a, own.f, own.g, own.problem)


class _Budget:
    """The stopping rule of every problem, with the seconds that are left of it."""

    def __init__(self, tol: float | None, n_iterations: int | None, max_iterations: int, max_seconds: float | None):
        if tol is not None and n_iterations is not None:
            raise ValueError("give at most one of n_iterations (fixed) and tol (L1 marginal residual)")
        self.n_iterations = n_iterations if n_iterations is None else whole("n_iterations", n_iterations)
        self.tol = tol
        self.max_iterations = whole("max_iterations", max_iterations)
        self.max_seconds = max_seconds if max_seconds is None else positive("max_seconds", max_seconds)
        self.started = time.perf_counter()

    def left(self) -> dict[str, Any]:
        """As `solve` takes it."""
        rule = {"tol": self.tol, "n_iterations": self.n_iterations, "max_iterations": self.max_iterations}
        return rule if self.max_seconds is None else rule | {"max_seconds": self._seconds_left(self.max_seconds)}

    def limits(self) -> Limits:
        """As loops take it."""
        seconds = self.max_seconds
        return Limits(
            self.max_iterations, None if seconds is None else time.perf_counter() + self._seconds_left(seconds)
        )

    def _seconds_left(self, seconds: float) -> float:
        return max(seconds - (time.perf_counter() - self.started), LEAST_SECONDS)

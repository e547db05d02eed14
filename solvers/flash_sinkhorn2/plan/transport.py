"""Entropic OT of two weighted clouds over kept pairs as one differentiable result."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import Inputs, checked_inputs, positive, whole
from solvers.flash_sinkhorn.losses.functions import Term, apart, full_precision
from solvers.flash_sinkhorn.losses.loss import Regularisation, promoted
from solvers.flash_sinkhorn.losses.notices import tell_not_converged
from solvers.flash_sinkhorn.losses.tolerances import DEFAULT_TOL
from solvers.flash_sinkhorn.losses.transport import (
    LEAST_SECONDS,
    Transport,
    attached,
    checked_problem,
    combined,
)
from solvers.flash_sinkhorn.sweeps.tiles import Precision

from ..geometry import TiledCloud, from_tiles
from ..iterate import Options
from ..rounding import refined
from ..solver import RELAX, check_dimension, solved, sorted_clouds, tile_sizes
from .derivatives import KeptPair, KeptSelfPair
from .kept import Kept
from .near_copies import solve_near_copy
from .operators import Costs, KeptPlan
from .self_transport import solve_self
from .weightless import Weightless, extended, weightless


@dataclass(frozen=True, repr=False)
class KeptTransport(Transport):
    """`Transport` of `transport` here. kept: the pairs of OT_eps(a, b) at f, g; omitted: the largest bound, of the
    problems solved, of what all other pairs add to its residual; converged: whether the sum of both is within tol."""

    kept: Kept
    omitted: float

    @cached_property
    def plan(self) -> KeptPlan:
        """The plan of OT_eps(a, b) as an operator over kept pairs."""
        return KeptPlan(*self.inputs, self.kept, eps=self.problem.eps, cost_scale=self.problem.cost_scale)

    @cached_property
    def costs(self) -> Costs:
        """Primal and dual value of that plan, their gap, and its linear cost. Four passes on first use."""
        return self.plan.costs(self.f, self.g)

    @cached_property
    def linear_cost(self) -> float:
        """<P, C> of that plan, without any entropy."""
        return self.costs.linear


def transport(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    debias: bool = False,
    tol: float | None = None,
    max_iterations: int = 1_000,
    max_seconds: float | None = None,
    hessian_tol: float | None = None,
    tile: int | None = None,
    **options: Any,
) -> KeptTransport:
    """Solve OT_eps(a, b) over the pairs that matter, and with debias the two self problems too.

    x [n, d], y [m, d]: points of any float dtype, CPU or CUDA, d from 1 to 6; a [n], b [m]: weights of equal mass,
    uniform if None. eps in units of C = cost_scale |x - y|^2. tol: on the L1 marginal residual over the mass, of all
    pairs, 1e-4 if None; a solve that ends above it warns NotConverged. max_seconds: of all problems together. tile, and
    options correction, memory, lasting and thinning: as of `solve`.

    Values are differentiable twice in x, y, a and b, all over kept pairs. A second derivative takes a linear solve of
    two products with the plan a step; hessian_tol: of its residual, as of the dense `transport`.

    A self problem has one potential and takes one pass an iteration. Clouds that are nearly copies, or translated
    copies, of each other are solved from theirs, so that what those are off by cancels. The value is off by the square
    of the residual, and by eps times what was left out; gradients by the residual, relative to the distances moved.

    Raises ValueError as `solve` does.

    Source: Feydy et al. 2019 (1810.08278).
    """
    options |= {"eps": eps, "cost_scale": cost_scale, "debias": debias, "hessian_tol": hessian_tol}
    options |= {"tol": tol, "max_iterations": max_iterations, "max_seconds": max_seconds, "tile": tile}
    found, terms = apart(functools.partial(find, **options), x, y, a, b)
    ot, divergence = attached(terms, x, y, a, b, found.problem)
    return dataclasses.replace(found, ot=ot, divergence=divergence)


def find(
    x: Tensor,
    y: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    debias: bool = False,
    tol: float | None = None,
    max_iterations: int = 1_000,
    max_seconds: float | None = None,
    hessian_tol: float | None = None,
    tile: int | None = None,
    **options: Any,
) -> tuple[KeptTransport, list[Term]]:
    """`transport` of constants, and the terms that `attached` makes differentiable values of."""
    budget = _Budget(DEFAULT_TOL if tol is None else positive("tol", tol), max_iterations, max_seconds, tile)
    problem = checked_problem(eps, cost_scale, None, None, None, Precision.EXACT, hessian_tol, budget.tol)
    check_dimension(x)
    with full_precision(x):
        checked = checked_inputs(x, y, a, b, eps=problem.eps, cost_scale=problem.cost_scale, relax=RELAX)
        x, y, a, b = promoted(x, y, a, b)
        own: list[_Solved] = []
        pair: _Solved | None = None
        if debias:
            of_x, of_y, rounding = _sorted(checked, problem, budget)
            sides = (of_x, x, checked.x, a), (of_y, y, checked.y, b)
            own = [_solve_self(*side, problem, budget, rounding) for side in sides]
            pair = _solve_near_copy(of_x, of_y, x, y, checked, problem, budget, rounding, own)
        if pair is None:
            pair = _solve(x, y, a, b, problem, budget, options)
        terms = [pair.term(x, y, a, b, problem)]
        if own:
            terms += [own[0].self_term(x, a, problem), own[1].self_term(y, b, problem)]
        ot, divergence = combined([term.value for term in terms], a, b, problem)
    found = [pair, *own]
    converged = all(each.converged for each in found)
    if not converged:
        worst = max((each for each in found if not each.converged), key=lambda each: each.residual + each.omitted)
        in_float64 = x.device.type == "cpu" and x.dtype is torch.float64
        tell_not_converged(worst.residual + worst.omitted, budget.tol, by_rounding=worst.stalled, in_float64=in_float64)
    result = KeptTransport(
        ot=ot,
        divergence=divergence,
        f=pair.f,
        g=pair.g,
        f_self=own[0].g if own else None,
        g_self=own[1].g if own else None,
        residual=max(each.residual for each in found),
        converged=converged,
        tol=budget.tol,
        problem=problem,
        n_passes=sum(each.n_passes for each in found),
        inputs=(x, y, a, b),
        kept=pair.kept,
        omitted=max(each.omitted for each in found),
    )
    return result, terms


@dataclass(eq=False)
class _Solved:
    """Potentials f [n], g [m] for weights as given, of two clouds or of one with itself, g then the full update of f;
    kept: at f and g, or at g on both sides."""

    f: Tensor
    g: Tensor
    kept: Kept
    residual: float
    omitted: float
    converged: bool
    stalled: bool
    n_passes: float

    def term(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, problem: Regularisation) -> Term:
        """OT_eps(a, b)."""
        derivatives = KeptPair(problem, self.kept)
        return Term(derivatives.value((x, y, a, b, self.f, self.g)), self.f, self.g, derivatives)

    def self_term(self, x: Tensor, a: Tensor, problem: Regularisation) -> Term:
        """OT_eps(a, a)."""
        derivatives = KeptSelfPair(problem, self.kept)
        return Term(derivatives.value((x, a, self.g, self.f)), self.f, self.g, derivatives, symmetric=True)


def _solve(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, problem: Regularisation, budget: _Budget, options: dict[str, Any]
) -> _Solved:
    found = solved(x, y, a, b, eps=problem.eps, cost_scale=problem.cost_scale, **budget.left(), **options)
    result = found.result
    return _Solved(
        f=result.f,
        g=result.g,
        kept=Kept.of(found.passes, found.u, found.v, found.rounding, found.weightless),
        residual=result.residual,
        omitted=result.omitted,
        converged=result.converged,
        stalled=result.stalled,
        n_passes=result.n_passes,
    )


def _sorted(inputs: Inputs, problem: Regularisation, budget: _Budget) -> tuple[TiledCloud, TiledCloud, float]:
    tile = budget.tile or tile_sizes(inputs.x.shape[1])[0]
    return sorted_clouds(inputs, eps=problem.eps, cost_scale=problem.cost_scale, tol=budget.tol, tile=tile)


def _solve_self(
    cloud: TiledCloud,
    points: Tensor,
    checked: Tensor,
    weight: Tensor,
    problem: Regularisation,
    budget: _Budget,
    rounding: float,
) -> _Solved:
    """OT_eps(a, a), points and weight [n] as given, and points as checked. rounding: of `sorted_clouds`."""
    goal, mass = budget.goal(rounding), float(weight.sum())
    found = solve_self(cloud, _k(problem), tol=goal, max_passes=budget.max_iterations, deadline=budget.deadline)
    apart = weightless(points, weight, cloud, checked, found.update, _k(problem))
    rounding = refined(rounding, found.passes, found.u, found.u, tol=budget.tol)
    converged = found.converged and found.residual + found.omitted + rounding <= budget.tol
    return _Solved(
        f=_as_given(cloud, found.u, problem, mass, apart),
        g=_as_given(cloud, found.update, problem, mass, apart),
        kept=Kept.of(found.passes, found.update, found.update, rounding, (apart, apart)),
        residual=found.residual,
        omitted=found.omitted + rounding,
        converged=converged,
        stalled=found.stalled or found.converged > converged,
        n_passes=found.n_passes,
    )


def _solve_near_copy(
    of_x: TiledCloud,
    of_y: TiledCloud,
    x: Tensor,
    y: Tensor,
    checked: Inputs,
    problem: Regularisation,
    budget: _Budget,
    rounding: float,
    own: list[_Solved],
) -> _Solved | None:
    """OT_eps(a, b) from both self problems; None where the clouds are no near copies."""
    options = Options(max_passes=2 * budget.max_iterations, deadline=budget.deadline)
    start = own[0].kept.u, own[1].kept.u
    near = solve_near_copy(of_x, of_y, *start, _k(problem), tol=budget.goal(rounding), options=options)
    if near is None:
        return None
    found, passes = near
    rounding = refined(rounding, passes, found.u, found.v, tol=budget.tol)
    converged = found.converged and found.residual + found.omitted + rounding <= budget.tol
    apart = (
        weightless(x, checked.a, of_y, checked.y, found.v, passes.k),
        weightless(y, checked.b, of_x, checked.x, found.u, passes.k),
    )
    return _Solved(
        f=_as_given(of_x, found.u, problem, checked.mass, apart[0]),
        g=_as_given(of_y, found.v, problem, checked.mass, apart[1]),
        kept=Kept.of(passes, found.u, found.v, rounding, apart),
        residual=found.residual,
        omitted=found.omitted + rounding,
        converged=converged,
        stalled=found.stalled or found.converged > converged,
        n_passes=found.n_passes,
    )


def _k(problem: Regularisation) -> float:
    return problem.cost_scale * math.log2(math.e) / problem.eps


def _as_given(
    cloud: TiledCloud, potential: Tensor, problem: Regularisation, mass: float, apart: Weightless | None
) -> Tensor:
    """[n] in units of C and in the given order, for weights as given, of one in base 2 for weights that sum to one."""
    return problem.eps * (math.log(2.0) * extended(from_tiles(cloud, potential), apart) - math.log(mass) / 2)


class _Budget:
    """The stopping rule of every problem, with the seconds that are left of it."""

    def __init__(self, tol: float, max_iterations: int, max_seconds: float | None, tile: int | None):
        self.tol, self.tile = tol, tile
        self.max_iterations = whole("max_iterations", max_iterations)
        seconds = None if max_seconds is None else positive("max_seconds", max_seconds)
        self.deadline = None if seconds is None else time.perf_counter() + seconds

    def goal(self, rounding: float) -> float:
        """For iterations, which do not see rounding: where it is more than half of tol, none can be enough."""
        return max(self.tol - rounding, self.tol / 2)

    def left(self) -> dict[str, Any]:
        """As `solved` takes it."""
        rule = {"tol": self.tol, "max_iterations": self.max_iterations, "tile": self.tile}
        if self.deadline is None:
            return rule
        return rule | {"max_seconds": max(self.deadline - time.perf_counter(), LEAST_SECONDS)}

"""Batches: the results of one problem after another, from problems that are solved together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..inputs.batches import Batch, checked_batch
from ..inputs.batches import problem as problem_of
from ..inputs.checks import Inputs, positive, whole
from ..iteration.batch_loop import Together, taken
from ..iteration.batches import BatchResult, Ended, iterate_pairs, iterate_selves, solved
from ..iteration.fixed import iterated
from ..iteration.loop import Limits, Method, Updates
from ..iteration.self_transport import self_iterated
from ..sweeps.replay import Tensors, replayed
from ..sweeps.tiles import Precision
from .functions import Gradients, Term, full_precision
from .joined import Part, one_by_one
from .loss import Pair, Regularisation, SelfPair, promoted
from .near_copies import ATTEMPT_PASSES, iterate_near_copies
from .tolerances import default_tols, tell_if_eps_hides_the_costs
from .transport import (
    Transport,
    checked_problem,
    combined,
    find,
    judged,
    self_problem,
)

MOST_PROBLEMS = 1 << 15  # of one launch: the last axis of a grid is 2^16 - 1 long


def find_batch(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    tol: float | None = None,
    n_iterations: int | None = None,
    max_iterations: int = 1_000,
    max_seconds: float | None = None,
    **options: Any,
) -> list[Part]:
    """`transport.find` of each problem of x [B, n, d], y [B, m, d], a [B, n], b [B, m]; arguments and errors as there.

    All problems are solved together, each to its own residual, and on a GPU so are the gradients of their values. One
    after another are: a single problem; those with max_seconds, which are each one's own; and fixed iterations on the
    CPU. Where problems start from larger eps, it is the widest clouds that say from which.
    """
    whole("max_iterations", max_iterations)
    if max_seconds is None:
        if n_iterations is None and len(x) > 1:
            parts = []
            for start in range(0, len(x), MOST_PROBLEMS):
                some = slice(start, start + MOST_PROBLEMS)
                weights = [weight if weight is None else weight[some] for weight in (a, b)]
                parts.append(
                    find_together(x[some], y[some], *weights, tol=tol, max_iterations=max_iterations, **options)
                )
            return parts
        if n_iterations is not None and tol is None and x.device.type == "cuda":
            return [find_together(x, y, a, b, n_iterations=n_iterations, **options)]
    options |= {"tol": tol, "n_iterations": n_iterations, "max_iterations": max_iterations, "max_seconds": max_seconds}
    return one_by_one(functools.partial(find, **options), x, y, a, b)


def find_together(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    tol: float | None = None,
    n_iterations: int | None = None,
    max_iterations: int = 1_000,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    rho_x: float | None = None,
    rho_y: float | None = None,
    debias: bool = False,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float | None = None,
) -> Part:
    """tol None is as of `transport`, unless n_iterations is given."""
    tol = tol if tol is None else positive("tol", tol)
    problem = checked_problem(eps, cost_scale, rho, rho_x, rho_y, precision, hessian_tol, tol)
    tols: list[float] | list[None] = [None] * len(x)
    with full_precision(x):
        checks: dict[str, Any] = {"eps": problem.eps, "cost_scale": problem.cost_scale, "balanced": problem.balanced}
        batch = checked_batch(x, y, a, b, **checks)
        x, y, a, b = promoted(x, y, a, b)
        tell_if_eps_hides_the_costs(x, max(batch.units), problem)
        if n_iterations is not None:
            rule: _Iterations | _Tolerance = _Iterations(whole("n_iterations", n_iterations))
        else:
            tols = [tol] * len(x) if tol is not None else default_tols(problem, x, y, a, b)
            rule = _Tolerance(np.array(tols), max_iterations)
        own = []
        if debias:
            for points, weight, splits in ((x, a, problem.precision.splits_x), (y, b, problem.precision.splits_y)):
                alone = checked_batch(points, points, weight, weight, **checks)
                own.append(rule.solve_self(alone, self_problem(problem, rounded=rule.rounds(problem, splits))))
        pairs = rule.solve(batch, problem, own)
        terms = [pairs.term(a, b)]
        if own:
            terms += [own[0].term(a, a), own[1].term(b, b)]
        ot, divergence = combined([term.value for term in terms], a, b, problem)
    in_float64 = x.device.type == "cpu" and x.dtype is torch.float64
    inputs = zip(x, y, a, b, strict=True)
    values = ot.unbind(0), [None] * len(ot) if divergence is None else divergence.unbind(0)
    results = []
    for k, (value, debiased_value, tensors) in enumerate(zip(*values, inputs, strict=True)):
        residual, converged = judged([each.found.ended[k] for each in (pairs, *own)], tols[k], in_float64=in_float64)
        results.append(
            Transport(
                ot=value,
                divergence=debiased_value,
                f=pairs.found.f[k],
                g=pairs.found.g[k],
                f_self=(own[0].found.g if own[0].symmetric else own[0].found.f)[k] if own else None,
                g_self=own[1].found.g[k] if own else None,
                residual=residual,
                converged=converged,
                tol=tols[k],
                problem=replace(problem, precision=pairs.found.precisions[k]),
                n_passes=sum(each.found.n_passes[k] for each in (pairs, *own)),
                inputs=tensors,
            )
        )
    return results, terms


@dataclass(frozen=True)
class _Iterations:
    """A fixed number of them."""

    count: int

    def rounds(self, problem: Regularisation, splits: bool) -> bool:
        """Whether a self problem's cloud is to be rounded; splits: whether it is a pair in the first problem."""
        return not splits

    def solve_self(self, batch: Batch, problem: Regularisation) -> _Solved:
        if problem.rho_x != problem.rho_y:
            return self.solve(batch, problem)
        f, g = self_iterated(batch, self.count, problem.eps, problem.cost_scale, problem.rho_x, problem.precision)
        return _Solved(batch, problem, self._found(problem, f, g, self.count), symmetric=True)

    def solve(self, batch: Batch, problem: Regularisation, own: Sequence[_Solved] = ()) -> _Solved:
        f, g = iterated(batch, (problem.eps,) * self.count, _method(problem), problem.precision)
        return _Solved(batch, problem, self._found(problem, f, g, 2.0 * self.count), symmetric=False)

    def _found(self, problem: Regularisation, f: torch.Tensor, g: torch.Tensor, n_passes: float) -> BatchResult:
        count = len(f)
        return BatchResult(f, g, [Ended(None, None, False)] * count, [n_passes] * count, [problem.precision] * count)


@dataclass(frozen=True)
class _Tolerance:
    """On the residual of each problem: tol [B]."""

    tol: np.ndarray
    max_iterations: int

    def rounds(self, problem: Regularisation, splits: bool) -> bool:
        """As in `transport`: all end exact, and two copies that get there alike are rounded alike, which cancels."""
        return problem.precision is not Precision.EXACT

    def solve_self(self, batch: Batch, problem: Regularisation) -> _Solved:
        if problem.rho_x != problem.rho_y:
            return self.solve(batch, problem)

        def solve(inputs: Inputs, at: np.ndarray) -> Together:
            return iterate_selves(inputs, *self._options(problem, at))

        return _Solved(batch, problem, solved(batch, solve, problem.eps), symmetric=True)

    def solve(self, batch: Batch, problem: Regularisation, own: Sequence[_Solved] = ()) -> _Solved:
        """own: the self problems, a start where clouds are near copies."""

        def solve(inputs: Inputs, at: np.ndarray) -> Together:
            if not own or not problem.balanced:
                return iterate_pairs(inputs, *self._options(problem, at))
            index = torch.as_tensor(at, device=inputs.x.device)
            starts = [each.found.f[index] for each in own]
            limits = Limits(self.max_iterations, None)
            options: dict[str, Any] = {"eps": problem.eps, "cost_scale": problem.cost_scale}
            loop, others = iterate_near_copies(inputs, *starts, **options, tol=self.tol[at], limits=limits)
            if len(others):
                some = taken(inputs, torch.as_tensor(others, device=index.device))
                rest = iterate_pairs(some, *self._options(problem, at[others]))
                rest.n_passes += ATTEMPT_PASSES
                loop.put(others, rest)
            return loop

        return _Solved(batch, problem, solved(batch, solve, problem.eps), symmetric=False)

    def _options(self, problem: Regularisation, at: np.ndarray) -> tuple[Method, Precision, float, np.ndarray, int]:
        return _method(problem), problem.precision, problem.eps, self.tol[at], self.max_iterations


def _method(problem: Regularisation) -> Method:
    return Method(problem.cost_scale, problem.rho_x, problem.rho_y, Updates.ALTERNATING, acceleration=True)


_Number = tuple[float, Precision]  # the unit of one problem, and the precision of its sweeps


@dataclass(frozen=True)
class _Solved:
    """`transport._Solved` of B problems, and what its values and gradients are computed from, all problems at once.

    problem: of all but their precision, which is each one's own.
    """

    batch: Batch
    problem: Regularisation
    found: BatchResult
    symmetric: bool

    def term(self, a: torch.Tensor, b: torch.Tensor) -> Term:
        """Its values [B], of weights a [B, n], b [B, m] as given."""
        weighted = replace(self, batch=replace(self.batch, a=a, b=b))
        f, g = self.found.f, self.found.g
        values = weighted.values(*((g, f) if self.symmetric else (f, g)))
        return Term(values, f, g, weighted, self.symmetric)

    def values(self, *potentials: torch.Tensor) -> torch.Tensor:
        """[B]."""

        def compute(number: _Number, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
            derivatives, own = self._single(number, tensors[:5])
            return (derivatives.value([*own, *tensors[5:]]),)

        return self._replayed("values", compute, *potentials)[0]

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        """As `Pair.gradients`, [B, ...] each."""

        def compute(number: _Number, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            derivatives, own = self._single(number, tensors[:5])
            found = zip(derivatives.gradients([*own, *tensors[5:]], needed), needed, strict=True)
            return tuple(gradient for gradient, is_needed in found if gradient is not None and is_needed)

        found = iter(self._replayed(("gradients", *needed), compute, *tensors[len(needed) :]))
        return tuple(next(found) if is_needed else None for is_needed in needed)

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        """As `Pair.hessian_times`, [B, ...] each, one problem after another."""
        found = []
        for k, precision in enumerate(self.found.precisions):
            single = (SelfPair if self.symmetric else Pair)(replace(self.problem, precision=precision))
            along = tuple(v if v is None else v[k] for v in direction)
            found.append(single.hessian_times([tensor[k] for tensor in tensors], along))
        return tuple(None if each[0] is None else torch.stack(each) for each in zip(*found, strict=True))

    def _single(
        self, number: _Number, tensors: Sequence[torch.Tensor]
    ) -> tuple[Pair | SelfPair, Sequence[torch.Tensor]]:
        """One problem's derivatives, which look at nothing, and what they are in, from its share of the batch."""
        unit, precision = number
        checked, problem = problem_of(unit, *tensors), replace(self.problem, precision=precision)
        if self.symmetric:
            return SelfPair(problem, checked), (checked.x, checked.a)
        return Pair(problem, checked), tensors[:4]

    def _replayed(self, what: Hashable, compute: Callable[..., Tensors], *others: torch.Tensor) -> Tensors:
        kind = what, self.problem, self.symmetric
        numbers = list(zip(self.batch.units, self.found.precisions, strict=True))
        return replayed(kind, numbers, compute, *self.batch.tensors, *others)

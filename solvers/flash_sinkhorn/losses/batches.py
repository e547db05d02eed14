"""Batches: the results of one problem after another, from small problems that fill a GPU together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..inputs.batches import Batch, checked_batch
from ..inputs.batches import problem as problem_of
from ..inputs.checks import whole
from ..iteration.loop import Method, Updates
from ..iteration.self_transport import self_iterated
from ..iteration.solver import iterated
from ..sweeps.replay import Tensors, replayed
from ..sweeps.tiles import Precision
from .loss import Gradients, Pair, Regularisation, SelfPair, attach, full_precision, promoted
from .transport import Transport, checked_problem, debiased, self_problem, tell_if_eps_hides_the_costs, transport


def transports(
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
) -> list[Transport]:
    """`transport` of each problem of x [B, n, d], y [B, m, d], a [B, n], b [B, m]; arguments and errors as there.

    On a GPU a fixed number of iterations is run for all problems together, and so are the gradients of its values.
    Otherwise, and with a tolerance, which the host looks at, one problem is solved after another.
    """
    whole("max_iterations", max_iterations)
    if n_iterations is not None and tol is None and max_seconds is None and x.device.type == "cuda":
        return _iterated_together(x, y, a, b, n_iterations, **options)
    options |= {"tol": tol, "n_iterations": n_iterations, "max_iterations": max_iterations, "max_seconds": max_seconds}
    of_a, of_b = ([None] * len(x) if weight is None else weight.unbind(0) for weight in (a, b))
    problems = zip(x.unbind(0), y.unbind(0), of_a, of_b, strict=True)
    return [transport(points, others, *weights, **options) for points, others, *weights in problems]


def _iterated_together(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    n_iterations: int,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    rho_x: float | None = None,
    rho_y: float | None = None,
    debias: bool = False,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float | None = None,
) -> list[Transport]:
    n_iterations = whole("n_iterations", n_iterations)
    problem = checked_problem(eps, cost_scale, rho, rho_x, rho_y, precision, hessian_tol, tol=None)
    with full_precision(x):
        checks: dict[str, Any] = {"eps": problem.eps, "cost_scale": problem.cost_scale, "balanced": problem.balanced}
        batch = checked_batch(x, y, a, b, **checks)
        x, y, a, b = promoted(x, y, a, b)
        tell_if_eps_hides_the_costs(x, max(batch.units), problem)
        pairs = _iterated(batch, problem, n_iterations)
        ot = pairs.attached(x, y, a, b)
        divergence, own = None, []
        if debias:
            for points, weight, splits in ((x, a, problem.precision.splits_x), (y, b, problem.precision.splits_y)):
                batch = checked_batch(points, points, weight, weight, **checks)
                own.append(_iterated(batch, self_problem(problem, rounded=not splits), n_iterations, alone=True))
            of_x, of_y = own[0].attached(x, x, a, a), own[1].attached(y, y, b, b)
            divergence = debiased(ot, of_x, of_y, a, b, problem)
    inputs = zip(*(tensor.detach() for tensor in (x, y, a, b)), strict=True)
    values = ot.unbind(0), [None] * len(ot) if divergence is None else divergence.unbind(0)
    return [
        Transport(
            ot=value,
            divergence=debiased_value,
            f=pairs.f[k],
            g=pairs.g[k],
            f_self=(own[0].g if own[0].symmetric else own[0].f)[k] if own else None,
            g_self=own[1].g[k] if own else None,
            residual=None,
            converged=None,
            tol=None,
            problem=problem,
            n_passes=sum(each.n_passes for each in (pairs, *own)),
            inputs=tensors,
        )
        for k, (value, debiased_value, tensors) in enumerate(zip(*values, inputs, strict=True))
    ]


@dataclass(frozen=True)
class _Solved:
    """`transport._Solved` of B problems, and what its values and gradients are computed from, all problems at once.

    f [B, n], g [B, m]; batch: with the weights as given.
    """

    batch: Batch
    problem: Regularisation
    f: torch.Tensor
    g: torch.Tensor
    n_passes: float
    symmetric: bool

    def attached(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The values [B], differentiable in x, y, a and b [B, ...]."""
        weighted = replace(self, batch=replace(self.batch, a=inputs[2].detach(), b=inputs[3].detach()))
        if self.symmetric:
            return attach(weighted.values(self.g, self.f), weighted, [inputs[0], inputs[2]], [self.g])
        return attach(weighted.values(self.f, self.g), weighted, list(inputs), [self.f, self.g])

    def values(self, *potentials: torch.Tensor) -> torch.Tensor:
        """[B]."""

        def compute(unit: float, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
            derivatives, own = self._single(unit, tensors[:5])
            return (derivatives.value([*own, *tensors[5:]]),)

        return self._replayed("values", compute, *potentials)[0]

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        """As `Pair.gradients`, [B, ...] each."""

        def compute(unit: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            derivatives, own = self._single(unit, tensors[:5])
            found = zip(derivatives.gradients([*own, *tensors[5:]], needed), needed, strict=True)
            return tuple(gradient for gradient, is_needed in found if gradient is not None and is_needed)

        found = iter(self._replayed(("gradients", *needed), compute, *tensors[len(needed) :]))
        return tuple(next(found) if is_needed else None for is_needed in needed)

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        """As `Pair.hessian_times`, [B, ...] each, one problem after another."""
        single = (SelfPair if self.symmetric else Pair)(self.problem)
        found = [
            single.hessian_times([tensor[k] for tensor in tensors], tuple(v if v is None else v[k] for v in direction))
            for k in range(len(tensors[0]))
        ]
        return tuple(None if each[0] is None else torch.stack(each) for each in zip(*found, strict=True))

    def _single(self, unit: float, tensors: Sequence[torch.Tensor]) -> tuple[Pair | SelfPair, Sequence[torch.Tensor]]:
        """One problem's derivatives, which look at nothing, and what they are in, from its share of the batch."""
        checked = problem_of(unit, *tensors)
        if self.symmetric:
            return SelfPair(self.problem, checked), (checked.x, checked.a)
        return Pair(self.problem, checked), tensors[:4]

    def _replayed(self, what: Hashable, compute: Callable[..., Tensors], *others: torch.Tensor) -> Tensors:
        kind = what, self.problem, self.symmetric
        return replayed(kind, self.batch.units, compute, *self.batch.tensors, *others)


def _iterated(batch: Batch, problem: Regularisation, n_iterations: int, *, alone: bool = False) -> _Solved:
    """alone: x and y are one cloud."""
    if alone and problem.rho_x == problem.rho_y:
        f, g = self_iterated(batch, n_iterations, problem.eps, problem.cost_scale, problem.rho_x, problem.precision)
        return _Solved(batch, problem, f, g, n_iterations, symmetric=True)
    method = Method(problem.cost_scale, problem.rho_x, problem.rho_y, Updates.ALTERNATING, acceleration=True)
    f, g = iterated(batch, (problem.eps,) * n_iterations, method, problem.precision)
    return _Solved(batch, problem, f, g, 2.0 * n_iterations, symmetric=False)

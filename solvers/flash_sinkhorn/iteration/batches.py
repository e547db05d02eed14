"""Batches to a tolerance: `solve` and `solve_self` of all problems together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..inputs.batches import Batch, problem
from ..inputs.checks import Inputs
from ..sweeps.threads import undivided
from ..sweeps.tiles import LOG2_E, Precision
from .batch_loop import BatchLoop, Part, Together
from .loop import Limits, Method
from .self_transport import Least, check_alone, last_update, sweep_alone
from .start import approach, is_slow


class Ended(NamedTuple):
    """One problem's; as of `Result`."""

    residual: float | None
    converged: bool | None
    stalled: bool


@dataclass(frozen=True)
class BatchResult:
    """`Result`, or `SelfResult` whose update is g, of B problems: f [B, n] and g [B, m], float64, and [B] each how they
    ended, their passes, and the precision of the last of them."""

    f: torch.Tensor
    g: torch.Tensor
    ended: Sequence[Ended]
    n_passes: Sequence[float]
    precisions: Sequence[Precision]


def solved(batch: Batch, solve: Callable[[Inputs, np.ndarray], Together], eps: float) -> BatchResult:
    """Of all problems, from solve(inputs, indices) of those that are stored in one unit."""
    parts = []
    units = np.array(batch.units)
    for unit in dict.fromkeys(batch.units):
        index = np.flatnonzero(units == unit)
        at: Any = slice(None) if len(index) == len(units) else torch.as_tensor(index, device=batch.x.device)
        with undivided(batch.x.device):
            loop = solve(problem(unit, *(tensor[at] for tensor in batch.tensors)), index)
        parts.append((index, loop, loop.potentials()))
    order = np.argsort(np.concatenate([index for index, _, _ in parts]))
    back = torch.as_tensor(order, device=batch.x.device)
    shift = eps * batch.log_mass / 2  # sweeps saw weights over their mass
    f, g = (torch.cat([potentials[side] for _, _, potentials in parts])[back] - shift for side in (0, 1))
    method = parts[0][1].method
    f, g = batch.extended(f, g, eps=eps, cost_scale=method.cost_scale, rho_x=method.rho_x, rho_y=method.rho_y)
    names = ("residual", "converged", "stalled", "n_passes")
    found = [np.concatenate([getattr(loop, name) for _, loop, _ in parts])[order].tolist() for name in names]
    given = [Precision.EXACT if exact else loop.precision for _, loop, _ in parts for exact in loop.made_exact]
    precisions = [given[k] for k in order]
    return BatchResult(f, g, [Ended(*each) for each in zip(*found[:3], strict=True)], found[3], precisions)


def iterate_pairs(
    inputs: Inputs, method: Method, precision: Precision, eps: float, tol: np.ndarray, max_iterations: int
) -> BatchLoop:
    """`solve` of each problem, with tol [B]: from the same starts, and exact where rounded sweeps do not do."""
    limits = Limits(max_iterations, None)
    loop = BatchLoop(inputs, method, precision)
    loop.set_epsilon(eps)
    slow = loop.iterate_to(tol, limits, leaves=is_slow)
    if len(slow):
        rest = loop.of(slow, precision)
        approach(rest, eps, limits)
        _iterate_once_at_least(rest, tol[slow], limits)
        loop.put(slow, rest)
    at_limit = loop.n_iterations >= max_iterations
    wanting = (loop.stalled & loop.sweeps.improvable) | ~loop.suffices(tol)
    _make_exact(loop, loop.sweeps.rounded | (~at_limit & wanting), tol, limits)
    return loop


def iterate_selves(
    inputs: Inputs, method: Method, precision: Precision, eps: float, tol: np.ndarray, max_iterations: int
) -> SelfLoop:
    """`solve_self` of each cloud x, which is y as well."""
    check_alone(precision)
    limits = Limits(max_iterations, None)
    loop = SelfLoop(inputs, method, precision)
    loop.set_epsilon(eps)
    loop.iterate_to(tol, limits)
    _make_exact(loop, (loop.stalled & loop.sweeps.improvable) | ~loop.suffices(tol), tol, limits)
    return loop


def _make_exact(loop: Together, which: np.ndarray, tol: np.ndarray, limits: Limits) -> None:
    problems = np.flatnonzero(which)
    if len(problems):
        exact = loop.of(problems, Precision.EXACT)
        _iterate_once_at_least(exact, tol[problems], limits)
        loop.put(problems, exact)


def _iterate_once_at_least(loop: Together, tol: np.ndarray, limits: Limits) -> None:
    loop.iterate_to(
        tol, dataclasses.replace(limits, max_iterations=np.maximum(limits.max_iterations, loop.n_iterations + 1))
    )


class SelfLoop(Together):
    """Each cloud x of a batch against itself: the iterations of `self_transport`."""

    passes_each = 1

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where sweeps go on from, and what the last one started from."""
        return self.sweeps.x.potential, self.sweeps.x.used

    def _ended(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        return part.sweeps.x.potential, part.sweeps.x.used

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """f and its update."""
        assert self.eps is not None
        used, update = last_update(self.sweeps.x)
        return used * (self.eps / LOG2_E), update * (self.eps / LOG2_E)

    def _update(self, part: Part) -> None:
        sweep_alone(part.sweeps)

    def _residuals(self, part: Part) -> torch.Tensor:
        cloud = part.sweeps.x
        return cloud.residual[:, 0] / cloud.weight.sum(-1)

    def _go_on(self, part: Part, last: np.ndarray) -> None:
        pass

    def _progress(self, roundings: Callable[[], Any]) -> Least:
        return Least()

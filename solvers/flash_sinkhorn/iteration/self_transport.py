"""Entropic OT of a cloud to itself: one potential, one sweep an iteration."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..inputs.batches import Batch, problem
from ..inputs.checks import checked_inputs
from ..sweeps.replay import replayed
from ..sweeps.sweeps import Cloud, Sweeps
from ..sweeps.threads import undivided
from ..sweeps.tiles import LOG2_E, Precision
from .loop import Limits, looks_every, sweeps_of


@dataclass(frozen=True)
class SelfResult:
    """f [n]: the potential of OT_eps(a, a), which serves both sides; update [n]: F(f), equal to f at convergence.

    Both float64. The pair (f, update) meets its column marginal exactly. residual: sum_i a_i |exp((f_i - F_i) / eps)
    - 1| over the mass, of f as the last sweep measured it; None if no tolerance was asked for. converged: as of
    `Result`. stalled: sweeps ended above tol because the residual had stopped falling. n_passes: sweeps over all pairs.
    precision: of the last of them.
    """

    f: torch.Tensor
    update: torch.Tensor
    residual: float | None
    converged: bool | None
    n_passes: int
    precision: Precision
    stalled: bool = False


def solve_self(
    x: torch.Tensor,
    a: torch.Tensor | None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    n_iterations: int | None = None,
    tol: float | None = None,
    max_iterations: int = 10_000,
    max_seconds: float | None = None,
    precision: Precision = Precision.EXACT,
) -> SelfResult:
    """Solve OT_eps(a, a) for x [n, d], a [n]: f goes 2 / (2 + damping) of the way to its update F(f).

    The derivative of F is minus the damped plan, whose eigenvalues lie in [0, damping] because the Gaussian kernel is
    positive: near the solution each sweep divides the error by three at least, whatever eps. Sweeps end, not
    converged, when the residual has stopped falling. Exactly one of n_iterations and tol, as of `solve`; so are the
    other arguments and the errors. With a tolerance exact sweeps follow rounded ones. precision "mixed", which is to
    round one of two clouds, is a ValueError.
    """
    check_alone(precision)
    deadline = None if max_seconds is None else time.perf_counter() + max_seconds
    inputs = checked_inputs(x, x, a, a, eps=eps, cost_scale=cost_scale, balanced=rho is None)
    damping = 1.0 if rho is None else rho / (rho + eps)
    if n_iterations is not None:
        f, update = self_iterated(Batch.of(inputs), n_iterations, eps, cost_scale, rho, precision)
        return SelfResult(f[0], update[0], None, None, n_iterations, precision)
    assert tol is not None
    with undivided(inputs.x.device):
        limits = Limits(max_iterations, deadline)
        loop = _SelfLoop(sweeps_of(inputs, cost_scale=cost_scale, precision=precision), eps, damping, inputs.mass_x)
        loop.iterate(tol, limits)
        if (loop.stalled and loop.sweeps.improvable) or not loop.sweeps.suffices(tol):
            rounded, precision = loop, Precision.EXACT
            loop = _SelfLoop(
                sweeps_of(inputs, cost_scale=cost_scale, precision=precision), eps, damping, inputs.mass_x, rounded
            )
            loop.iterate(tol, limits)
        shift = eps * math.log(inputs.mass) / 2  # the sweeps saw weights over their mass
        f, update = (potential[None] - shift for potential in loop.potentials())
        f, update = Batch.of(inputs).extended(f, update, eps=eps, cost_scale=cost_scale, rho_x=rho, rho_y=rho)
    return SelfResult(
        f=f[0],
        update=update[0],
        residual=loop.residual,
        converged=loop.converged,
        n_passes=loop.n_passes,
        precision=precision,
        stalled=loop.stalled,
    )


def self_iterated(
    batch: Batch, n_iterations: int, eps: float, cost_scale: float, rho: float | None, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """f and update [B, n] as of `SelfResult` of each cloud with itself, after so many sweeps."""
    check_alone(precision)
    damping = 1.0 if rho is None else rho / (rho + eps)

    def compute(unit: float, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, centre = others
        sweeps = sweeps_of(problem(unit, x, x, a, a, centre), cost_scale=cost_scale, precision=precision)
        loop = _SelfLoop(sweeps, eps, damping, 1.0)
        for _ in range(n_iterations):
            loop.sweep()
        return loop.potentials()

    kind = "self", n_iterations, eps, cost_scale, rho, precision
    f, update = replayed(kind, batch.units, compute, batch.x, batch.a, batch.centre)
    shift = eps * batch.log_mass / 2
    return batch.extended(f - shift, update - shift, eps=eps, cost_scale=cost_scale, rho_x=rho, rho_y=rho)


STALLED = 12  # sweeps: they would divide any error but that of rounding by 3^12


class Least:
    """When sweeps gain no more: of the residuals of one cloud against itself, or of each of a batch, arrays [B]."""

    def __init__(self) -> None:
        self.least: Any = math.inf
        self.least_at: Any = 0

    def has_stalled(self, iteration: int, residual: Any) -> Any:
        """Whether the residual was no worse a good many iterations ago."""
        is_less = residual < self.least
        self.least, self.least_at = np.where(is_less, residual, self.least), np.where(is_less, iteration, self.least_at)
        is_late = iteration - self.least_at >= STALLED
        return is_late if isinstance(residual, np.ndarray) else bool(is_late)


def check_alone(precision: Precision) -> None:
    """ValueError if one side of a pair would be rounded and the other not: they are the same operands."""
    if precision.splits_x != precision.splits_y:
        raise ValueError(f"precision of a cloud against itself must be fast or exact, got {precision}: choose one")


def sweep_alone(sweeps: Sweeps) -> None:
    """One iteration of the cloud x against itself."""
    cloud = sweeps.x
    sweeps.settle(cloud, sweeps.sweep(cloud, cloud), relaxation=_relaxation(cloud), damping=cloud.damping)


def last_update(cloud: Cloud) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last iteration started from, and its full update: base 2, [n], or [B, n] of a batch."""
    used, potential = (v[..., : cloud.n] for v in (cloud.used, cloud.potential))
    return used, used + (potential - used) / _relaxation(cloud)


def _relaxation(cloud: Cloud) -> float:
    return 2.0 / (2.0 + cloud.damping)


class _SelfLoop:
    """Iterations of the cloud x of `sweeps` against itself, from zero or from another loop's potential."""

    def __init__(self, sweeps: Sweeps, eps: float, damping: float, mass: float, start: _SelfLoop | None = None):
        self.sweeps, self.eps, self.mass = sweeps, eps, mass
        sweeps.x.damping = damping
        self.n_passes = 0
        self.residual: float | None = None
        self.converged = self.stalled = False
        if start is not None:
            self.n_passes = start.n_passes
            sweeps.take_potentials(start.sweeps)
        sweeps.set_epsilon(eps, 1.0)
        self.look_every = looks_every(sweeps)

    def sweep(self) -> None:
        """One iteration."""
        sweep_alone(self.sweeps)
        self.n_passes += 1

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last sweep started from and its full update [n], for weights over their mass."""
        used, update = last_update(self.sweeps.x)
        return used * (self.eps / LOG2_E), update * (self.eps / LOG2_E)

    def iterate(self, tol: float, limits: Limits) -> None:
        """At least once, to the limits or until the residual is met or has stopped falling: rounding allows no less."""
        cloud, progress, start = self.sweeps.x, Least(), self.n_passes
        while True:
            self.sweep()
            last = self.n_passes >= limits.max_iterations or limits.out_of_time
            if last or self.n_passes % self.look_every == 0:
                self.residual = cloud.residual.item() / self.mass
                stalled = progress.has_stalled(self.n_passes - start, self.residual)
                self.converged = self.residual <= tol
                self.stalled = stalled and not self.converged
                last = last or self.converged or self.stalled
            if last:
                return

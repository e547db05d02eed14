"""Entropic OT of a cloud to itself: one potential, one sweep an iteration."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ..inputs.batches import Batch, problem
from ..inputs.checks import Inputs, checked_inputs
from ..sweeps.blocked_sweeps import BlockedSweeps
from ..sweeps.replay import replayed
from ..sweeps.sweeps import Sweeps
from ..sweeps.tiles import LOG2_E, Precision
from .loop import Limits, looks_every


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
    other arguments and the errors. With a tolerance exact sweeps follow rounded ones.
    """
    deadline = None if max_seconds is None else time.perf_counter() + max_seconds
    inputs = checked_inputs(x, x, a, a, eps=eps, cost_scale=cost_scale, balanced=rho is None)
    damping = 1.0 if rho is None else rho / (rho + eps)
    if n_iterations is not None:
        f, update = self_iterated(Batch.of(inputs), n_iterations, eps, cost_scale, rho, precision)
        return SelfResult(f[0], update[0], None, None, n_iterations, precision)
    assert tol is not None
    limits = Limits(max_iterations, deadline)
    loop = _SelfLoop(_sweeps(inputs, cost_scale, precision), eps, damping, inputs.mass_x)
    loop.iterate(tol, limits)
    if (loop.stalled and loop.sweeps.improvable) or not loop.sweeps.suffices(tol):
        rounded, precision = loop, Precision.EXACT
        loop = _SelfLoop(_sweeps(inputs, cost_scale, precision), eps, damping, inputs.mass_x, rounded)
        loop.iterate(tol, limits)
    f, update = loop.potentials()
    shift = eps * math.log(inputs.mass) / 2  # the sweeps saw weights over their mass
    return SelfResult(
        f=f - shift,
        update=update - shift,
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
    damping = 1.0 if rho is None else rho / (rho + eps)

    def compute(unit: float, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, centre = others
        sweeps = _sweeps(problem(unit, x, x, a, a, centre), cost_scale, precision)
        loop = _SelfLoop(sweeps, eps, damping, 1.0)
        for _ in range(n_iterations):
            loop.sweep()
        return loop.potentials()

    kind = "self", n_iterations, eps, cost_scale, rho, precision
    f, update = replayed(kind, batch.units, compute, batch.x, batch.a, batch.centre)
    shift = eps * batch.log_mass / 2
    return f - shift, update - shift


STALLED = 12  # sweeps: they would divide any error but that of rounding by 3^12


class _SelfLoop:
    """Iterations of the cloud x of `sweeps` against itself, from zero or from another loop's potential."""

    def __init__(self, sweeps: Sweeps, eps: float, damping: float, mass: float, start: _SelfLoop | None = None):
        self.sweeps, self.eps, self.damping, self.mass = sweeps, eps, damping, mass
        self.relaxation = 2.0 / (2.0 + damping)
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
        cloud = self.sweeps.x
        partial = self.sweeps.sweep(cloud, cloud)
        self.sweeps.settle(cloud, partial, relaxation=self.relaxation, damping=self.damping)
        self.n_passes += 1

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last sweep started from and its full update [n], for weights over their mass."""
        cloud, unit = self.sweeps.x, self.eps / LOG2_E
        used = cloud.used[: cloud.n]
        update = used + (cloud.potential[: cloud.n] - used) / self.relaxation
        return used * unit, update * unit

    def iterate(self, tol: float, limits: Limits) -> None:
        """At least once, to the limits or until the residual is met or has stopped falling: rounding allows no less."""
        cloud = self.sweeps.x
        least, least_at = math.inf, self.n_passes
        while True:
            self.sweep()
            last = self.n_passes >= limits.max_iterations or limits.out_of_time
            if last or self.n_passes % self.look_every == 0:
                self.residual = cloud.residual.item() / self.mass
                if self.residual < least:
                    least, least_at = self.residual, self.n_passes
                self.converged = self.residual <= tol
                self.stalled = not self.converged and self.n_passes - least_at >= STALLED
                last = last or self.converged or self.stalled
            if last:
                return


def _sweeps(inputs: Inputs, cost_scale: float, precision: Precision) -> Sweeps:
    if inputs.x.device.type == "cpu":
        return BlockedSweeps(inputs, cost_scale=cost_scale)
    from ..sweeps.triton_sweeps import TritonSweeps  # Triton is there only where a GPU is

    return TritonSweeps(inputs, cost_scale=cost_scale, precision=precision)

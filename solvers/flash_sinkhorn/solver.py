"""Entropic OT between two point clouds: the loop, its stopping rules and epsilon annealing."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from .blocked_sweeps import BlockedSweeps
from .checks import Inputs, checked_inputs, positive, whole
from .sweeps import Cloud, Sweeps
from .tiles import LOG2_E, Precision

CHEAP_PAIRS = 1 << 28  # below this a sweep is shorter than reading its residual back, so read it less often


class Updates(StrEnum):
    """alternating: f from g, then g from the new f. symmetric: both from the old pair, averaged with it."""

    ALTERNATING = "alternating"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class Check:
    """One residual read back: of the potentials after `passes` sweeps, at `eps`, `seconds` into the solve."""

    iteration: int
    passes: int
    seconds: float
    eps: float
    precision: Precision
    residual: float


@dataclass(frozen=True)
class Result:
    """Potentials f [n], g [m] (float64: float32 could not hold them at f / eps = 1e4) of OT_eps with
    P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps), C = cost_scale |x - y|^2.

    residual is max(|P1 - a|_1, |P^T 1 - b|_1) over the mass, of exactly these potentials as the last sweep measured it,
    in the arithmetic of `precision`; None if no tolerance was asked for. converged is residual <= tol, or None.

    A relaxed marginal is met when P1 = a exp(-f / rho_x), where f equals its own update F. The residual of that side is
    sum_i a_i |exp((f_i - F_i) / eps) - 1| over its mass: how far, point by point and relative to the mass that is
    there, f is from that; with rho_x to infinity it becomes |P1 - a|_1.
    """

    f: torch.Tensor
    g: torch.Tensor
    eps: float
    cost_scale: float
    precision: Precision
    n_iterations: int
    n_passes: int
    residual: float | None
    converged: bool | None
    trace: tuple[Check, ...]


def solve(
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
    n_iterations: int | None = None,
    tol: float | None = None,
    max_iterations: int = 10_000,
    max_seconds: float | None = None,
    updates: Updates | str = Updates.ALTERNATING,
    annealing: float | None = None,
    precision: Precision | str = Precision.EXACT,
) -> Result:
    """Solve min <P, C> + eps KL(P | a x b) over couplings P of a and b, never storing an n x m array.

    With rho the marginals are relaxed: rho_x KL(P1 | a) + rho_y KL(P^T 1 | b) takes the place of the constraints, in
    units of C. rho_x and rho_y override rho; a side without any stays a constraint (semi-unbalanced). Masses may then
    differ, and the potentials are those of P above for the weights as given.

    x [n, d], y [m, d]: points, any float dtype, CPU or CUDA. a [n], b [m]: non-negative weights of equal sum
    (uniform if None), normalised inside if balanced. eps > 0 in units of C. Exactly one of n_iterations (fixed, no
    stopping rule) and tol (on the L1 marginal residual over the mass, stopped at max_iterations or max_seconds) is
    needed. Not differentiable: inputs are detached.

    annealing: ratio in (0, 1) of one eps to the next, from the squared diameter down to eps, one iteration each,
    before the iterations at eps; None starts at eps. precision "fast" rounds points to 10-bit mantissas, "mixed" only
    those of y (consistently: the rounded problem is solved exactly); with a tolerance exact sweeps follow, so that
    `residual` is that of the clouds as given. On the CPU and for d <= 4 all precisions are exact. GPU sweeps compute
    in float32 whatever the type of the points; CPU sweeps of float64 points in float64.

    Raises ValueError, naming the argument and the fix, for NaN or Inf, negative weights, unequal masses, empty or
    mismatched arrays, eps <= 0 or beyond float32's range for these clouds, or a bad option.

    Source: Cuturi 2013; Chizat et al. 2018 (relaxed marginals); streaming form arXiv 2602.03067, Prop. 1.
    """
    if (n_iterations is None) == (tol is None):
        raise ValueError("give exactly one of n_iterations (fixed) and tol (L1 marginal residual)")
    eps, cost_scale = positive("eps", eps), positive("cost_scale", cost_scale)
    rho = rho if rho is None else positive("rho", rho)
    rho_x = rho if rho_x is None else positive("rho_x", rho_x)
    rho_y = rho if rho_y is None else positive("rho_y", rho_y)
    n_iterations = n_iterations if n_iterations is None else whole("n_iterations", n_iterations)
    tol = tol if tol is None else positive("tol", tol)
    max_iterations = whole("max_iterations", max_iterations)
    max_seconds = max_seconds if max_seconds is None else positive("max_seconds", max_seconds)
    annealing = annealing if annealing is None else positive("annealing", annealing)
    if annealing is not None and annealing > 0.99:
        raise ValueError(f"annealing must be a ratio in (0, 0.99], got {annealing:g}")
    updates, precision = _member("updates", Updates, updates), _member("precision", Precision, precision)
    balanced = rho_x is None and rho_y is None
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, balanced=balanced)
    loop = _Loop(inputs, cost_scale=cost_scale, rho=(rho_x, rho_y), updates=updates, precision=precision)
    loop.anneal(_epsilons(inputs, eps, cost_scale, annealing))
    if n_iterations is not None:
        loop.run_fixed(eps, n_iterations)
    else:
        assert tol is not None
        loop.run_to_residual(eps, tol, max_iterations, max_seconds)
    return loop.result(eps, tol)


class _Loop:
    """The state of one solve: sweeps in the present precision, base-2 potentials in them, counts and trace."""

    def __init__(
        self,
        inputs: Inputs,
        *,
        cost_scale: float,
        rho: tuple[float | None, float | None],
        updates: Updates,
        precision: Precision,
    ):
        self.started = time.perf_counter()
        self.rho = rho
        self.inputs = inputs
        self.cost_scale = cost_scale
        self.updates = updates
        self.precision = precision
        self.sweeps = self._make_sweeps(precision)
        on_cpu = inputs.x.device.type == "cpu"
        self.check_every = 1 if on_cpu or inputs.x.shape[0] * inputs.y.shape[0] >= CHEAP_PAIRS else 4
        self.eps: float | None = None
        self.n_iterations = 0
        self.n_passes = 0
        self.residual: float | None = None
        self.trace: list[Check] = []

    def _make_sweeps(self, precision: Precision) -> Sweeps:
        if self.inputs.x.device.type == "cpu":
            return BlockedSweeps(self.inputs, cost_scale=self.cost_scale)
        from .triton_sweeps import TritonSweeps  # Triton is there only where a GPU is

        return TritonSweeps(self.inputs, cost_scale=self.cost_scale, precision=precision)

    def set_epsilon(self, eps: float) -> None:
        self.sweeps.set_epsilon(eps, 1.0 if self.eps is None else self.eps / eps)
        for cloud, rho in zip((self.sweeps.x, self.sweeps.y), self.rho, strict=True):
            cloud.damping = 1.0 if rho is None else rho / (rho + eps)
        self.eps = eps

    def iterate(self) -> None:
        sweeps = self.sweeps
        if self.updates is Updates.ALTERNATING:
            sweeps.half_step(sweeps.x, sweeps.y)
            sweeps.half_step(sweeps.y, sweeps.x)
        else:
            sweeps.symmetric_step()
        self.n_iterations += 1
        self.n_passes += 2

    def anneal(self, epsilons: list[float]) -> None:
        for eps in epsilons:
            self.set_epsilon(eps)
            self.iterate()

    def run_fixed(self, eps: float, n_iterations: int) -> None:
        self.set_epsilon(eps)
        for _ in range(n_iterations):
            self.iterate()

    def run_to_residual(self, eps: float, tol: float, max_iterations: int, max_seconds: float | None) -> None:
        self.set_epsilon(eps)
        self._iterate_until(tol, max_iterations, max_seconds)
        if self.sweeps.rounded:
            rounded, self.precision = self.sweeps, Precision.EXACT
            self.sweeps = self._make_sweeps(self.precision)
            self.sweeps.take_potentials(rounded)
            self.set_epsilon(eps)
            self._iterate_until(tol, max(max_iterations, self.n_iterations + 1), max_seconds)

    def _iterate_until(self, tol: float, max_iterations: int, max_seconds: float | None) -> None:
        """At least one iteration, then on until a sweep finds the potentials' residual <= tol, or to a limit.

        That last sweep's own update is taken back, so that the residual is that of the potentials returned.
        """
        self.iterate()
        sweeps = self.sweeps
        while True:
            last = self.n_iterations >= max_iterations or self._out_of_time(max_seconds)
            check = last or self.n_iterations % self.check_every == 0
            if self.updates is Updates.ALTERNATING:
                sweeps.half_step(sweeps.x, sweeps.y)
                moved = [sweeps.x]  # the columns' marginal was just met exactly
            else:
                sweeps.symmetric_step()
                moved = [sweeps.x, sweeps.y]
            if check and (self._read_residual(moved) <= tol or last):
                for cloud in moved:
                    cloud.potential.copy_(cloud.used)
                self.n_passes += len(moved)
                return
            if self.updates is Updates.ALTERNATING:
                sweeps.half_step(sweeps.y, sweeps.x)
            self.n_iterations += 1
            self.n_passes += 2

    def _read_residual(self, moved: list[Cloud]) -> float:
        masses = {id(self.sweeps.x): self.inputs.mass_x, id(self.sweeps.y): self.inputs.mass_y}
        residual = torch.stack([cloud.residuals.sum() / masses[id(cloud)] for cloud in moved]).amax().item()
        seconds = time.perf_counter() - self.started
        assert self.eps is not None
        self.trace.append(Check(self.n_iterations, self.n_passes, seconds, self.eps, self.precision, residual))
        self.residual = residual
        return residual

    def _out_of_time(self, max_seconds: float | None) -> bool:
        return max_seconds is not None and time.perf_counter() - self.started > max_seconds

    def result(self, eps: float, tol: float | None) -> Result:
        x, y = self.sweeps.x, self.sweeps.y
        converged = None if tol is None or self.residual is None else self.residual <= tol
        mass = eps * math.log(self.inputs.mass) / 2  # the sweeps saw weights over their mass
        return Result(
            f=x.potential[: x.n] * (eps / LOG2_E) - mass,
            g=y.potential[: y.n] * (eps / LOG2_E) - mass,
            eps=eps,
            cost_scale=self.cost_scale,
            precision=self.precision,
            n_iterations=self.n_iterations,
            n_passes=self.n_passes,
            residual=self.residual,
            converged=converged,
            trace=tuple(self.trace),
        )


E = TypeVar("E", bound=StrEnum)


def _member(name: str, options: type[E], value: E | str) -> E:
    if value not in list(options):
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
    return options(value)


def _epsilons(inputs: Inputs, eps: float, cost_scale: float, annealing: float | None) -> list[float]:
    """Annealing schedule, largest first, all above eps: from the squared diameter of both clouds' bounding box."""
    if annealing is None:
        return []
    low = torch.minimum(inputs.x.amin(0), inputs.y.amin(0)).double()
    high = torch.maximum(inputs.x.amax(0), inputs.y.amax(0)).double()
    start = cost_scale * (high - low).square().sum().item()
    if start <= eps:
        return []
    count = math.ceil(math.log(eps / start) / math.log(annealing))
    return [start * annealing**k for k in range(count)]

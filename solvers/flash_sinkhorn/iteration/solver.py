"""Entropic OT between two point clouds: `solve`, its options and its result."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ..inputs.batches import Batch
from ..inputs.checks import checked_inputs, member, positive, whole
from ..sweeps.threads import undivided
from ..sweeps.tiles import Precision
from .as_given import AsGiven
from .fixed import iterated
from .loop import Check, Limits, Loop, Method, Updates
from .start import iterate_from_best_start, squared_diameter


@dataclass(frozen=True)
class Result:
    """Potentials f [n], g [m] (float64: float32 could not hold them at f / eps = 1e4) of OT_eps with
    P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps), C = cost_scale |x - y|^2.

    residual is max(|P1 - a|_1, |P^T 1 - b|_1) over the mass, of exactly these potentials as the last sweep measured it,
    in the arithmetic of `precision`; None if no tolerance was asked for. converged is residual <= tol, or None.
    stalled: iterations ended above tol because rounding lets the residual fall no further, not at a limit.

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
    n_passes: float
    residual: float | None
    converged: bool | None
    trace: tuple[Check, ...]
    stalled: bool = False


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
    acceleration: bool = True,
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
    `residual` is that of the clouds as given. On the CPU and for d <= 5 nothing is rounded; for d <= 4 exact sweeps
    follow where tol is of rounding's size, or the residual stops falling: their exponents have no large summands.
    GPU sweeps compute in float32 whatever the type of the points; CPU sweeps of float64 points in float64.

    A tolerance below what rounding leaves, at most 6e-8 max C / eps in float32 and often a tenth of that, is not met:
    iterations end, not converged and `stalled`, once the residual is within a few times that and has not fallen by a
    fifth in as many iterations as had led there, twenty at least.

    acceleration: on, alternating updates with a tolerance are mixed (Anderson), and start from larger eps unless the
    first iterations from zero are quick or `annealing` says how; fixed iterations and symmetric updates are always
    plain. n_iterations of the result counts iterations on all points at any eps, n_passes all sweeps, one over a part
    of the pairs as that part. The trace has every residual read, each at its own eps.

    Points without weight have the soft-min extension F(g)_i of the opposite potential, to what rounding leaves of C,
    and to the residual where the last half-step was not theirs; those beyond a span of all with weight exactly.

    Raises ValueError, naming the argument and the fix, for NaN or Inf, negative weights, unequal masses, empty or
    mismatched arrays, eps <= 0 or beyond float32's range for these clouds, or a bad option.

    Source: Cuturi 2013; Chizat et al. 2018 (relaxed marginals); streaming form arXiv 2602.03067, Prop. 1.
    """
    started = time.perf_counter()
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
    updates, precision = member("updates", Updates, updates), member("precision", Precision, precision)
    method = Method(cost_scale, rho_x, rho_y, updates, acceleration)
    given = None
    if n_iterations is not None and annealing is None:
        given = AsGiven(x, y, a, b, (eps,) * n_iterations, method, precision)
        potentials = given.iterated()
        if potentials is not None:
            return _fixed(*potentials, given.levels, method, precision)
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, balanced=method.balanced)
    if given is not None:
        given.expect_like(inputs)
    with undivided(inputs.x.device):
        levels = [] if annealing is None else _epsilons(squared_diameter(inputs, cost_scale), eps, annealing)
        if n_iterations is not None:
            levels += [eps] * n_iterations
            f, g = iterated(Batch.of(inputs), tuple(levels), method, precision)
            return _fixed(f[0], g[0], tuple(levels), method, precision)
        assert tol is not None
        loop = Loop(inputs, method, precision, started)
        for larger in levels:
            loop.set_epsilon(larger)
            loop.iterate()
        limits = Limits(max_iterations, None if max_seconds is None else started + max_seconds)
        if acceleration and annealing is None and updates is Updates.ALTERNATING:
            iterate_from_best_start(loop, eps, tol, limits)
        else:
            loop.set_epsilon(eps)
            loop.iterate_to(tol, limits)
        at_limit = loop.n_iterations >= max_iterations or limits.out_of_time
        sweeps = loop.sweeps  # of rounded points: `residual` is that of the points as given, whatever the limits
        if sweeps.rounded or (not at_limit and ((loop.stalled and sweeps.improvable) or not sweeps.suffices(tol))):
            loop.make_exact()
            loop.iterate_to(tol, limits)
        f, g = (potential[None] for potential in loop.potentials())
        f, g = Batch.of(inputs).extended(f, g, eps=eps, cost_scale=cost_scale, rho_x=rho_x, rho_y=rho_y)
        return Result(
            f[0], g[0], eps, cost_scale, loop.precision, loop.n_iterations, loop.n_passes, loop.residual,
            loop.converged, tuple(loop.trace), loop.stalled,
        )  # fmt: skip


def _fixed(f: torch.Tensor, g: torch.Tensor, levels: tuple[float, ...], method: Method, precision: Precision) -> Result:
    count = len(levels)
    return Result(f, g, levels[-1], method.cost_scale, precision, count, 2.0 * count, None, None, ())


def _epsilons(start: float, eps: float, ratio: float) -> list[float]:
    """Annealing schedule, largest first, all above eps."""
    if start <= eps:
        return []
    count = math.ceil(math.log(eps / start) / math.log(ratio))
    return [start * ratio**k for k in range(count)]

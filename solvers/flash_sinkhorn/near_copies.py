"""A start for OT_eps(a, b) from the two self problems: clouds that differ little, or by a translation, are there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .checks import checked_inputs
from .loop import Limits, Loop, Method, Updates
from .tiles import LOG2_E, Precision

ATTEMPT_PASSES = 2  # sweeps after which it is known whether the start is good
NEAR = 0.1  # residual of the start beyond which the clouds are not near copies


@dataclass(frozen=True)
class NearCopy:
    """Potentials f [n], g [m], float64, with the residual that the last sweep measured."""

    f: torch.Tensor
    g: torch.Tensor
    residual: float
    converged: bool
    n_passes: float
    precision: Precision


def solve_near_copy(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    g_self: torch.Tensor,
    *,
    eps: float,
    cost_scale: float,
    tol: float,
    limits: Limits,
    precision: Precision,
) -> NearCopy | None:
    """Balanced OT_eps(a, b) from the potential g_self [m] of OT_eps(b, b), or None where that is no good start.

    If x is y moved along t, g_j = g_self_j - 2 cost_scale t.y_j up to a constant solves the problem exactly, whatever
    eps, and t is the difference of the means. So errors of the start are those of the self problem, and cancel in the
    divergence; what iterations are left grow with how far the clouds are from copies.
    """
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale)
    method = Method(cost_scale, None, None, Updates.ALTERNATING, acceleration=True)
    loop = Loop(inputs, method, precision)
    mean_y = _mean(inputs.y, inputs.b)
    linear = (inputs.y - mean_y) @ (_mean(inputs.x, inputs.a) - mean_y)
    cloud = loop.sweeps.y
    cloud.potential[: cloud.n] = (g_self - 2.0 * cost_scale * linear.double()) * (LOG2_E / eps)
    loop.set_epsilon(eps)
    for residual in loop.checks(tol, limits):
        if loop.n_iterations == 1 and not residual <= NEAR:
            return None
    if loop.sweeps.rounded:
        loop.make_exact()
        loop.iterate_to(tol, limits)
    assert loop.residual is not None
    mass = eps * math.log(inputs.mass) / 2  # the sweeps saw weights over their mass
    f, g = (cloud.potential[: cloud.n] * (eps / LOG2_E) - mass for cloud in (loop.sweeps.x, loop.sweeps.y))
    return NearCopy(f, g, loop.residual, loop.residual <= tol, loop.n_passes, loop.precision)


def _mean(points: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[d]; a product and a sum, for products of matrices may round to TF32."""
    return (points * weight.to(points.dtype)[:, None]).sum(0)

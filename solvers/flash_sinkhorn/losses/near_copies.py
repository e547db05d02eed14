"""A start for OT_eps(a, b) from the two self problems: clouds that differ little, or by a translation, are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..inputs.batches import Batch
from ..inputs.checks import Inputs, checked_inputs
from ..iteration.batch_loop import BatchLoop
from ..iteration.loop import Limits, Loop, Method, Updates
from ..sweeps.tiles import LOG2_E, Precision

ATTEMPT_PASSES = 2  # sweeps after which it is known whether the start is good
NEAR = 0.1  # residual of the start beyond which the clouds are not near copies


@dataclass(frozen=True)
class NearCopy:
    """Potentials f [n], g [m], float64, with the residual that the last sweep measured; other fields as of `Result`."""

    f: torch.Tensor
    g: torch.Tensor
    residual: float
    converged: bool
    n_passes: float
    precision: Precision
    stalled: bool


def solve_near_copy(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    f_self: torch.Tensor,
    g_self: torch.Tensor,
    *,
    eps: float,
    cost_scale: float,
    tol: float,
    limits: Limits,
) -> NearCopy | None:
    """Balanced OT_eps(a, b) from potentials f_self [n] of OT_eps(a, a) and g_self [m] of OT_eps(b, b), those that
    `SelfResult` calls f; or None where they are no good start.

    If x is y moved along t, f_i = f_self_i + 2 cost_scale t.x_i and g_j = g_self_j - 2 cost_scale t.y_j up to constants
    solve the problem exactly, whatever eps, and t is the difference of the means. So errors of the start are those of
    the self problems, and cancel in the divergence; what iterations are left grow with how far the clouds are from
    copies. g alone makes the first update of f, but with f at hand the exponents of that sweep are rounded as those of
    the self problem were, which cancels as well. All sweeps are exact, as the self problems' last ones were.
    """
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale)
    loop = Loop(inputs, _method(cost_scale), Precision.EXACT)
    _start(loop, f_self, g_self, eps)
    for residual in loop.checks(tol, limits):
        if loop.n_iterations == 1 and not residual <= NEAR:
            return None
    assert loop.residual is not None
    f, g = (potential[None] for potential in loop.potentials())
    f, g = Batch.of(inputs).extended(f, g, eps=eps, cost_scale=cost_scale)
    return NearCopy(f[0], g[0], loop.residual, loop.converged, loop.n_passes, loop.precision, loop.stalled)


def iterate_near_copies(
    inputs: Inputs,
    f_self: torch.Tensor,
    g_self: torch.Tensor,
    *,
    eps: float,
    cost_scale: float,
    tol: np.ndarray,
    limits: Limits,
) -> tuple[BatchLoop, np.ndarray]:
    """The same of a batch, f_self [B, n] and g_self [B, m], with the indices of the problems that are None."""
    loop = BatchLoop(inputs, _method(cost_scale), Precision.EXACT)
    _start(loop, f_self, g_self, eps)
    return loop, loop.iterate_to(tol, limits, leaves=lambda looks: len(looks) == 1 and ~(looks[0] <= NEAR))


def _method(cost_scale: float) -> Method:
    return Method(cost_scale, None, None, Updates.ALTERNATING, acceleration=True)


def _start(loop: Loop | BatchLoop, f_self: torch.Tensor, g_self: torch.Tensor, eps: float) -> None:
    inputs = loop.inputs
    x, y = (points - inputs.centre.to(points)[..., None, :] for points in (inputs.x, inputs.y))
    shift = _mean(x, inputs.a) - _mean(y, inputs.b)
    sides = (loop.sweeps.x, x, f_self, shift), (loop.sweeps.y, y, g_self, -shift)
    for cloud, points, potential, along in sides:
        linear = 2.0 * loop.method.cost_scale * (points * along[..., None, :]).sum(-1).double()
        started = (potential + linear) * (LOG2_E / eps)
        # Without weight points may be so far out that float32 holds no exponent of theirs.
        cloud.potential[..., : cloud.n] = torch.where(cloud.weight[..., : cloud.n] > 0, started, 0.0)
    loop.set_epsilon(eps)


def _mean(points: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., d]; a product and a sum, for products of matrices may round to TF32."""
    return (points * weight.to(points.dtype)[..., None]).sum(-2)

"""Where accelerated iterations start: from zero where that is quick, else from larger eps, the largest on a sample."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from ..inputs.checks import Inputs
from .batch_loop import BatchLoop
from .loop import Limits, Loop

PROBATION = 2  # iterations from zero, which show whether more of them would be quick
QUICK_RESIDUAL, QUICK_CONTRACTION = 0.4, 0.75
RATIO = 0.25  # from one eps to the next
LEVEL_TOLERANCE, LEVEL_ITERATIONS = 0.05, 20
SAMPLED_ABOVE = 1 / 64  # of the squared diameter: a sample's plan at larger eps is close to that of all points
SAMPLE_SHARE, SMALLEST_SAMPLE = 1 / 16, 32
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def squared_diameter(inputs: Inputs, cost_scale: float) -> float:
    """Cost from corner to corner of the bounding box of all points with weight; the largest of a batch."""
    ends = []
    for points, weight in ((inputs.x, inputs.a), (inputs.y, inputs.b)):
        weightless = (weight == 0)[..., None]
        ends += [points.masked_fill(weightless, math.inf).amin(-2), points.masked_fill(weightless, -math.inf).amax(-2)]
    low, high = torch.minimum(ends[0], ends[2]).double(), torch.maximum(ends[1], ends[3]).double()
    return cost_scale * (high - low).square().sum(-1).amax().item()


def iterate_from_best_start(loop: Loop, eps: float, tol: float, limits: Limits) -> None:
    """`Loop.iterate_to` at eps from zero if the first iterations are quick, else from the end of `approach`."""
    loop.set_epsilon(eps)
    residuals: list[float] = []
    for residual in loop.checks(tol, limits):
        residuals.append(residual)
        over = residual <= tol or loop.n_iterations >= limits.max_iterations or limits.out_of_time
        if is_slow(residuals) and not over:
            break
    else:
        return
    approach(loop, eps, limits)
    loop.iterate_to(tol, limits)


def is_slow(residuals: list[Any]) -> Any:
    """Whether iterations from zero have shown with the last of these residuals, numbers or [B] of a batch, that more
    would not be quick."""
    if len(residuals) != PROBATION:
        return False
    return np.logical_not(residuals[-1] <= np.minimum(QUICK_RESIDUAL, QUICK_CONTRACTION * residuals[0]))


def approach(loop: Loop | BatchLoop, eps: float, limits: Limits) -> None:
    """Leave potentials for eps in the loop that larger eps lead to, the largest solved on a sample of the points.
    Where eps is as large as they are, its potentials stay. Of a batch the widest problem says which eps.

    On a sample iterations cost next to nothing, and they settle how much mass goes from one far region to another,
    which takes the most of them. The sample's potential becomes that of all points by one half-step between the two.
    """
    diameter2 = squared_diameter(loop.inputs, loop.method.cost_scale)
    count = max(0, math.ceil(math.log(eps / (RATIO * diameter2)) / math.log(RATIO))) if diameter2 > 0 else 0
    if count == 0:
        return
    levels = [RATIO * diameter2 * RATIO**k for k in range(count)]
    sample = sampled(loop.inputs)
    on_sample = [level for level in levels if level >= SAMPLED_ABOVE * diameter2] if sample else []
    if sample and on_sample:
        coarse = loop.on(sample)
        _follow(coarse, on_sample, dataclasses.replace(limits, max_iterations=10**9))
        loop.restart(on_sample[-1])
        loop.sweeps.half_step(loop.sweeps.y, coarse.sweeps.x)
        share_x, share_y = coarse.sweeps.x.n / loop.sweeps.x.n, coarse.sweeps.y.n / loop.sweeps.y.n
        loop.n_passes += share_x + share_x * share_y * coarse.n_passes
    else:
        loop.restart(levels[0])
    _follow(loop, levels[len(on_sample) :], limits)
    loop.set_epsilon(eps)


def _follow(loop: Loop | BatchLoop, levels: list[float], limits: Limits) -> None:
    """Solve one level after another roughly; where two are known the next starts from their linear continuation."""
    solved: list[tuple[float, torch.Tensor]] = []  # eps, g
    for eps in levels:
        allowed = np.minimum(loop.n_iterations + LEVEL_ITERATIONS, limits.max_iterations - 1)
        if np.all(loop.n_iterations >= allowed):
            return
        y = loop.sweeps.y
        if len(solved) == 2:
            (eps_0, g_0), (eps_1, g_1) = solved
            y.potential.copy_((g_1 + (g_1 - g_0) * ((eps - eps_1) / (eps_1 - eps_0))) / eps_1)
        loop.set_epsilon(eps)
        loop.iterate_to(LEVEL_TOLERANCE, dataclasses.replace(limits, max_iterations=allowed))
        solved = [*solved[-1:], (eps, y.potential * eps)]


def sampled(inputs: Inputs) -> Inputs | None:
    """A sixteenth of either cloud's points, drawn by weight; None where so few points are no saving."""
    sizes = [max(SMALLEST_SAMPLE, round(SAMPLE_SHARE * points.shape[-2])) for points in (inputs.x, inputs.y)]
    if sizes[0] > inputs.x.shape[-2] // 2 or sizes[1] > inputs.y.shape[-2] // 2:
        return None
    (x, a), (y, b) = _drawn(inputs.x, inputs.a, sizes[0]), _drawn(inputs.y, inputs.b, sizes[1])
    return dataclasses.replace(inputs, x=x, y=y, a=a, b=b)


def _drawn(points: torch.Tensor, weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`size` points of equal shares of the weight: the golden ratio's multiples along its running sum.

    Evenly spread like a stride, and unlike it without a period that a grid could share.
    """
    along = torch.arange(size, dtype=torch.float64, device=weight.device)
    running = weight.cumsum(-1)
    mass = running[..., -1:]
    quantiles = ((along + 0.5) * GOLDEN_RATIO).frac() * mass
    last = torch.count_nonzero(running < mass, -1)[..., None]  # not into weightless points at the end by rounding
    index = torch.minimum(torch.searchsorted(running, quantiles, right=True), last)
    return torch.take_along_dim(points, index[..., None], -2), (mass / size).expand(index.shape).contiguous()

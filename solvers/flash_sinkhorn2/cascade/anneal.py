"""The coarsest level: from potentials of zero at the largest eps down to its own, one eps after another."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..iterate import Options, Outcome, ScreenedPasses, iterate

RATIO = 0.25  # from one eps to the next
TOLERANCE, MOST_PASSES = 0.05, 40  # of each
FARTHEST = 32.0  # base 2: how far a continuation may go; what is too high by more falls by a point's share a pass only
PROBATION = 4  # passes from zero, which show whether more of them would be quick
QUICK_RESIDUAL, QUICK_CONTRACTION = 0.4, 0.75


def annealed(
    passes: ScreenedPasses, *, eps: float, cost_scale: float, tol: float, options: Options
) -> tuple[Outcome, int]:
    """The outcome at eps, to `tol`, of passes over all tile pairs; and passes before, at larger eps but for the first.

    From zero at eps if the first iterations are quick, as they are however far a few points are out. Else from larger
    eps, each from the linear continuation in eps of the two before.
    """
    u, v = torch.zeros_like(passes.x.weight), torch.zeros_like(passes.y.weight)
    passes.k = cost_scale * math.log2(math.e) / eps
    most = min(PROBATION, options.max_passes)
    found = iterate(passes, u, v, tol=tol, options=dataclasses.replace(options, max_passes=most))
    taken = found.n_passes
    if found.converged or taken + 2 > options.max_passes:
        return found, 0
    if _is_quick(found):
        return iterate(passes, found.u, found.v, tol=tol, options=_left(options, taken)), taken
    solved: list[tuple[float, Tensor]] = []  # eps, v eps
    largest = RATIO * squared_diameter(passes.x, passes.y) * cost_scale
    for level in _epsilons(largest, eps):
        allowed = min(MOST_PASSES, options.max_passes - 2 - taken)
        if allowed < 2 or options.is_late:
            break
        v = _continued(solved, level, v)
        passes.k = cost_scale * math.log2(math.e) / level
        found = iterate(passes, u, v, tol=TOLERANCE, options=dataclasses.replace(options, max_passes=allowed))
        taken += found.n_passes
        u, v = found.u, found.v
        solved = [*solved[-1:], (level, v * level)]
    v = _continued(solved, eps, v)
    passes.k = cost_scale * math.log2(math.e) / eps
    return iterate(passes, u, v, tol=tol, options=_left(options, taken)), taken


def _is_quick(found: Outcome) -> bool:
    residuals = [check.residual for check in found.trace]
    return residuals[-1] <= QUICK_RESIDUAL and residuals[-1] <= QUICK_CONTRACTION * residuals[0]


def _left(options: Options, taken: int) -> Options:
    return dataclasses.replace(options, max_passes=options.max_passes - taken)


def squared_diameter(x: TiledCloud, y: TiledCloud) -> float:
    """Of the box of all points with weight."""
    lows, highs = (list(zip(*ends, strict=True)) for ends in zip(x.box, y.box, strict=True))  # of both clouds, by axis
    return sum((max(high) - min(low)) ** 2 for low, high in zip(lows, highs, strict=True))


def _epsilons(largest: float, eps: float) -> list[float]:
    if largest <= eps:
        return []
    return [largest * RATIO**i for i in range(math.ceil(math.log(eps / largest) / math.log(RATIO)))]


def _continued(solved: list[tuple[float, Tensor]], eps: float, v: Tensor) -> Tensor:
    """v at eps; u follows in the first half-step."""
    if not solved:
        return v
    last, g = solved[-1]
    v = g / eps
    if len(solved) == 2:
        before, old = solved[0]
        v = v + ((g - old) * ((eps - last) / (last - before)) / eps).clamp(-FARTHEST, FARTHEST)
    return v

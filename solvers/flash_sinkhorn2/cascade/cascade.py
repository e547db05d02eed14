"""Level after level: the coarsest annealed over all tile pairs, the others lifted and screened, the points last."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from ..geometry import TiledCloud
from ..iterate import Options, Outcome, ScreenedPasses, iterate
from ..screen import every_pair
from .anneal import annealed
from .guard import better_start
from .levels import Level, levels
from .lift import lifted

COARSE_TOLERANCE, MOST_COARSE_PASSES = 1e-2, 100
# of a coarser level all of whose pairs are taken, by device: a GPU is through with them sooner than with choosing
EVERY_TILE_PAIR = {"cuda": 2**20}
LIFT_BUDGET = 1e-3  # of the mask that such a level then hands on
FIRST_BUDGET = 1e-2  # of the first mask of a level: sums are one only roughly
FIRST_LASTING_SHARE = 1e-3  # of the tolerance: masks that are to last


@dataclass(eq=False)
class Cascade:
    """How the points were solved.

    passes: those of the points, with their last mask; annealing: passes over the points at larger eps; coarse_pairs:
    point pairs that passes of coarser levels went over; seconds by level, coarsest first, the points last.
    """

    outcome: Outcome
    passes: ScreenedPasses
    annealing: int
    coarse_pairs: float
    seconds: list[tuple[int, float]] = field(default_factory=list)


def solve_levels(
    x: TiledCloud, y: TiledCloud, *, eps: float, cost_scale: float, tol: float, options: Options
) -> Cascade:
    """The points at `eps`, to `tol` or the limits of `options`; coarser levels to what a start is worth. Once late, the
    next level is the points."""
    started = time.perf_counter()
    ladder = levels(x, y, eps=eps, cost_scale=cost_scale)
    coarse_options = replace(options, max_passes=MOST_COARSE_PASSES)
    seconds: list[tuple[int, float]] = []
    coarse_pairs, annealing = 0.0, 0
    outcome: Outcome | None = None
    passes: ScreenedPasses | None = None
    above = ladder[0]
    for index, level in enumerate(ladder):
        is_last = index == len(ladder) - 1
        if index and not is_last and options.is_late:
            continue
        goal, limits = (tol, options) if is_last else (COARSE_TOLERANCE, coarse_options)
        if outcome is None or passes is None:
            passes = ScreenedPasses(level.x.cloud, level.y.cloud, 1.0, mask=every_pair(level.x.cloud, level.y.cloud))
            outcome, larger = annealed(passes, eps=level.eps, cost_scale=cost_scale, tol=goal, options=limits)
            annealing = larger if is_last else 0
        else:
            u, v = lifted(passes, outcome.u, outcome.v, above, level)
            k = cost_scale * math.log2(math.e) / level.eps
            if is_last:
                u, v = better_start(x, y, u, v, k)
            if not is_last and _is_small(level):
                mask = every_pair(level.x.cloud, level.y.cloud)
                passes = ScreenedPasses(level.x.cloud, level.y.cloud, k, mask=mask, thins=False)
                outcome = iterate(passes, u, v, tol=goal, options=limits)
                passes.refresh(outcome.u, outcome.v, LIFT_BUDGET)
            else:
                passes = ScreenedPasses(level.x.cloud, level.y.cloud, k, thins=options.thinning and not options.lasting)
                budget = FIRST_LASTING_SHARE * goal if options.lasting else FIRST_BUDGET
                passes.refresh(u, v, budget, limited=is_last and options.limits_pairs)
                outcome = iterate(passes, u, v, tol=goal, options=limits)
        above = level
        if not is_last:
            coarse_pairs += passes.pairs_done
        seconds.append((max(level.x.cloud.tree.n, level.y.cloud.tree.n), time.perf_counter() - started))
        started = time.perf_counter()
    assert outcome is not None and passes is not None
    return Cascade(outcome, passes, annealing, coarse_pairs, seconds)


def _is_small(level: Level) -> bool:
    x, y = level.x.cloud, level.y.cloud
    return x.tree.tiles * y.tree.tiles <= EVERY_TILE_PAIR.get(x.mass.device.type, 0)

"""Level after level: the coarsest over all pairs, the others lifted and screened, the points last."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..geometry import TiledCloud
from ..iterate import Options, Outcome, ScreenedPasses, iterate
from ..screen import every_pair
from .anneal import annealed
from .dense import is_dense, solved_densely
from .guard import better_start
from .levels import Level, levels
from .lift import lifted

COARSE_TOLERANCE, MOST_COARSE_PASSES = 1e-2, 100
STEP_TOLERANCE = 5e-3  # of the points at larger eps: where they are sparse is little mass, and takes longest afterwards
# of a coarser level all of whose pairs are taken, by device: a GPU is through with them sooner than with choosing
EVERY_TILE_PAIR = {"cuda": 2**20}
LIFT_BUDGET = 1e-3  # of the mask that such a level then hands on
LIFTED_TILE_PAIRS = 2**22  # in so few the next level meets all of one
FIRST_BUDGET = 1e-2  # of the first mask of a level: sums are one only roughly
FIRST_LASTING_SHARE = 1e-3  # of the tolerance: masks that are to last


@dataclass(eq=False)
class Cascade:
    """How the points were solved.

    passes: those of the points, with their last mask; annealing: passes over the points at larger eps; coarse_pairs:
    point pairs that passes of levels of nodes went over; seconds by level, coarsest first, the points last.
    """

    outcome: Outcome
    passes: ScreenedPasses
    annealing: int
    coarse_pairs: float
    seconds: list[tuple[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class _Solved:
    """A level with its potentials in base 2, and the passes whose tile pairs the next level meets. outcome: of
    iterations here; annealing: passes over its points at larger eps; pairs: of points, that passes here went over."""

    level: Level
    passes: ScreenedPasses
    u: Tensor
    v: Tensor
    outcome: Outcome | None
    annealing: int
    pairs: float

    @property
    def passes_of_points(self) -> int:
        return self.annealing + self.outcome.n_passes if self.outcome and self.level.is_of_points else 0


def solve_levels(
    x: TiledCloud, y: TiledCloud, *, eps: float, cost_scale: float, tol: float, options: Options
) -> Cascade:
    """The points at `eps`, to `tol` or the limits of `options`; coarser levels to what a start is worth. Once late, or
    where the points have no passes to spare, the next level is the points at `eps`."""
    started, coarse_pairs = time.perf_counter(), 0.0
    seconds: list[tuple[int, float]] = []
    ladder = levels(x, y, eps=eps, cost_scale=cost_scale)
    last = ladder[-1]
    at = _densely(ladder, cost_scale, options) or _from_zero(ladder[0], cost_scale, tol, options, ladder[0] is last)
    while True:
        side = max(at.level.x.cloud.tree.n, at.level.y.cloud.tree.n)
        seconds.append((side, time.perf_counter() - started))
        if at.level is last:
            break
        started = time.perf_counter()
        coarse_pairs += 0.0 if at.level.is_of_points else at.pairs
        level = ladder[ladder.index(at.level) + 1]
        if options.is_late or (level.is_of_points and at.passes_of_points + 4 > options.max_passes):
            level = last
        at = _from_coarser(at, level, cost_scale, tol, options, level is last)
    assert at.outcome is not None
    return Cascade(at.outcome, at.passes, at.annealing, coarse_pairs, seconds)


def _densely(ladder: list[Level], cost_scale: float, options: Options) -> _Solved | None:
    """The finest level of nodes that is for the dense solver; None if none is, or it did not get there."""
    level = next((level for level in reversed(ladder) if is_dense(level) and not level.is_of_points), None)
    found = level and solved_densely(level, cost_scale=cost_scale, options=options)
    if not (level and found):
        return None
    u, v, pairs = found
    passes = _over_all_pairs(level, _k(level, cost_scale))
    finer = ladder[ladder.index(level) + 1]
    if finer.x.cloud.tree.tiles * level.y.cloud.tree.tiles > LIFTED_TILE_PAIRS:
        passes.refresh(u, v, LIFT_BUDGET)
    return _Solved(level, passes, u, v, None, 0, pairs)


def _from_zero(level: Level, cost_scale: float, tol: float, options: Options, is_last: bool) -> _Solved:
    passes = _over_all_pairs(level, _k(level, cost_scale))
    goal, limits = _limits(level, tol, options, is_last, 0)
    found, annealing = annealed(passes, eps=level.eps, cost_scale=cost_scale, tol=goal, options=limits)
    return _Solved(level, passes, found.u, found.v, found, annealing, passes.pairs_done)


def _from_coarser(
    coarser: _Solved, level: Level, cost_scale: float, tol: float, options: Options, is_last: bool
) -> _Solved:
    x, y, k = level.x.cloud, level.y.cloud, _k(level, cost_scale)
    taken = coarser.passes_of_points
    goal, limits = _limits(level, tol, options, is_last, taken)
    u, v = lifted(coarser.passes, coarser.u, coarser.v, coarser.level, level)
    if is_last:
        u, v = better_start(x, y, u, v, k)
    if not is_last and _is_small(level):
        passes = _over_all_pairs(level, k)
        found = iterate(passes, u, v, tol=goal, options=limits, robust=False)
        passes.refresh(found.u, found.v, LIFT_BUDGET)
    else:
        passes = ScreenedPasses(x, y, k, thins=options.thinning and not options.lasting)
        budget = FIRST_LASTING_SHARE * goal if options.lasting else FIRST_BUDGET
        passes.refresh(u, v, budget, limited=is_last and options.limits_pairs)
        found = iterate(passes, u, v, tol=goal, options=limits, robust=False)
    return _Solved(level, passes, found.u, found.v, found, taken, passes.pairs_done)


def _over_all_pairs(level: Level, k: float) -> ScreenedPasses:
    x, y = level.x.cloud, level.y.cloud
    return ScreenedPasses(x, y, k, mask=every_pair(x, y), thins=False)


def _limits(level: Level, tol: float, options: Options, is_last: bool, taken: int) -> tuple[float, Options]:
    """taken: passes over the points at larger eps, which count."""
    if is_last:
        return tol, replace(options, max_passes=options.max_passes - taken)
    if level.is_of_points:
        return STEP_TOLERANCE, replace(options, max_passes=min(MOST_COARSE_PASSES, options.max_passes - taken - 2))
    return COARSE_TOLERANCE, replace(options, max_passes=MOST_COARSE_PASSES)


def _k(level: Level, cost_scale: float) -> float:
    return cost_scale * math.log2(math.e) / level.eps


def _is_small(level: Level) -> bool:
    x, y = level.x.cloud, level.y.cloud
    return x.tree.tiles * y.tree.tiles <= EVERY_TILE_PAIR.get(x.mass.device.type, 0)

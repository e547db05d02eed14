"""Entropic OT between two point clouds of low dimension: `solve` and its result."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from solvers.flash_sinkhorn.inputs.checks import Inputs, checked_inputs, member, positive, switch, whole
from solvers.flash_sinkhorn.sweeps.threads import undivided

from .cascade import solve_levels, squared_diameter
from .geometry import TiledCloud, from_tiles, tiled_clouds
from .geometry.clouds import LARGEST_COST, LARGEST_DIMENSION
from .iterate import Check, Correction, Options, ScreenedPasses
from .plan.weightless import Weightless, extended, weightless
from .rounding import SHARE, of_all_pairs, of_potentials, refined
from .screen import TooManyPairs

TILES = {1: (8, 16, 32, 64), 2: (16, 32, 64)}  # points, by dimension: a few spacings wide; the next size where tile
LARGER_TILES = 32, 64  # pairs are too many; and above
WIDEST = 4.0  # tiles, in blurs: what is wider has fewer points, for its errors within are what passes wait for
RELAX = "relax the marginals with the dense solver, solvers.flash_sinkhorn (rho)"


@dataclass(frozen=True)
class Result:
    """Potentials f [n], g [m] float64 of OT_eps with P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps),
    C = cost_scale |x - y|^2. Of a point without weight it is f(x) = -eps log sum_j b_j exp((g_j - C(x, y_j)) / eps), of
    which pairs left out hold 1e-6 of the sum at most, wherever the point is; g likewise.

    residual: max(|P1 - a|_1, |P^T 1 - b|_1) over the mass, of the kept tile pairs; omitted: a bound of what all other
    pairs add to it, and float32 coordinates within tiles. converged: whether their sum is at most tol.
    n_passes: row or column passes over the points' kept pairs at any eps, and those of coarser levels as the part that
    their pairs are of the last mask's. n_iterations: half of the passes over the points. n_rejected: mixed steps taken
    back at eps. kept_pairs: of the last mask, a point of x. n_screens: how often pairs of points were chosen.
    trace: residuals on the points at eps; started: of `solve`, on their clock.
    tile: points a tile. seconds: (points a side, seconds) by level, after (0, sorting and what came before). stalled:
    iterations ended above tol because rounding lets the residual fall no further, not at a limit. Not converged, f and
    g are the best of the last pairs chosen.
    """

    f: torch.Tensor
    g: torch.Tensor
    eps: float
    cost_scale: float
    residual: float
    omitted: float
    converged: bool
    n_iterations: int
    n_passes: float
    n_rejected: int
    kept_pairs: float
    n_screens: int
    tile: int
    trace: tuple[Check, ...]
    started: float
    seconds: tuple[tuple[int, float], ...]
    stalled: bool


@dataclass(eq=False)
class Solved:
    """A result with what it was found from: the passes over both clouds with their last mask, and the potentials
    u [N], v [M] in base 2 and kd order, of weights that sum to one. rounding: its part of `omitted`. weightless: the
    points of x, and of y, without weight."""

    result: Result
    passes: ScreenedPasses
    u: torch.Tensor
    v: torch.Tensor
    rounding: float
    weightless: tuple[Weightless | None, Weightless | None]


@torch.no_grad()
def solve(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    tol: float = 1e-2,
    max_iterations: int = 1000,
    max_seconds: float | None = None,
    correction: Correction | str = Correction.FULL,
    memory: int = 5,
    tile: int | None = None,
    lasting: bool = True,
    thinning: bool = True,
) -> Result:
    """Solve min <P, C> + eps KL(P | a x b) over couplings P of a and b, from the pairs of points that matter alone.

    x [n, d], y [m, d]: points, any float dtype, CPU or CUDA, d from 1 to 6. a [n], b [m]: non-negative weights of equal
    sum (uniform if None), normalised inside. eps > 0 in units of C. tol: on the L1 marginal residual over the mass,
    what is left out included. max_iterations over the points, of one row and one column pass each. max_seconds since
    the call, read between passes: once over, coarser levels left are skipped, and potentials of the points come back
    with their residual, which takes two passes over them if there were none yet. correction "full", "lite" or "none":
    see `iterate`; memory: steps that mixing looks back, 0 for none. tile: points a tile, on a GPU 8 to 64; None: 8 in
    one dimension, 16 in two, else 32, or more where tiles meet so many that correcting half-steps would take too much
    memory. lasting: choose pairs seldom and with slack, rather than often and few; if not, thinning: drop those that
    measured sums show to hold little. Not differentiable: inputs are detached.

    Raises ValueError, naming the argument and the fix, for d above 6, NaN or Inf, negative weights, unequal masses,
    empty or mismatched arrays, the largest cost over 1e11 eps, or a bad option.
    """
    return solved(
        x,
        y,
        a,
        b,
        eps=eps,
        cost_scale=cost_scale,
        tol=tol,
        max_iterations=max_iterations,
        max_seconds=max_seconds,
        correction=correction,
        memory=memory,
        tile=tile,
        lasting=lasting,
        thinning=thinning,
    ).result


@torch.no_grad()
def solved(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    tol: float = 1e-2,
    max_iterations: int = 1000,
    max_seconds: float | None = None,
    correction: Correction | str = Correction.FULL,
    memory: int = 5,
    tile: int | None = None,
    lasting: bool = True,
    thinning: bool = True,
) -> Solved:
    """`solve`, with what derivatives start from."""
    started = time.perf_counter()
    eps, cost_scale, tol = positive("eps", eps), positive("cost_scale", cost_scale), positive("tol", tol)
    max_iterations = whole("max_iterations", max_iterations)
    tile = None if tile is None else whole("tile", tile)
    max_seconds = None if max_seconds is None else positive("max_seconds", max_seconds)
    correction, memory = member("correction", Correction, correction), whole("memory", memory, least=0)
    lasting, thinning = switch("lasting", lasting), switch("thinning", thinning)
    check_dimension(x)
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, relax=RELAX)
    sizes = tile_sizes(inputs.x.shape[1]) if tile is None else (tile,)
    with undivided(inputs.x.device):
        width = WIDEST * math.sqrt(eps / cost_scale)
        deadline = None if max_seconds is None else started + max_seconds
        options = Options(correction, memory, 2 * max_iterations, deadline, lasting=lasting, thinning=thinning)
        for size in sizes:
            of_x, of_y, rounding = sorted_clouds(
                inputs, eps=eps, cost_scale=cost_scale, tol=tol, tile=size, width=width
            )
            sorting = time.perf_counter() - started
            goal = max(tol - rounding, tol / 2)  # where rounding is more than half of it, no iteration can be enough
            limited = replace(options, limits_pairs=size < sizes[-1])
            try:
                found = solve_levels(of_x, of_y, eps=eps, cost_scale=cost_scale, tol=goal, options=limited)
                break
            except TooManyPairs:
                del of_x, of_y
    outcome, passes = found.outcome, found.passes
    rounding = refined(rounding, passes, outcome.u, outcome.v, tol=tol)
    rounding += of_potentials(of_x, of_y, outcome.u, outcome.v)
    converged = outcome.converged and outcome.residual + outcome.omitted + rounding <= tol
    apart = (
        weightless(x, inputs.a, of_y, inputs.y, outcome.v, passes.k),
        weightless(y, inputs.b, of_x, inputs.x, outcome.u, passes.k),
    )
    scale, shift = eps * math.log(2.0), eps * math.log(inputs.mass) / 2
    kept = float(len(passes.mask.cols)) * size**2
    fine = found.annealing + outcome.n_passes
    result = Result(
        f=scale * extended(from_tiles(of_x, outcome.u), apart[0]) - shift,
        g=scale * extended(from_tiles(of_y, outcome.v), apart[1]) - shift,
        eps=eps,
        cost_scale=cost_scale,
        residual=outcome.residual,
        omitted=outcome.omitted + rounding,
        converged=converged,
        n_iterations=fine // 2,
        n_passes=fine + found.coarse_pairs / kept,
        n_rejected=outcome.n_rejected,
        kept_pairs=kept / of_x.tree.points,
        n_screens=passes.n_screens,
        tile=size,
        trace=tuple(outcome.trace),
        started=started,
        seconds=((0, sorting), *found.seconds),
        stalled=outcome.stalled or outcome.converged > converged,
    )
    return Solved(result, passes, outcome.u, outcome.v, rounding, apart)


def tile_sizes(d: int) -> tuple[int, ...]:
    """Points a tile in d dimensions: what to try first, and then where tile pairs are too many."""
    return TILES.get(d, LARGER_TILES)


def check_dimension(x: torch.Tensor) -> None:
    """ValueError for points of more coordinates than tiles prune in."""
    if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] > LARGEST_DIMENSION:
        raise ValueError(
            f"x has dimension {x.shape[1]}: pairs of points can be left out from 1 to {LARGEST_DIMENSION} only, "
            "use the dense solver, solvers.flash_sinkhorn"
        )


def sorted_clouds(
    inputs: Inputs, *, eps: float, cost_scale: float, tol: float, tile: int, width: float | None = None
) -> tuple[TiledCloud, TiledCloud, float]:
    """Both clouds in tiles, and what the rounding of their coordinates may add to the residual. ValueError where
    float64 does not hold exponents. width: of `tiled_clouds`."""
    of_x, of_y = tiled_clouds(inputs.x, inputs.y, inputs.a, inputs.b, tile=tile, width=width)
    rounding = of_all_pairs(of_x, of_y, cost_scale * math.log2(math.e) / eps)
    if rounding > SHARE * tol and not inputs.x.is_cuda:
        in_double = inputs.x.double(), inputs.y.double()
        of_x, of_y = tiled_clouds(*in_double, inputs.a, inputs.b, tile=tile, width=width)
        rounding = 0.0
    largest = cost_scale * squared_diameter(of_x, of_y)
    if largest > LARGEST_COST * eps:
        raise ValueError(
            f"eps = {eps:g} is too small for clouds whose largest cost is {largest:g}: choose at least "
            f"{1.01 * largest / LARGEST_COST:.3g}"
        )
    return of_x, of_y, rounding

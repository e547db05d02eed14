"""A cloud against itself: one potential, one pass an iteration, and no cascade."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cascade.levels import SMALL
from ..geometry import TiledCloud
from ..iterate import ScreenedPasses
from ..screen import every_pair
from ..sweep import sweep

RELAXATION = 2.0 / 3.0  # of the way to the full update: the error shrinks threefold a pass, whatever eps
OMITTED_SHARE, SLACK = 0.25, 16.0  # of the tolerance, what pairs left out may hold; a mask is chosen for so much less
STALLED = 12  # passes: they would divide any error but that of rounding by 3^12


@dataclass(eq=False)
class SelfOutcome:
    """u [N] of both sides in base 2, and update [N], with which rows over kept pairs sum to one.

    residual: sum_i a_i |sum_j 2^t_ij - 1| of u over kept pairs, rows or columns; omitted: bound of what the others add.
    """

    u: Tensor
    update: Tensor
    passes: ScreenedPasses
    residual: float
    omitted: float
    converged: bool
    stalled: bool
    n_passes: int


def solve_self(x: TiledCloud, k: float, *, tol: float, max_passes: int, deadline: float | None = None) -> SelfOutcome:
    """OT of a cloud with itself at k = cost_scale log2(e) / eps.

    The derivative of the half-step's update F is minus the plan, whose eigenvalues lie in [0, 1] because the Gaussian
    kernel is positive: two thirds of the way to F(u) shrink the error threefold near the solution. u starts from what
    each tile alone makes its points' sums, which is above the solution where tiles are narrower than the blur.
    """
    passes = ScreenedPasses(x, x, k, mask=every_pair(x, x) if x.tree.n <= SMALL else None, thins=False)
    u = _start(x, k)
    if x.tree.n > SMALL:
        passes.refresh(u, u, OMITTED_SHARE * tol / SLACK)
    least, least_at, n_passes = torch.inf, 0, 0
    while True:
        sums = passes.row_pass(u, u, robust=n_passes == 0, partial=False).log2_sums
        n_passes += 1
        off = torch.where(x.weight > 0, x.weight * (sums.exp2() - 1.0), 0.0).abs().sum()
        residual, omitted = torch.stack([off, passes.omitted(u, u)]).tolist()
        if residual < least:
            least, least_at = residual, n_passes
        update = torch.where((x.weight > 0) | sums.isfinite(), u - sums, u)
        converged = residual + omitted <= tol
        stalled = not converged and n_passes - least_at >= STALLED
        late = deadline is not None and time.perf_counter() > deadline
        if converged or stalled or late or n_passes >= max_passes:
            return SelfOutcome(u, update, passes, residual, omitted, converged, stalled, n_passes)
        u = u + RELAXATION * (update - u)
        if not omitted <= OMITTED_SHARE * max(tol, min(residual, 1.0)):
            passes.refresh(u, u, OMITTED_SHARE * tol / SLACK)


def _start(x: TiledCloud, k: float) -> Tensor:
    """[N]: with it each tile's own pairs sum to about one, if its points are alike; 0 where a tile has no weight."""
    tiles = torch.arange(x.tree.tiles + 1, device=x.weight.device)
    zero = torch.zeros_like(x.weight)
    own = sweep(x, x, tiles, tiles[:-1].int(), zero, zero, k, robust=True).log2_sums
    return torch.where(own.isfinite(), -own / 2, 0.0)

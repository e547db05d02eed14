"""From a level's potentials to the next finer one's: half-steps of the finer cloud's rows over the coarse columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..iterate import ScreenedPasses
from ..sweep import sweep
from .levels import Level, Side


def lifted(passes: ScreenedPasses, u: Tensor, v: Tensor, coarse: Level, fine: Level) -> tuple[Tensor, Tensor]:
    """u, v of `fine` in base 2, at its eps, from those of `coarse` that `passes` are of.

    A tile of the finer level meets what the coarse tile that it is in keeps.
    """
    mask, k = passes.mask, passes.k
    ratio = coarse.eps / fine.eps
    fine_u = _half_step(fine.x, coarse.x, coarse.y, mask.row_starts, mask.cols, v, k)
    fine_v = _half_step(fine.y, coarse.y, coarse.x, mask.col_starts, mask.rows, u, k)
    return ratio * fine_u, ratio * fine_v


def _half_step(
    fine: Side, coarse: Side, opposite: Side, starts: Tensor, lists: Tensor, potential: Tensor, k: float
) -> Tensor:
    parents = fine.tile_in(coarse)
    counts = starts.diff()[parents]
    own = pad(counts.cumsum(0), (1, 0))
    tile = torch.repeat_interleave(counts)
    entries = torch.arange(len(tile), device=tile.device) + (starts[parents] - own[:-1])[tile]
    zero = torch.zeros_like(fine.cloud.weight)
    found = sweep(fine.cloud, opposite.cloud, own, lists[entries], zero, potential, k, robust=True)
    return torch.where(found.log2_sums.isfinite(), -found.log2_sums, 0.0)  # nothing to meet: no weight around

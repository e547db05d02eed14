"""The published screen: one threshold for what any tile pair may hold, as if all were at it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..screen import Mask
from ..screen.mask import mask_of, running
from ..screen.planes import levels
from ..screen.walk import walk

OMITTED_SHARE = 0.25  # of the tolerance: what all pairs left out of a row or column may hold


def screened(x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor, k: float, *, tol: float) -> Mask:
    """Without the tile pairs that hold at most tol / 4 over the number of tiles of any row's and any column's mass, at
    u [N], v [M]; so that no row or column misses more than tol / 4."""
    most = OMITTED_SHARE * tol / max(x.tree.tiles, y.tree.tiles)
    heaviest = float(max(x.mass.amax(), y.mass.amax()))
    pairs = walk(levels(x, u), levels(y, v), k, threshold=most / heaviest, chunk=2**16)
    i = torch.repeat_interleave(pairs.row_starts.diff(), output_size=len(pairs.cols))
    j = pairs.cols.long()
    density = pairs.exponent.double().exp2()
    by_rows, by_cols = density * y.mass[j], density * x.mass[i]
    far = (by_rows <= most) & (by_cols <= most)
    row_bound = pairs.row_bound.index_add(0, i[far], by_rows[far])
    col_bound = pairs.col_bound.index_add(0, j[far], by_cols[far])
    return mask_of(running(~far)[pairs.row_starts], pairs.cols[~far], row_bound, col_bound)

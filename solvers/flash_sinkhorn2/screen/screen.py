"""The screen: tile pairs by distance and mass, so that what each row and column leaves out is bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import TiledCloud
from .mask import Mask, mask_of, thin
from .planes import levels
from .walk import walk


def screen(
    x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor, k: float,
    *, budget: float, most_pairs: int | None = None, chunk: int = 2**16,
) -> Mask:  # fmt: skip
    """The tile pairs without which no row or column sum of 2^t_ij loses more than `budget`, at potentials u [N], v [M].

    u and v are in base 2 and finite where there is weight, k = cost_scale log2(e) / eps; t_ij = u_i + v_j +
    log2(b_j) - k |x_i - y_j|^2 for rows, with log2(a_i) for columns. Sums are one at the solution; of potentials whose
    sums are far below one everything may fit into the budget, so take a half-step before. Bounds of boxes are a few
    times what is there: screen to a quarter of the budget, and thin to all of it with the sums that a pass measures.
    `chunk`: node pairs that a CPU looks at at a time, so that they stay in its caches.

    Raises ValueError if k or budget is not positive and finite, or a potential is not finite where there is weight;
    TooManyPairs if boxes do not exclude all but `most_pairs` tile pairs, before there is memory for them.
    """
    for name, value in (("k", k), ("budget", budget)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}: give a positive finite number")
    finite = torch.stack([(p.isfinite() | (cloud.weight == 0)).all() for cloud, p in ((x, u), (y, v))]).tolist()
    if not all(finite):
        name = "v" if finite[0] else "u"
        raise ValueError(f"{name} is not finite where there is weight: screen at the last finite potentials")
    pairs = walk(levels(x, u), levels(y, v), k, threshold=budget / 2, most_pairs=most_pairs, chunk=chunk)
    mask = mask_of(pairs.row_starts, pairs.cols, pairs.row_bound, pairs.col_bound)
    return thin(mask, *_costs(mask, pairs.exponent, x.mass, y.mass), budget)


def _costs(mask: Mask, exponent: Tensor, row_mass: Tensor, col_mass: Tensor) -> tuple[Tensor, Tensor]:
    """What any row, and any column, holds of each pair at most, as `thin` takes them; on a GPU the first is where
    `exponent` was."""
    if exponent.is_cuda:
        from . import triton_thin  # Triton need not be there on machines without a GPU

        return triton_thin.bounded_costs(mask, exponent, row_mass, col_mass)
    most = exponent.double().exp2_()
    return most * col_mass[mask.cols], most.index_select(0, mask.to_columns) * row_mass[mask.rows]

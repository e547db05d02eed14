"""A pass: sums of 2^t over the kept tile pairs, of every row; and the plan's product with values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..geometry import TiledCloud
from .blocked_sweep import apply_blocked, sweep_blocked

PAIRS_AT_ONCE = 1 << 16  # tile pairs whose partial sums are scaled at once
LARGEST_ANCHOR = 2.0**26  # float32 rounds it by 2, and exponentials are off by a factor of so many powers of two


@dataclass(eq=False)
class Pass:
    """What a sweep found.

    log2_sums [N] float64: log2 sum_j 2^t_ij over the columns of kept tiles, -inf where nothing is kept; partial [K, T]
    float32, if asked for: the rows' sums over each kept tile alone, relative to 2^anchor_i, in the order of the lists;
    anchor [N]: 0 in a plain pass, about the row's largest exponent in a robust one.
    """

    log2_sums: Tensor
    partial: Tensor | None
    anchor: Tensor


def sweep(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float,
    *, robust: bool = False, partial: bool = False,
) -> Pass:  # fmt: skip
    """Row sums at base-2 potentials u [N] and v [M], float64 and finite, in kd order, where
    t_ij = u_i + v_j + log2 b_j - k |x_i - y_j|^2 and row tile I meets the tiles lists[starts[I] : starts[I + 1]].

    starts [tiles + 1] int64, lists [K] int32. A plain sum is inf above 2^128, and terms under 2^-126 are lost: rows
    with |log2_sums| over 90, or not finite, are for a robust pass, at nearly twice the cost. The column pass is
    sweep(y, x, mask.col_starts, mask.rows, v, u, k). Rows in tiles of one point meet columns in any tiles, on a GPU in
    float64 only. Raises ValueError on shapes that do not fit.
    """
    _check(rows, cols, starts, lists, u, v)
    run: Any = sweep_blocked
    if _by_kernels(rows):
        from .triton_sweep import sweep_triton as run
    found = Pass(*run(rows, cols, starts, lists, u, v, k, robust=robust, partial=partial))
    if not robust or not bool(found.anchor.abs().amax() > LARGEST_ANCHOR):
        return found
    anchor = found.anchor.double()
    found = Pass(*run(rows, cols, starts, lists, u - anchor, v, k, robust=True, partial=partial))
    return Pass(found.log2_sums + anchor, found.partial, found.anchor + anchor)


def apply(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float, values: Tensor,
    *, robust: bool = False,
) -> Tensor:  # fmt: skip
    """sum_j P_ij values_j [N, r] float64 over the kept tile pairs, values [M, r] in kd order: P_ij = a_i 2^t_ij.

    On a GPU values are rounded to float32. Arguments as for `sweep`.
    """
    _check(rows, cols, starts, lists, u, v)
    if values.ndim != 2 or values.shape[0] != v.shape[0]:
        raise ValueError(
            f"values has shape {tuple(values.shape)}: give [{v.shape[0]}, columns], one row a column point"
        )
    run: Any = apply_blocked
    if _by_kernels(rows):
        from .triton_sweep import apply_triton as run
    sums, anchor = run(rows, cols, starts, lists, u, v, k, values, robust=robust)
    scale = torch.where(rows.weight > 0, rows.weight * anchor.double().exp2(), 0.0)
    return torch.where(rows.weight[:, None] > 0, scale[:, None] * sums, 0.0)


def tile_maxima(rows: TiledCloud, starts: Tensor, found: Pass) -> Tensor:
    """[K] float64, on a GPU float32 and rounded up, in the order of the lists: the largest partial sum s_iJ of a row
    with weight of each tile pair."""
    if found.partial is None:
        raise ValueError("the pass has no partial sums: sweep with partial=True")
    scale = torch.where(rows.weight > 0, found.anchor.double().exp2(), 0.0)
    if found.partial.is_cuda:
        from .triton_partial import reduced

        return reduced(found.partial, starts, scale, maximum=True)
    row_of_pair = torch.repeat_interleave(starts[1:] - starts[:-1], output_size=found.partial.shape[0])
    scale = scale.view(-1, rows.tree.tile)
    maxima = [
        torch.where(scale[i] > 0, partial * scale[i], 0.0).amax(1)
        for partial, i in zip(found.partial.split(PAIRS_AT_ONCE), row_of_pair.split(PAIRS_AT_ONCE), strict=True)
    ]
    return torch.cat(maxima)


def _by_kernels(cloud: TiledCloud) -> bool:
    """On a GPU, but for clouds in float64: kernels would round them."""
    return cloud.local.is_cuda and cloud.local.dtype is torch.float32


def _check(rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor) -> None:
    if rows.centre.shape[1] != cols.centre.shape[1]:
        raise ValueError(f"rows have dimension {rows.centre.shape[1]} but cols have {cols.centre.shape[1]}")
    if rows.tree.tile != cols.tree.tile and (rows.tree.tile != 1 or _by_kernels(rows)):
        raise ValueError(f"rows come in tiles of {rows.tree.tile} but cols in tiles of {cols.tree.tile}: use one size")
    for name, potential, cloud in (("u", u, rows), ("v", v, cols)):
        if potential.shape != cloud.weight.shape or potential.dtype != torch.float64:
            raise ValueError(
                f"{name} is {potential.dtype} {tuple(potential.shape)}: give float64 [{cloud.weight.shape[0]}]"
            )
    if starts.shape != (rows.tree.tiles + 1,) or starts.dtype != torch.int64:
        raise ValueError(f"starts is {starts.dtype} {tuple(starts.shape)}: give int64 [{rows.tree.tiles + 1}]")
    if lists.ndim != 1 or lists.dtype != torch.int32:
        raise ValueError(f"lists is {lists.dtype} {tuple(lists.shape)}: give int32 [tile pairs]")

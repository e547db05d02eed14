"""Half-steps: what a pass makes of both potentials, with or without the coarse correction."""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from ..correct import Coarse
from ..correct.newton import LARGEST
from ..geometry import TiledCloud
from ..sweep import Pass


class Correction(StrEnum):
    """full: both half-steps, from the partial sums of each point; lite: the column half-step alone, from the plan's
    mass a tile pair; none: plain half-steps. Where partial sums would take too much memory, all are plain."""

    FULL = "full"
    LITE = "lite"
    NONE = "none"


def plain(rows: TiledCloud, u: Tensor, found: Pass) -> Tensor:
    """u [N] with which every row sum is one; unchanged where rows have no weight and no tile."""
    return _updated(rows, u, found.log2_sums)


def corrected(
    rows: TiledCloud, cols: TiledCloud, coarse: Coarse, u: Tensor, v: Tensor, found: Pass
) -> tuple[Tensor, Tensor]:
    """u [N] and v [M] that maximise the dual value over all u and one multiplier w_J for each tile of v, as far as the
    balance is exact: v_J + w_J, and the u with which every row sum is one.

    With r_i = sum_J s_iJ and S_IJ = sum_(i in I) a_i s_iJ / r_i the dual value gains sum_J B_J w_J -
    sum_i a_i log(sum_J s_iJ e^w_J / r_i), at least what D gains on S (`balance`), and at least what `plain` gains.
    S is then formed again at w and balanced again, for by the first w mass moves too little where it parts within a
    tile; on a GPU at the finest level alone, for there a V-cycle takes long beside a pass.
    """
    assert found.partial is not None
    if u.is_cuda:
        return corrected_by_kernels(rows, cols, coarse, u, v, found)
    w, sums, anchor = torch.zeros_like(cols.mass), found.log2_sums, found.anchor.double()
    for again in (False, True):
        factor = torch.where(rows.weight > 0, rows.weight * (anchor - sums).exp2(), 0.0)
        S = coarse.tile_matrix(found.partial, factor)
        if again:
            S *= w.exp()[coarse.pairs.cols]
        w = _shortened(w + coarse.balance(S, rows.mass, cols.mass))
        sums = anchor + coarse.corrected_sums(found.partial, w.exp()).log2()
        sums = torch.where(sums == -torch.inf, found.log2_sums, sums)
    works = w.isfinite().all() & ((rows.weight == 0) | sums.isfinite()).all()  # else the plain half-step
    w, sums = torch.where(works, w, 0.0), torch.where(works, sums, found.log2_sums)
    return _updated(rows, u, sums), shifted(cols, v, w)


def corrected_by_kernels(
    rows: TiledCloud, cols: TiledCloud, coarse: Coarse, u: Tensor, v: Tensor, found: Pass
) -> tuple[Tensor, Tensor]:
    """`corrected` on a GPU."""
    from . import triton_updates  # Triton need not be there on machines without a GPU

    assert found.partial is not None
    starts, lists, of_pass = coarse.pairs.row_starts, coarse.pairs.cols, (found.partial, found.anchor, found.log2_sums)
    S = triton_updates.tile_matrix(rows, starts, of_pass)
    w = coarse.balance(S, rows.mass, cols.mass)
    S = triton_updates.tile_matrix_at(rows, starts, lists, w, of_pass)
    more = coarse.balance(S, rows.mass, cols.mass, fine=True)
    return triton_updates.half_step(rows, cols, starts, lists, u, v, w, more, of_pass)


def lite(rows: TiledCloud, cols: TiledCloud, coarse: Coarse, v: Tensor, found: Pass) -> Tensor:
    """v [M] after a column pass at exact rows: within a tile as `plain` has it, between tiles as the plan's mass a tile
    pair is balanced. `coarse` is that of row passes."""
    assert found.partial is not None
    factor = torch.where(cols.weight > 0, cols.weight * found.anchor.double().exp2(), 0.0)
    in_column_order = coarse.mirrored.tile_matrix(found.partial, factor)
    S = torch.empty_like(in_column_order)
    S[coarse.pairs.to_columns] = in_column_order
    w = coarse.balance(S, rows.mass, cols.mass)
    col_mass = S.new_zeros(len(cols.mass)).index_add_(0, coarse.pairs.cols, S)
    plain_w = torch.where((cols.mass > 0) & (col_mass > 0), (cols.mass / col_mass).log(), 0.0)
    return shifted(cols, plain(cols, v, found), w - plain_w)


def shifted(cols: TiledCloud, v: Tensor, w: Tensor) -> Tensor:
    """v [M] + w log2(e), w [tiles] in natural logarithms."""
    return v + (w / math.log(2.0)).repeat_interleave(cols.tree.tile)


def _shortened(w: Tensor) -> Tensor:
    """Within +-LARGEST: it gains still, for the dual value is concave in w."""
    return w * (LARGEST / w.abs().amax()).clamp(max=1.0)


def _updated(rows: TiledCloud, u: Tensor, log2_sums: Tensor) -> Tensor:
    """A point with weight always meets one: where its sum is lost, u is not finite and the dual value shows it."""
    return torch.where((rows.weight > 0) | log2_sums.isfinite(), u - log2_sums, u)

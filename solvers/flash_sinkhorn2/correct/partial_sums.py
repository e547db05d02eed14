"""From the partial sums of a pass, a point against a tile, to the matrix of tile pairs, and back to corrected sums."""

from __future__ import annotations

import torch
from torch import Tensor

from .pairs import Pairs, compressed_rows

CHUNK = 1 << 20  # tile pairs whose temporaries are held at a time


def tile_matrix(pairs: Pairs, partial: Tensor, factor: Tensor) -> Tensor:
    """S [K] float64 in row order: S_IJ = sum over the rows i of tile I of factor_i s_iJ.

    partial [K, T]: s_iJ; factor [rows * T].
    """
    if partial.is_cuda:
        from ..sweep.triton_partial import reduced  # Triton need not be there on machines without a GPU

        return reduced(partial, pairs.row_starts, factor)
    factor = factor.view(-1, partial.shape[1]).to(partial.dtype)
    rows = pairs.row_of_entries
    return torch.cat(
        [
            (partial[at : at + CHUNK] * factor[rows[at : at + CHUNK]]).sum(1, dtype=torch.float64)
            for at in range(0, len(rows), CHUNK)
        ]
    )


def corrected_sums(pairs: Pairs, partial: Tensor, multipliers: Tensor) -> Tensor:
    """[rows * T] float64: sum over tiles J of s_iJ multipliers_J, multipliers [columns]."""
    entries = torch.arange(len(pairs.cols), dtype=torch.int32, device=partial.device)
    values = multipliers.to(partial.dtype)[pairs.cols]
    return (compressed_rows(pairs.row_starts, entries, values, len(entries)) @ partial).double().flatten()

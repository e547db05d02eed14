"""Sums and maxima of a pass's partial sums on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from .partial_kernels import reduce_kernel

AT_ONCE = 16  # tile pairs


def reduced(partial: Tensor, starts: Tensor, factor: Tensor, *, maximum: bool = False) -> Tensor:
    """[K]: of each tile pair the sum over its rows of factor_i s_iJ, float64, or their maximum, float32 and rounded up.
    partial [K, T] float32, starts [tiles + 1], factor [tiles * T] float64 >= 0."""
    tile = partial.shape[1]
    out = torch.empty(len(partial), dtype=torch.float32 if maximum else torch.float64, device=partial.device)
    options = {"T": tile, "AT_ONCE": AT_ONCE, "MAXIMUM": maximum, "num_warps": 1}
    launch(reduce_kernel, (len(starts) - 1, 1, 1), (partial, starts, factor, out), options)
    return out

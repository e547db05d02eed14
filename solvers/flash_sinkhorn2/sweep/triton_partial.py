"""Sums and maxima of a pass's partial sums on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .partial_kernels import multiply_kernel, reduce_kernel

AT_ONCE = 16  # tile pairs


def reduced(partial: Tensor, starts: Tensor, factor: Tensor, *, maximum: bool = False) -> Tensor:
    """[K] float64: of each tile pair the sum over its rows of factor_i s_iJ, or their maximum. partial [K, T] float32,
    starts [tiles + 1], factor [tiles * T] float64 >= 0."""
    tile = partial.shape[1]
    out = torch.empty(len(partial), dtype=torch.float64, device=partial.device)
    with _device(partial):
        reduce_kernel[(len(starts) - 1,)](
            partial, starts, factor, out, T=tile, AT_ONCE=AT_ONCE, MAXIMUM=maximum, num_warps=1
        )
    return out


def multiplied(partial: Tensor, starts: Tensor, lists: Tensor, multipliers: Tensor) -> Tensor:
    """[tiles * T] float64: of each row the sum over tiles J of s_iJ multipliers_J; multipliers [columns] float64."""
    tile, tiles = partial.shape[1], len(starts) - 1
    out = torch.empty(tiles * tile, dtype=torch.float64, device=partial.device)
    with _device(partial):
        multiply_kernel[(tiles,)](partial, starts, lists, multipliers, out, T=tile, AT_ONCE=AT_ONCE, num_warps=1)
    return out


def _device(tensor: Tensor) -> Any:
    """Triton launches on the current device: make that the tensor's own."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

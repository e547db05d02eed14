"""From lists of columns, row after row, to lists of rows, column after column."""

from __future__ import annotations

import torch
from torch import Tensor


def index_type(n: int) -> torch.dtype:
    """The smaller type of n different indices."""
    return torch.int32 if n < 2**31 else torch.int64


def mirrored(starts: Tensor, lists: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of lists [K] int32 of columns below n, row I's being lists[starts[I] : starts[I + 1]] without repeats: where each
    column's list starts [n + 1] int64; the columns' rows [K] int32, ascending; and which entry of `lists` each is [K],
    of `index_type`."""
    if lists.is_cuda:
        from . import triton_mirror  # Triton need not be there on machines without a GPU

        return triton_mirror.mirrored(starts, lists, n)
    in_columns, entries = lists.sort(stable=True)
    rows = torch.arange(len(starts) - 1, dtype=torch.int32, device=lists.device)
    rows = torch.repeat_interleave(rows, starts.diff(), output_size=len(lists))
    columns = torch.arange(n + 1, dtype=lists.dtype, device=lists.device)
    return torch.searchsorted(in_columns, columns), rows[entries], entries.to(index_type(len(lists)))

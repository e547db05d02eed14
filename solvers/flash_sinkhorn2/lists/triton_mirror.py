"""`mirror.mirrored` on a GPU: rows in groups, of which each counts its columns and then writes; nothing is sorted."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from solvers.flash_sinkhorn.sweeps.launching import launch

from .mirror import index_type

GROUPS = 256  # of rows with about as many entries each; four bytes a column and group are held meanwhile
AT_ONCE = 512  # entries
COLUMNS, GROUPS_AT_ONCE = 64, 16


def mirrored(starts: Tensor, lists: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `mirror.mirrored`."""
    n_rows = len(starts) - 1
    places = torch.zeros(GROUPS, n, dtype=torch.int32, device=lists.device)
    counts = torch.empty(n, dtype=torch.int32, device=lists.device)
    rows = torch.empty_like(lists)
    entries = torch.empty(len(lists), dtype=index_type(len(lists)), device=lists.device)
    options = {"GROUPS": GROUPS, "AT_ONCE": AT_ONCE, "num_warps": 4}
    launch(count_kernel, (GROUPS, 1, 1), (starts, lists, places, len(lists), n_rows, n), options)
    blocks = {"GROUPS": GROUPS, "AT_ONCE": GROUPS_AT_ONCE, "COLUMNS": COLUMNS, "num_warps": 2}
    launch(offset_kernel, (triton.cdiv(n, COLUMNS), 1, 1), (places, counts, n), blocks)
    col_starts = pad(counts.cumsum(0), (1, 0))
    arguments = starts, lists, places, col_starts, rows, entries, len(lists), n_rows, n
    launch(place_kernel, (GROUPS, 1, 1), arguments, options)
    return col_starts, rows, entries


@triton.jit
def _first_row(starts, n_rows, entry):
    """The first row whose list starts at that entry or later; n_rows if none does."""
    low = entry - entry
    high = low + n_rows
    while low < high:
        middle = (low + high) // 2
        below = tl.load(starts + middle) < entry
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=["n_entries", "n_rows", "n_cols"])
def count_kernel(
    starts, lists, counts, n_entries, n_rows, n_cols, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """counts [GROUPS, n_cols], zeros before: how often one group's lists have each column."""
    group = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + _first_row(starts, n_rows, group * n_entries // GROUPS))
    last = tl.load(starts + _first_row(starts, n_rows, (group + 1) * n_entries // GROUPS))
    for start in range(first, last, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        column = tl.load(lists + entry, entry < last, other=0)
        tl.atomic_add(counts + group * n_cols + column, 1, entry < last, sem="relaxed")


@triton.jit(do_not_specialize=["n_cols"])
def offset_kernel(places, counts, n_cols, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr):
    """places [GROUPS, n_cols]: in place of each group's count the sum of those before; counts [n_cols]: of all."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, GROUPS, AT_ONCE):
        group = start + tl.arange(0, AT_ONCE)
        place = places + group[:, None].to(tl.int64) * n_cols + column[None, :]
        count = tl.load(place, (column < n_cols)[None, :], other=0)
        tl.store(place, before[None, :] + tl.cumsum(count, 0) - count, (column < n_cols)[None, :])
        before += tl.sum(count, 0)
    tl.store(counts + column, before, column < n_cols)


@triton.jit(do_not_specialize=["n_entries", "n_rows", "n_cols"])
def place_kernel(
    starts, lists, places, col_starts, rows, entries, n_entries, n_rows, n_cols,
    GROUPS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One group writes its rows one after the other, so that columns have them ascending; places [GROUPS, n_cols]:
    where in each column's list the group's next row belongs."""
    group = tl.program_id(0).to(tl.int64)
    first_row = _first_row(starts, n_rows, group * n_entries // GROUPS)
    last_row = _first_row(starts, n_rows, (group + 1) * n_entries // GROUPS)
    for row in range(first_row, last_row):
        last = tl.load(starts + row + 1)
        for start in range(tl.load(starts + row), last, AT_ONCE):
            entry = start + tl.arange(0, AT_ONCE)
            there = entry < last
            column = tl.load(lists + entry, there, other=0)
            offset = tl.atomic_add(places + group * n_cols + column, 1, there, sem="relaxed")
            place = tl.load(col_starts + column, there, other=0) + offset
            tl.store(rows + place, tl.zeros([AT_ONCE], tl.int64) + row, there)
            tl.store(entries + place, entry, there)
        tl.debug_barrier()  # the next row's columns come after this one's

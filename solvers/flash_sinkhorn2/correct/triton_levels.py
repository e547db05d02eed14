"""The next coarser level's pattern on a GPU: lists of a node's rows are merged, not sorted."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..lists import index_type, mirrored
from .pairs import Pairs

AT_ONCE = 128  # of a list


def coarsened(
    pairs: Pairs, row_children: Tensor, row_parents: Tensor, col_children: Tensor, col_parents: Tensor
) -> tuple[Pairs, Tensor, Tensor]:
    """The pattern over nodes that hold rows row_children[R] to row_children[R + 1], and columns likewise, and the
    `starts` and `entries` of a `Coarsening`; parents: the node of each row and column."""
    rows, n_entries = len(row_children) - 1, len(pairs.cols)
    entries = torch.empty(n_entries, dtype=index_type(n_entries), device=pairs.cols.device)
    options = {"AT_ONCE": AT_ONCE, "num_warps": 1}
    arguments = pairs.row_starts, pairs.cols, row_parents, row_children, col_parents, col_children, entries
    launch(merge_kernel, (len(row_parents), 1, 1), arguments, options)
    counts = torch.empty(rows, dtype=torch.int64, device=entries.device)
    own = pairs.row_starts, pairs.cols, row_children, col_parents, entries, counts
    launch(pattern_kernel, (rows, 1, 1), (*own, counts, pairs.cols, entries), {**options, "WRITE": False})
    row_starts = pad(counts.cumsum(0), (1, 0))
    cols = torch.empty(int(row_starts[-1]), dtype=torch.int32, device=entries.device)
    starts = torch.empty(len(cols) + 1, dtype=entries.dtype, device=entries.device)
    launch(pattern_kernel, (rows, 1, 1), (*own, row_starts, cols, starts), {**options, "WRITE": True})
    return Pairs(row_starts, cols, *mirrored(row_starts, cols, len(col_children) - 1)), starts, entries


@triton.jit
def merge_kernel(
    starts, cols, row_parents, row_children, col_parents, col_children, entries, AT_ONCE: tl.constexpr
):  # fmt: skip
    """One row: where its entries are among those of its node in the order of their columns' nodes, then of rows, then
    of columns; entries [K]: which one is there."""
    row = tl.program_id(0).to(tl.int64)
    parent = tl.load(row_parents + row)
    sibling, end = tl.load(row_children + parent), tl.load(row_children + parent + 1)
    base = tl.load(starts + sibling)
    own, last = tl.load(starts + row), tl.load(starts + row + 1)
    for start in range(own, last, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        there = entry < last
        node = tl.load(col_parents + tl.load(cols + entry, there, other=0), there, other=0)
        place = base + entry - own
        for other in range(sibling, end):
            if other != row:
                # of a row before this one the same node's columns come first as well
                column = tl.load(col_children + node + (other < row).to(tl.int64), there, other=0)
                first = tl.load(starts + other)
                length = tl.load(starts + other + 1) - first
                low = tl.zeros([AT_ONCE], tl.int64) + first
                high = low + length
                while length > 0:
                    middle = (low + high) // 2
                    open = there & (low < high)
                    below = open & (tl.load(cols + middle, open, other=0) < column)
                    high = tl.where(open & (below == 0), middle, high)
                    low = tl.where(below, middle + 1, low)
                    length = length // 2
                place += low - first
        tl.store(entries + place, entry, there)


@triton.jit
def pattern_kernel(
    starts, cols, row_children, col_parents, entries, counts, coarse_starts, coarse_cols, first_entries,
    AT_ONCE: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One node of rows: how many nodes of columns its entries have; WRITE: which, from coarse_starts[node], and where
    each one's entries start, with the end of all."""
    node = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + tl.load(row_children + node))
    last = tl.load(starts + tl.load(row_children + node + 1))
    place = tl.load(coarse_starts + node) if WRITE else first - first
    for start in range(first, last, AT_ONCE):
        index = start + tl.arange(0, AT_ONCE)
        there = index < last
        column = tl.load(cols + tl.load(entries + index, there, other=0), there, other=0)
        parent = tl.load(col_parents + column, there, other=0)
        follows = there & (index > first)
        column = tl.load(cols + tl.load(entries + index - 1, follows, other=0), follows, other=0)
        is_new = there & ((index == first) | (tl.load(col_parents + column, follows, other=0) != parent))
        if WRITE:
            own = place + tl.cumsum(is_new.to(tl.int32), 0) - 1
            tl.store(coarse_cols + own, parent, is_new)
            tl.store(first_entries + own, index, is_new)
        place += tl.sum(is_new.to(tl.int64), 0)
    if WRITE:
        tl.store(first_entries + place, last)
    else:
        tl.store(counts + node, place)

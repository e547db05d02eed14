"""Run under TRITON_INTERPRET=1: mirrored lists, and their merging into coarser ones, against torch, one JSON line.
`case` and `coarse_case` serve GPUs too."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn2.correct import levels, pairs_of
from solvers.flash_sinkhorn2.correct.levels import _nested
from solvers.flash_sinkhorn2.correct.triton_levels import coarsened
from solvers.flash_sinkhorn2.geometry import Tree
from solvers.flash_sinkhorn2.lists import mirrored, triton_mirror

CASES = [(1, 1, 1.0), (3, 700, 0.9), (401, 5, 0.5), (130, 170, 0.1), (50, 90, 0.01), (20, 30, 0.0)]  # rows, cols, share
COARSE_CASES = [(301, 333, 0.03), (300, 20, 0.2), (90, 300, 0.9), (260, 260, 0.004)]


def pattern(rows, cols, density):
    """Some rows and columns without entries, some with all of them."""
    kept = torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows)) < density
    if 0 < density < 1:
        kept[rows // 2], kept[:, cols // 3] = True, True
        kept[rows // 3 : rows // 2 : 2], kept[-1], kept[:, -2:] = False, False, False
    return kept


def case(rows, cols, density, device="cpu"):
    """Whether the lists are those of a sort."""
    kept = pattern(rows, cols, density)
    starts = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    lists = kept.nonzero()[:, 1].int()
    found = triton_mirror.mirrored(starts.to(device), lists.to(device), cols)
    return all(same(one, other) for one, other in zip(found, mirrored(starts, lists, cols), strict=True))


def coarse_case(rows, cols, density, device="cpu"):
    """Whether each coarser level is that of torch, and how many there are."""
    kept = pattern(rows, cols, density)
    trees = [Tree(n, 1, torch.arange(n)) for n in (rows, cols)]
    level, agree, depths, count = (
        levels(pairs_of(*kept.nonzero(as_tuple=True), kept.shape), *trees),
        True,
        [None] * 2,
        0,
    )
    while level.coarsening is not None:
        coarsening, coarser = level.coarsening, []
        for tree, n in zip(trees, coarsening.level.pairs.shape, strict=True):
            coarser.append(None if n == tree.tiles else n.bit_length() - 1)
        nested = [t.to(device) for each in zip(trees, depths, coarser, strict=True) for t in _nested(*each)]
        pairs = moved(level.pairs, device)
        found, starts, entries = coarsened(pairs, *nested)
        want = coarsening.level.pairs
        for name in ("row_starts", "cols", "col_starts", "rows", "to_columns"):
            agree &= same(getattr(found, name), getattr(want, name))
        agree &= same(starts, coarsening.starts) and same(entries, coarsening.entries)
        level, depths, count = coarsening.level, coarser, count + 1
    return [agree, count]


def moved(pairs, device):
    lists = pairs.row_starts, pairs.cols, pairs.col_starts, pairs.rows, pairs.to_columns
    return type(pairs)(*(t.to(device) for t in lists))


def same(found, want):
    return found.dtype == want.dtype and torch.equal(found.cpu(), want)


if __name__ == "__main__":
    triton_mirror.GROUPS = 32  # the interpreter takes one after the other
    found = {str(c): case(*c) for c in CASES}
    print(json.dumps([found, {str(c): coarse_case(*c) for c in COARSE_CASES}]))

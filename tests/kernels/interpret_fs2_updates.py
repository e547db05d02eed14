"""Run under TRITON_INTERPRET=1: corrected half-steps against torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import torch

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.iterate import triton_updates
from solvers.flash_sinkhorn2.iterate.updates import corrected_by_kernels
from solvers.flash_sinkhorn2.sweep import Pass

CASES = [(5, 300, 8, 0.0), (700, 90, 16, 0.0), (63, 100, 32, 3.0), (63, 100, 32, math.nan), (100, 63, 32, -math.inf)]
CASES += [(150, 200, 16, -70.0), (90, 80, 8, 50.0)]  # shortened


class Balances:
    """In place of both balances of a half-step: w first, then a tenth of its reverse; S of each."""

    def __init__(self, starts, lists, w):
        self.pairs = SimpleNamespace(row_starts=starts, cols=lists)
        self.w, self.found = w, []

    def balance(self, S, A, B, *, fine=False):
        self.found.append(S.clone())
        assert fine == (len(self.found) == 2)
        return 0.1 * self.w.flip(0) if fine else self.w


def case(n, m, tile, spoiled, device="cpu"):
    """Points of the clouds, points a tile, and what is added to one multiplier: not finite, the half-step is plain."""
    g = torch.Generator().manual_seed(n)
    a, b = (torch.rand(size, generator=g, dtype=torch.float64) for size in (n, m))
    a[::5] = 0.0
    rows, cols = (c for c in tiled_clouds(*(torch.rand(k, 2, generator=g) for k in (n, m)), a, b, tile=tile))
    kept = torch.rand(rows.tree.tiles, cols.tree.tiles, generator=g) < 0.6
    kept[:, 0] = True
    if rows.tree.tiles > 1:
        kept[rows.tree.tiles // 2] = False  # an empty list
    r, c = kept.nonzero(as_tuple=True)
    starts, lists = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)), c.int()
    u, v = (torch.randn(len(cloud.weight), generator=g, dtype=torch.float64) for cloud in (rows, cols))
    w = torch.randn(cols.tree.tiles, generator=g, dtype=torch.float64)
    w[0] += spoiled
    partial = torch.rand(len(r), tile, generator=g)
    anchor = (20 * torch.randn(len(u), generator=g)).round()
    sums = torch.zeros(rows.tree.tiles, tile, dtype=torch.float64).index_add_(0, r, partial.double()).flatten()
    log2_sums = anchor + sums.log2()
    log2_sums[rows.weight > 0] = log2_sums[rows.weight > 0].clamp(min=-100.0)  # repaired
    partial[:, 0] = torch.where(rows.weight.view(-1, tile)[r, 0] > 0, partial[:, 0], torch.inf)

    factor = torch.where(rows.weight > 0, rows.weight * (anchor.double() - log2_sums).exp2(), 0.0).view(-1, tile)[r]
    S = torch.where(factor > 0, factor * partial, 0.0).sum(1)
    moved = torch.zeros(rows.tree.tiles, tile, dtype=torch.float64)
    moved.index_add_(0, r, partial.double() * w.exp()[c, None])
    moved = anchor + moved.flatten().log2()
    moved = torch.where(moved == -torch.inf, log2_sums, moved)
    factor = torch.where(rows.weight > 0, rows.weight * (anchor.double() - moved).exp2(), 0.0).view(-1, tile)[r]
    S_at_w = torch.where(factor > 0, factor * partial, 0.0).sum(1) * w.exp()[c]
    total = w + 0.1 * w.flip(0)
    total = total * (30.0 / total.abs().amax()).clamp(max=1.0)
    want_v = v + (total / math.log(2.0)).repeat_interleave(tile)
    moved = torch.zeros(rows.tree.tiles, tile, dtype=torch.float64)
    moved.index_add_(0, r, partial.double() * total.exp()[c, None])
    moved = anchor + moved.flatten().log2()
    moved = torch.where(moved == -torch.inf, log2_sums, moved)
    if not math.isfinite(spoiled):
        moved, want_v = log2_sums, v
    want_u = torch.where((rows.weight > 0) | moved.isfinite(), u - moved, u)

    weight = rows.weight.to(device)
    rows.weight = weight
    of_pass = tuple(value.to(device) for value in (partial, anchor, log2_sums))
    starts, lists, u, v, w = (value.to(device) for value in (starts, lists, u, v, w))
    found_S = triton_updates.tile_matrix(rows, starts, of_pass)
    balances = Balances(starts, lists, w)
    found_u, found_v = corrected_by_kernels(rows, cols, balances, u, v, Pass(of_pass[2], of_pass[0], of_pass[1]))
    return {
        "S_at_w": ((balances.found[1].cpu() - S_at_w).abs() / S_at_w.abs().amax()).amax().item(),
        "S": ((found_S.cpu() - S).abs() / S.abs().amax()).amax().item(),
        "u": (found_u.cpu() - want_u).abs().amax().item(),
        "v": (found_v.cpu() - want_v).abs().amax().item(),
        "moved": (found_v.cpu() != v.cpu()).any().item(),
    }


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

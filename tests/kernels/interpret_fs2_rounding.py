"""Run under TRITON_INTERPRET=1: what coordinates lose in float32, and what kernels make up for, against float64 at the
points as given; and solves by kernels. One JSON line. `case` and `solved` serve GPUs too."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import asdict, replace

import torch
from interpret_fs2_sweep import exponents

from solvers.flash_sinkhorn2 import rounding, solve, solver
from solvers.flash_sinkhorn2.geometry import clouds as geometry
from solvers.flash_sinkhorn2.geometry import kd_tree
from solvers.flash_sinkhorn2.iterate import ScreenedPasses
from solvers.flash_sinkhorn2.sweep import triton_sweep
from solvers.flash_sinkhorn2.sweep.kernels import WIDEST

LOG2_E = math.log2(math.e)
CASES = [  # n, m, d, tile, extent in blurs, distance between the clouds in blurs, whether they fall apart in clusters
    (130, 157, 1, 32, 30.0, 3000.0, False),
    (100, 90, 2, 16, 10.0, 1000.0, False),
    (150, 120, 3, 32, 10.0, 0.0, False),
    (100, 90, 3, 32, 3000.0, 0.0, True),  # tiles that straddle a gap: float64 differences of float32 coordinates
]
SOLVES = [(1e-4, 3000.0), (1e-6, 3000.0)]  # tol, distance in blurs


def points_of(n, m, d, extent, distance, clustered=False):
    """[n, d], [m, d] float64, in blurs, and weights [n], [m]; y is a little wider than x."""
    generator = torch.Generator().manual_seed(n + m)
    x, y = (torch.rand(size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    y = 1.1 * y
    if clustered:
        x[: n // 3] *= 0.01
        y[m // 2 + 3 :] *= 0.01
    a, b = (torch.rand(size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    return extent * x, extent * y + distance, a, b


def clouds_of(points, weights, tile, device):
    """In float32, though from float64."""
    origin = sum(cloud.amax(0) + cloud.amin(0) for cloud in points) / 4
    found = []
    for cloud, weight in zip(points, weights, strict=True):
        tree = kd_tree(cloud.to(device), tile=tile)
        weight = weight.to(device)[tree.order] / weight.sum().item()
        inside = cloud.to(device)[tree.order] - origin.to(device)
        found.append(geometry.in_kd_order(tree, inside, weight, torch.float32))
    return found


def potentials(x, y, k):
    """Near a solution, rows exact."""
    u, v = torch.zeros_like(x.weight), torch.zeros_like(y.weight)
    for _ in range(20):
        v = -torch.logsumexp(exponents(y, x, v * 0.0, u, k) * math.log(2), 1) / math.log(2)
        u = -torch.logsumexp(exponents(x, y, u * 0.0, v, k) * math.log(2), 1) / math.log(2)
    return u, v


def case(n, m, d, tile, extent, distance, clustered, device="cpu"):
    """Sums over rows and columns: their error, by weight, and that of coordinates as rounded; and both bounds of it."""
    x, y, a, b = points_of(n, m, d, extent, distance, clustered)
    x, y = clouds_of((x, y), (a, b), tile, device)
    u, v = potentials(x, y, LOG2_E)
    passes = ScreenedPasses(x, y, LOG2_E)
    passes.refresh(u, v, 1e-6)
    mask = passes.mask
    kept = torch.zeros(x.tree.tiles, y.tree.tiles, dtype=torch.bool, device=x.weight.device)
    kept[mask.row_of_entries(), mask.cols.long()] = True
    scale = torch.full((1,), LOG2_E, dtype=torch.float64, device=x.weight.device)
    parts = torch.cat([triton_sweep.frame(c, p, scale).frame[-1] for c, p in ((x, u), (y, v))])
    found = {
        "parts": parts[parts <= WIDEST.value].max().item(),
        "wide": (parts > WIDEST.value).double().mean().item(),
        "of all pairs": rounding.of_all_pairs(x, y, LOG2_E),
        "of kept pairs": rounding.of_kept_pairs(passes, u, v),
    }
    for name, rows, cols, starts, lists, own, opposite, near in (
        ("rows", x, y, mask.row_starts, mask.cols, u, v, kept),
        ("cols", y, x, mask.col_starts, mask.rows, v, u, kept.T),
    ):
        p = exponents(rows, cols, own, opposite, LOG2_E).exp2()
        want = (p * near.repeat_interleave(tile, 0).repeat_interleave(tile, 1)).sum(1)
        for said, made in (("", rows.lost), (" as rounded", torch.zeros_like(rows.lost))):
            sides = replace(rows, lost=made), replace(cols, lost=cols.lost if made is rows.lost else cols.lost * 0.0)
            sums = triton_sweep.sweep_triton(*sides, starts, lists, own, opposite, LOG2_E, robust=False, partial=False)
            error = torch.where(rows.weight > 0, rows.weight * (sums[0].exp2() - want), 0.0)
            found[name + said] = error.abs().sum().item()
    return found


def solved(tol, distance, device="cpu"):
    """Residual as said, and as float64 has it at the points as given."""
    x, y, a, b = (tensor.to(device) for tensor in points_of(60, 50, 2, 6.0, distance))
    a, b = a / a.sum(), b / b.sum()
    found = solve(x, y, a, b, eps=1.0, tol=tol, tile=32)
    cost = (x[:, None] - y).square().sum(2)
    plan = a[:, None] * b * torch.exp(found.f[:, None] + found.g - cost)
    true = max((plan.sum(1) - a).abs().sum().item(), (plan.sum(0) - b).abs().sum().item())
    said = {name: value for name, value in asdict(found).items() if isinstance(value, (bool, float))}
    return said | {"true": true}


def by_kernels():
    """From now on clouds are float32 and swept by kernels, as on a GPU."""
    in_kd_order = geometry.in_kd_order
    geometry.in_kd_order = lambda *arguments: in_kd_order(*arguments[:-1], torch.float32)
    importlib.import_module("solvers.flash_sinkhorn2.sweep.sweep")._by_kernels = lambda cloud: True
    solver.SHARE = math.inf


if __name__ == "__main__":
    cases = {str(arguments): case(*arguments) for arguments in CASES}
    by_kernels()
    print(json.dumps(cases | {str(arguments): solved(*arguments) for arguments in SOLVES}))

"""Run under TRITON_INTERPRET=1: block-sparse passes against dense float64, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import torch

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.sweep import triton_sweep
from solvers.flash_sinkhorn2.sweep.kernels import WIDEST

CASES = [  # n, m, d, tile, extent in blurs, cost scale, whether clouds fall apart in clusters, share of tile pairs kept
    (63, 100, 1, 32, 20.0, 1.0, False, 1.0),
    (130, 157, 3, 32, 8.0, 0.7, False, 0.5),
    (65, 63, 2, 16, 1000.0, 1.0, False, 1.0),
    (1, 70, 3, 32, 3.0, 1.0, False, 1.0),
    (100, 90, 3, 32, 3000.0, 1.0, True, 1.0),  # tiles that straddle a gap: float64 differences
    (150, 100, 4, 64, 5.0, 2.0, False, 0.6),
    (65, 70, 6, 32, 10.0, 1.0, True, 0.8),
    (30, 20, 5, 8, 10.0, 1.0, False, 0.7),
    (7, 300, 2, 8, 10.0, 1.0, False, 1.0),  # lists of more than one item
]


def clouds(n, m, d, tile, extent, clustered, device):
    generator = torch.Generator().manual_seed(n + m)
    x, y = (torch.rand(size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    y = 0.8 * y.square() + 0.3
    if clustered:
        x[: n // 3] *= 0.01
        y[m // 2 + 3 :] *= 0.01
    a, b = (torch.rand(size, generator=generator, dtype=torch.float64) ** 8 + 1e-9 for size in (n, m))
    a[n // 2], b[m // 2] = (0.0, 0.0) if min(n, m) > 1 else (1.0, 0.0)
    x, y = (x * extent).float(), (y * extent).float()
    tiled = tiled_clouds(*(tensor.to(device) for tensor in (x, y, a, b)), tile=tile)
    return [replace(cloud, lost=torch.zeros_like(cloud.lost)) for cloud in tiled]  # points as float32 has them


def exponents(x, y, u, v, k):
    """t_ij by the definition."""
    return u[:, None] + v + y.log2_weight - k * (x.points[:, None] - y.points).square().sum(2)


def potentials(x, y, k):
    """Near a solution: three iterations, so that sums are of order one and potentials as large as they get."""
    u, v = torch.zeros_like(x.weight), torch.zeros_like(y.weight)
    for _ in range(3):
        u = -torch.logsumexp(exponents(x, y, u * 0.0, v, k) * math.log(2), 1) / math.log(2)
        v = -torch.logsumexp(exponents(y, x, v * 0.0, u, k) * math.log(2), 1) / math.log(2)
    return u, v


def kept_pairs(rows, cols, share):
    keep = torch.rand(rows.tree.tiles, cols.tree.tiles, generator=torch.Generator().manual_seed(3)) < share
    if share < 1.0:
        keep[0] = False  # a row tile with an empty list
    keep = keep.to(rows.weight.device)
    starts = torch.zeros(rows.tree.tiles + 1, dtype=torch.int64, device=keep.device)
    starts[1:] = keep.sum(1).cumsum(0)
    return starts, keep.nonzero()[:, 1].int(), keep


def case(n, m, d, tile, extent, scale, clustered, share, device="cpu"):
    x, y = clouds(n, m, d, tile, extent, clustered, device)
    k = scale * 1.4426950408889634
    u, v = potentials(x, y, k)
    generator = torch.Generator().manual_seed(5)
    scale_tensor = torch.full((1,), k, dtype=torch.float64, device=device)
    parts = [triton_sweep.frame(c, p, scale_tensor).frame[-1] for c, p in ((x, u), (y, v))]
    wide = [part > WIDEST.value for part in parts]
    errors = {
        "parts": sum(torch.where(w, 0.0, part).max().item() for w, part in zip(wide, parts, strict=True)),
        "wide": [w.double().mean().item() for w in wide],
    }
    for name, rows, cols, u_rows, v_cols in (("rows", x, y, u, v), ("cols", y, x, v, u)):
        starts, lists, keep = kept_pairs(rows, cols, share)
        pairs = keep.nonzero()[:, 0]
        p = exponents(rows, cols, u_rows, v_cols, k).exp2()
        p = p.view(rows.tree.tiles, tile, cols.tree.tiles, tile).transpose(1, 2)[keep]  # [K, T, T]
        values = torch.randn(cols.weight.shape[0], 5, generator=generator, dtype=torch.float64).to(device)
        want_values = p @ values.view(-1, tile, 5)[lists.long()]
        want, want_values = (
            torch.zeros(rows.tree.tiles, *part.shape[1:], dtype=torch.float64, device=device)
            .index_add(0, pairs, part)
            .flatten(0, 1)
            for part in (p.sum(2), want_values)
        )
        kept = (rows.weight > 0) & (want > 0)
        for robust in (False, True):
            shift = 1000.0 if robust else 0.0  # out of a plain pass's range
            arguments = (rows, cols, starts, lists, u_rows + shift, v_cols, k)
            log2_sums, partial, anchor = triton_sweep.sweep_triton(*arguments, robust=robust, partial=True)
            sums, same_anchor = triton_sweep.apply_triton(*arguments, values, robust=robust)
            assert torch.equal(anchor, same_anchor) and (robust or not anchor.any())
            assert (log2_sums[want == 0] == -torch.inf).all()
            there = kept if robust else kept & (want.log2().abs() < 90)
            factor = (anchor.double() - shift).exp2()
            pair_error = partial * factor.view(-1, tile)[pairs] - p.sum(2)
            pair_error = (pair_error / want.view(-1, tile)[pairs])[there.view(-1, tile)[pairs]]
            value_error = (sums * factor[:, None] - want_values)[there] / want[there, None]
            errors[f"{name} robust={robust}"] = {
                "rows": there.sum().item() / (rows.weight > 0).sum().item(),
                "sums": ((log2_sums - shift)[there].exp2() / want[there] - 1.0).abs().max().item(),
                "partial": pair_error.abs().max().item(),
                "values": value_error.abs().max().item(),
            }
    return errors


def poison():
    """From now on new tensors hold NaN: what is not written before it is read must show."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        found = empty(*arguments, **options)
        return found.fill_(math.nan) if found.is_floating_point() else found

    torch.empty = poisoned


if __name__ == "__main__":
    poison()
    print(json.dumps({str(arguments): case(*arguments) for arguments in CASES}))

"""Block-sparse passes on the CPU against dense float64."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.sweep import apply, sweep, tile_maxima
from solvers.flash_sinkhorn2.sweep.items import items_of

CASES = [  # n, m, d, tile, extent in blurs, share of tile pairs kept
    (63, 100, 1, 8, 20.0, 1.0),
    (301, 157, 3, 32, 6.0, 0.5),
    (130, 300, 2, 16, 1000.0, 1.0),
    (1, 70, 3, 4, 3.0, 1.0),
    (150, 140, 6, 1, 4.0, 0.6),
]


def problem(n, m, d, tile, extent, share, dtype):
    """Clouds with weights over decades and zero weights, kept tile pairs (none for the first row tile if share < 1),
    and potentials of a few iterations, so that sums are of order one."""
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64) * extent
    y = (0.3 + 0.8 * torch.rand(m, d, generator=generator, dtype=torch.float64).square()) * extent
    a, b = (torch.rand(size, generator=generator, dtype=torch.float64) ** 8 + 1e-9 for size in (n, m))
    if n > 1:
        a[n // 2], b[m // 2] = 0.0, 0.0
    x, y = tiled_clouds(x.to(dtype), y.to(dtype), a, b, tile=tile)
    keep = torch.rand(x.tree.tiles, y.tree.tiles, generator=generator) < share
    if share < 1.0:
        keep[0] = False
    k = 0.7 / math.log(2)
    u, v = torch.zeros_like(x.weight), torch.zeros_like(y.weight)
    for _ in range(3):
        u = u - torch.logsumexp(exponents(x, y, u, v, k) * math.log(2), 1) / math.log(2)
        v = v - torch.logsumexp(exponents(y, x, v, u, k) * math.log(2), 1) / math.log(2)
    return x, y, keep, u, v, k


def exponents(rows, cols, u, v, k):
    """t_ij by the definition."""
    return u[:, None] + v + cols.log2_weight - k * (rows.points[:, None] - cols.points).square().sum(2)


def lists(keep):
    starts = torch.zeros(keep.shape[0] + 1, dtype=torch.int64)
    starts[1:] = keep.sum(1).cumsum(0)
    return starts, keep.nonzero()[:, 1].int()


def dense(rows, cols, keep, u, v, k):
    """2^t_ij, 0 where the tile pair is not kept."""
    kept = keep.repeat_interleave(rows.tree.tile, 0).repeat_interleave(cols.tree.tile, 1)
    return torch.where(kept, exponents(rows, cols, u, v, k).exp2(), 0.0)


# Exponents are formed in float64 and rounded: half an ulp of 128, the largest that counts, in float32, and of float64
# exponents as large as k extent^2 = 4e6 and more before they cancel.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 128 * 2.0**-24), (torch.float64, 1e-8)])
@pytest.mark.parametrize("case", CASES)
def test_passes_agree_with_dense_float64(case, dtype, tolerance):
    x, y, keep, u, v, k = problem(*case, dtype)
    for rows, cols, kept, u_rows, v_cols in ((x, y, keep, u, v), (y, x, keep.T, v, u)):
        p = dense(rows, cols, kept, u_rows, v_cols, k)
        want = p.sum(1)
        by_tile = p.view(rows.weight.shape[0], cols.tree.tiles, cols.tree.tile).sum(2)
        by_tile = by_tile.view(rows.tree.tiles, rows.tree.tile, -1).transpose(1, 2)[kept]  # [K, T]
        starts, tiles = lists(kept)
        for robust in (False, True):
            shift = 500.0 if robust else 0.0  # out of a plain pass's range in float32
            found = sweep(rows, cols, starts, tiles, u_rows + shift, v_cols, k, robust=robust, partial=True)
            there = (want > 0) if robust else (want.log2().abs() < 90)
            assert there.double().mean() > 0.3
            got = (found.log2_sums - shift).exp2()
            assert ((got - want).abs() / want)[there].max() < tolerance
            assert (found.log2_sums[want == 0] == -math.inf).all()
            scale = (found.anchor.double() - shift).exp2().view(-1, rows.tree.tile)[kept.nonzero()[:, 0]]
            total = want.view(-1, rows.tree.tile)[kept.nonzero()[:, 0]]
            error = (found.partial * scale - by_tile).abs() / total
            assert error[there.view(-1, rows.tree.tile)[kept.nonzero()[:, 0]]].max() < tolerance + 2.0**-23
            assert found.partial.dtype == torch.float32 and found.partial.shape == by_tile.shape
        assert sweep(rows, cols, starts, tiles, u_rows, v_cols, k).partial is None


def test_plain_passes_overflow_where_robust_ones_do_not():
    x, y, keep, u, v, k = problem(*CASES[1], torch.float32)
    starts, tiles = lists(keep)
    plain = sweep(x, y, starts, tiles, u + 300.0, v, k).log2_sums
    robust = sweep(x, y, starts, tiles, u + 300.0, v, k, robust=True).log2_sums
    assert (plain[x.tree.tile : x.tree.n] == math.inf).all()
    assert (robust[x.tree.tile : x.tree.n].isfinite()).all()


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("case", CASES[:3])
def test_apply_agrees_with_dense_float64(case, robust):
    x, y, keep, u, v, k = problem(*case, torch.float64)
    starts, tiles = lists(keep)
    values = torch.randn(y.weight.shape[0], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = x.weight[:, None] * dense(x, y, keep, u, v, k)
    got = apply(x, y, starts, tiles, u, v, k, values, robust=robust)
    assert got.shape == (x.weight.shape[0], 3)
    assert (got - plan @ values).abs().max() < 1e-8 * plan.sum(1).max()
    assert (got[x.weight == 0] == 0).all()


@pytest.mark.parametrize("robust", [False, True])
def test_tile_maxima_are_those_of_rows_with_weight(robust):
    x, y, keep, u, v, k = problem(*CASES[1], torch.float32)
    starts, tiles = lists(keep)
    found = sweep(x, y, starts, tiles, u, v, k, robust=robust, partial=True)
    p = torch.where(x.weight[:, None] > 0, dense(x, y, keep, u, v, k), 0.0)
    by_tile = p.view(-1, y.tree.tiles, y.tree.tile).sum(2).view(x.tree.tiles, x.tree.tile, -1).amax(1)[keep]
    assert torch.allclose(tile_maxima(x, starts, found), by_tile, rtol=128 * 2.0**-24)
    with pytest.raises(ValueError, match="partial=True"):
        tile_maxima(x, starts, sweep(x, y, starts, tiles, u, v, k))


def test_items_cover_every_list_once():
    starts = torch.tensor([0, 0, 1, 600, 600, 1111, 1143])
    items = items_of(starts, 1143)
    seen = torch.zeros(1143)
    for item, tile in enumerate(items.tiles.tolist()):
        if tile < len(starts) - 1:
            first = starts[tile] + (item - items.starts[tile]) * items.pairs
            assert starts[tile] <= first < starts[tile + 1]
            seen[first : min(first + items.pairs, starts[tile + 1])] += 1
    assert (seen == 1).all()


def test_items_are_found_once_for_each_starts_and_not_kept_after_it():
    starts, as_long = torch.tensor([0, 40, 70]), torch.tensor([0, 10, 70])
    items, others = items_of(starts, 70), items_of(as_long, 70)
    assert items_of(starts, 70) is items and items_of(as_long, 70) is others
    assert items.starts.tolist() == [0, 2, 3] and others.starts.tolist() == [0, 1, 3]
    alive = weakref.ref(items)
    del starts, items
    gc.collect()
    assert alive() is None


def test_arguments_that_do_not_fit_are_named():
    x, y, keep, u, v, k = problem(*CASES[0], torch.float32)
    starts, tiles = lists(keep)
    coarse, _ = tiled_clouds(torch.rand(5, 1), torch.rand(5, 1), torch.ones(5), torch.ones(5), tile=4)
    flat, _ = tiled_clouds(torch.rand(5, 2), torch.rand(5, 2), torch.ones(5), torch.ones(5), tile=8)
    for message, arguments in (
        ("u is", (x, y, starts, tiles, u[1:], v, k)),
        ("v is", (x, y, starts, tiles, u, v.float(), k)),
        ("starts is", (x, y, starts[1:], tiles, u, v, k)),
        ("lists is", (x, y, starts, tiles.long(), u, v, k)),
        ("tiles of 8 but cols in tiles of 4", (x, coarse, starts, tiles, u, v, k)),
        ("dimension 1 but cols have 2", (x, flat, starts, tiles, u, v, k)),
    ):
        with pytest.raises(ValueError, match=message):
            sweep(*arguments)
    with pytest.raises(ValueError, match="values has shape"):
        apply(x, y, starts, tiles, u, v, k, v)

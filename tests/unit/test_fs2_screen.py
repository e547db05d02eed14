"""The screen of FlashSinkhorn2 against all pairs in float64: bounds are bounds, lists agree, little more is kept."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from solvers.flash_sinkhorn2.geometry import tiled_clouds, to_tiles
from solvers.flash_sinkhorn2.screen import screen, thin
from solvers.flash_sinkhorn2.screen.bounds import largest_exponents
from solvers.flash_sinkhorn2.screen.planes import Level, levels

LOG2_E = math.log2(math.e)
ROUNDING = 1e-9  # relative: exponents up to 1e5 here, in float64, as differences of numbers of that size


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cloud_points(kind, n, d, seed):
    g = generator(seed)
    x = torch.rand(n, d, generator=g, dtype=torch.float64)
    if kind == "clusters":
        centres = torch.rand(5, d, generator=g, dtype=torch.float64)
        x = centres[torch.randint(5, (n,), generator=g)] + 0.02 * (x - 0.5)
    elif kind == "duplicates":
        x = (8 * x).round() / 8
    elif kind == "collinear":
        direction = torch.randn(d, generator=g, dtype=torch.float64)
        x = 0.3 + x[:, :1] * direction / direction.norm()
    elif kind == "one point":
        x = x[:1].expand(n, d).clone()
    elif kind == "outlier":
        x[0] = 100.0
    return x


def weights(kind, n, seed):
    g = generator(seed)
    a = 10 ** (-12 * torch.rand(n, generator=g, dtype=torch.float64))
    if kind == "zeros":
        a[torch.rand(n, generator=g) < 0.4] = 0.0
        a[: n // 3] = 0.0
        a[-1] = 0.5
    return torch.ones_like(a) if kind == "uniform" else a


def squared_distances(x, y):
    """Float64 from the stored coordinates, direct differences."""
    points = [c.centre.repeat_interleave(c.tree.tile, 0) + c.local.double() for c in (x, y)]
    return sum((p[:, None] - q[None]).square() for p, q in zip(*(p.unbind(1) for p in points), strict=True))


def half_steps(x, y, k, squares, steps, seed):
    """Potentials of so many alternating updates from random ones: sums are near one, then nearer."""
    g = generator(seed)
    u = torch.zeros_like(x.weight)
    v = 3 * torch.randn(len(y.weight), generator=g, dtype=torch.float64)
    for _ in range(steps):
        u = -torch.logsumexp((v + y.log2_weight - k * squares) / LOG2_E, 1) * LOG2_E
        v = -torch.logsumexp((u[:, None] + x.log2_weight[:, None] - k * squares) / LOG2_E, 0) * LOG2_E
    return u, v


def kept_pairs(mask, tile):
    """[N, M] bool."""
    kept = torch.zeros(len(mask.row_bound), len(mask.col_bound), dtype=torch.bool)
    kept[mask.row_of_entries(), mask.cols.long()] = True
    return kept.repeat_interleave(tile, 0).repeat_interleave(tile, 1)


def check_lists(mask):
    rows, cols = mask.row_of_entries(), mask.cols
    assert mask.row_starts[0] == 0 and mask.row_starts[-1] == len(cols) == mask.col_starts[-1]
    for start, end in itertools.pairwise(mask.row_starts.tolist()):
        assert (cols[start:end].diff() > 0).all()
    in_column_order = torch.repeat_interleave(mask.col_starts.diff())
    assert torch.equal(rows[mask.to_columns].int(), mask.rows)
    assert torch.equal(cols[mask.to_columns].long(), in_column_order)
    for start, end in itertools.pairwise(mask.col_starts.tolist()):
        assert (mask.rows[start:end].diff() > 0).all()


def check_bounds(mask, x, y, exponents, budget):
    """What is left out of each row and column with weight is within the tile's bound, and that within the budget."""
    kept, tile = kept_pairs(mask, x.tree.tile), x.tree.tile
    omitted_rows = torch.where(kept, 0.0, (exponents + y.log2_weight).exp2()).sum(1)
    omitted_cols = torch.where(kept, 0.0, (exponents + x.log2_weight[:, None]).exp2()).sum(0)
    for cloud, omitted, bound in ((x, omitted_rows, mask.row_bound), (y, omitted_cols, mask.col_bound)):
        live = cloud.weight > 0
        assert (omitted <= bound.repeat_interleave(tile) * (1 + ROUNDING))[live].all()
        assert (bound <= budget * (1 + ROUNDING)).all()


KINDS = ["uniform", "clusters", "duplicates", "collinear", "one point", "outlier"]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize(("d", "kind"), list(itertools.product([1, 2, 3, 6], KINDS)))
def test_no_row_or_column_leaves_out_more_than_its_bound(d, kind, steps):
    n, m = 300, 401
    for seed, weight in enumerate(("uniform", "decades", "zeros")):
        x, y = tiled_clouds(
            cloud_points(kind, n, d, seed),
            cloud_points("uniform", m, d, seed + 10),
            weights(weight, n, seed),
            weights(weight, m, seed + 20),
            tile=8,
        )
        squares = squared_distances(x, y)
        for k, budget in ((20.0, 1e-2), (2000.0, 1e-4)):
            u, v = half_steps(x, y, k, squares, steps, seed)
            mask = screen(x, y, u, v, k, budget=budget, chunk=1000)
            check_lists(mask)
            check_bounds(mask, x, y, u[:, None] + v - k * squares, budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m", "tile"), [(1, 1, 32), (1, 2048, 32), (33, 5, 32), (2048, 64, 16), (100, 3, 1)])
def test_any_sizes(n, m, tile, dtype):
    """Trees of different depths: the shallower one waits at its tiles."""
    points = cloud_points("uniform", n, 2, 0).to(dtype), cloud_points("clusters", m, 2, 1).to(dtype)
    x, y = tiled_clouds(*points, weights("decades", n, 2), weights("zeros", m, 3), tile=tile)
    squares = squared_distances(x, y)
    u, v = half_steps(x, y, 500.0, squares, 2, 0)
    mask = screen(x, y, u, v, 500.0, budget=1e-3)
    check_lists(mask)
    check_bounds(mask, x, y, u[:, None] + v - 500.0 * squares, 1e-3)


def test_what_points_without_weight_hold_changes_nothing():
    x, y = tiled_clouds(
        *(cloud_points("uniform", 500, 3, s) for s in (0, 1)), *(weights("zeros", 500, s) for s in (2, 3)), tile=16
    )
    u, v = half_steps(x, y, 100.0, squared_distances(x, y), 2, 0)
    mask = screen(x, y, u, v, 100.0, budget=1e-3)
    u[x.weight == 0], v[y.weight == 0] = 1e30, math.nan
    x.local[x.weight == 0] = 1e6
    again = screen(x, y, u, v, 100.0, budget=1e-3)
    assert torch.equal(mask.cols, again.cols) and torch.equal(mask.row_starts, again.row_starts)
    assert torch.equal(mask.row_bound, again.row_bound) and torch.equal(mask.col_bound, again.col_bound)


@pytest.mark.parametrize("chunk", [1, 7, 10**6])
def test_chunks_change_nothing_but_the_order_of_sums(chunk):
    x, y = tiled_clouds(*(cloud_points("uniform", 300, 2, s) for s in (0, 1)), torch.ones(300), torch.ones(300), tile=8)
    u, v = half_steps(x, y, 300.0, squared_distances(x, y), 2, 0)
    mask, other = (screen(x, y, u, v, 300.0, budget=1e-3, chunk=size) for size in (chunk, 100))
    assert torch.equal(mask.cols, other.cols) and torch.equal(mask.row_starts, other.row_starts)
    torch.testing.assert_close(mask.row_bound, other.row_bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_bound_of_a_pair_of_boxes_is_attained(d):
    """Separable and concave: a fine grid of both boxes comes close to the bound and never above."""
    g = generator(d)
    count, k = 200, 3.0

    def side():
        centre, slope = (torch.randn(count, d, generator=g, dtype=torch.float64) for _ in range(2))
        half = torch.rand(count, d, generator=g, dtype=torch.float64)
        half[::7] = 0.0
        nothing = torch.zeros(count, dtype=torch.float64)
        return Level(centre, half, 10 * slope, nothing, nothing, torch.arange(count + 1))

    x, y = side(), side()
    y.slope[::3] = -x.slope[::3]  # level along (1, 1)
    pairs = torch.arange(count)
    bound = largest_exponents(x, y, pairs, pairs, k)
    steps = torch.linspace(-1, 1, 201, dtype=torch.float64)
    total = torch.zeros(count, dtype=torch.float64)
    for axis in range(d):
        s, t = (steps * level.half[:, axis, None] for level in (x, y))
        offset = (x.centre - y.centre)[:, axis, None, None]
        values = (x.slope[:, axis, None] * s)[:, :, None] + (y.slope[:, axis, None] * t)[:, None]
        values -= k * (offset + s[:, :, None] - t[:, None]).square()
        total += values.amax((1, 2))
    assert (total <= bound + 1e-12).all()
    # a grid of step h is within h^2 / 8 of a parabola of second derivative 2 k: h <= 0.01, so 1e-4 an axis
    assert (bound - total).max() <= 1e-4 * d


@pytest.mark.parametrize("kind", KINDS)
def test_planes_are_above_the_potential_and_touch_it(kind):
    x, _ = tiled_clouds(
        cloud_points(kind, 500, 3, 0), torch.rand(5, 3).double(), weights("zeros", 500, 1), torch.ones(5), tile=8
    )
    points = x.centre.repeat_interleave(8, 0) + x.local
    u = 50 * points.square().sum(1) + 30 * points[:, 0]
    live = x.weight > 0
    all_levels = levels(x, u)
    assert len(all_levels) == x.tree.depths + 1
    for depth, level in enumerate(all_levels):
        starts = torch.arange(x.tree.tiles + 1) if depth == x.tree.depths else x.tree.starts(depth)
        torch.testing.assert_close(level.mass.sum().item(), 1.0)
        for node, (start, end) in enumerate(itertools.pairwise((starts * 8).tolist())):
            inside = points[start:end][live[start:end]]
            above = (
                level.offset[node] + (inside - level.centre[node]) @ level.slope[node] - u[start:end][live[start:end]]
            )
            if len(inside):
                scale = 1e-12 * (1 + u.abs().max())
                assert above.abs().min() <= scale and above.min() >= -scale
                assert ((inside - level.centre[node]).abs() <= level.half[node] * (1 + 1e-12) + 1e-12).all()
            else:
                assert level.offset[node] == -math.inf and level.mass[node] == 0


def test_planes_of_a_linear_potential_are_that_potential():
    """The least squares are solved: the ridge takes about a hundredth of what the parent left."""
    x, _ = tiled_clouds(cloud_points("uniform", 2000, 3, 0), torch.rand(5, 3), torch.ones(2000), torch.ones(5), tile=8)
    points = x.centre.repeat_interleave(8, 0) + x.local
    slope = torch.tensor([3.0, -40.0, 500.0], dtype=torch.float64)
    first, *_, last = levels(x, points @ slope)
    # axes are uncorrelated, and of equal variance, to a tenth; so this is 1 / (1 + RIDGE) of the slope to a thousandth
    assert (first.slope[0] - slope / 1.01).abs().max() < 1e-3 * slope.norm()
    assert (last.slope - slope).abs().max() < 1e-6 * slope.norm()


def sums_by_tile_pair(x, y, exponents):
    """[tiles_x, tiles_y]: largest sum over the tile's columns of any row with weight; the mirror image."""
    tile, live_x, live_y = x.tree.tile, x.weight > 0, y.weight > 0
    rows = torch.where(live_x[:, None], (exponents + y.log2_weight).exp2(), 0.0)
    cols = torch.where(live_y, (exponents + x.log2_weight[:, None]).exp2(), 0.0)
    shape = x.tree.tiles, tile, y.tree.tiles, tile
    return rows.view(shape).sum(3).amax(1), cols.view(shape).sum(1).amax(2)


def needed(row_sums, col_sums, budget):
    """Tile pairs that must be kept, by the rule of the screen with exact sums, from all pairs."""
    out = torch.ones_like(row_sums, dtype=torch.bool)
    for sums, dim in ((row_sums, 1), (col_sums, 0)):
        ascending, order = sums.sort(dim)
        out &= torch.zeros_like(out).scatter(dim, order, ascending.cumsum(dim) <= budget)
    return int((~out).sum())


@pytest.mark.parametrize("d", [1, 2, 3])
def test_screened_then_thinned(d, capsys):
    """At blur = spacing: bounds hold after thinning with measured sums, and thinning gets to what is needed."""
    n, tile, budget = 1024, 16, 2.5e-3
    source = torch.rand(n, d, generator=generator(0), dtype=torch.float64)
    target = 0.5 + 0.15 * torch.randn(n, d, generator=generator(1), dtype=torch.float64)
    x, y = tiled_clouds(source, target, torch.ones(n), torch.ones(n), tile=tile)
    k = LOG2_E / (2 * n ** (-2 / d))
    squares = squared_distances(x, y)
    u, v = half_steps(x, y, k, squares, 30, 0)
    exponents = u[:, None] + v - k * squares
    mask = screen(x, y, u, v, k, budget=budget)
    row_sums, col_sums = sums_by_tile_pair(x, y, exponents)
    rows, cols = mask.row_of_entries(), mask.cols.long()
    thinned = thin(mask, row_sums[rows, cols], col_sums[rows, cols][mask.to_columns], budget=1.5 * budget)
    for m, allowed in ((mask, budget), (thinned, 1.5 * budget)):
        check_lists(m)
        check_bounds(m, x, y, exponents, allowed)
    least = needed(row_sums, col_sums, budget)
    with capsys.disabled():
        print(f"\nd={d}: kept {len(mask.cols)}, thinned {len(thinned.cols)}, needed {least} tile pairs")
    # the screen's box bounds cost at most a factor; half as much budget again, measured, wins most of it back
    assert least < len(mask.cols) <= 3 * least
    assert len(thinned.cols) <= 1.1 * least


def test_thinning_keeps_to_the_rest_of_the_budget():
    x, y = tiled_clouds(
        *(torch.rand(256, 2, generator=generator(s)).double() for s in (0, 1)), torch.ones(256), torch.ones(256), tile=8
    )
    squares = squared_distances(x, y)
    u, v = half_steps(x, y, 200.0, squares, 3, 0)
    mask = screen(x, y, u, v, 200.0, budget=1e-3)
    row_sums, col_sums = sums_by_tile_pair(x, y, u[:, None] + v - 200.0 * squares)
    rows, cols = mask.row_of_entries(), mask.cols.long()
    measured = row_sums[rows, cols], col_sums[rows, cols][mask.to_columns]
    assert torch.equal(thin(mask, *measured, budget=1e-9).cols, mask.cols)  # spent already
    assert len(thin(mask, *measured, budget=2.0).cols) < len(mask.cols)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_potentials_that_broke_down_are_refused(value):
    x, y = tiled_clouds(*(torch.rand(64, 2, generator=generator(s)) for s in (0, 1)), *[torch.ones(64)] * 2, tile=8)
    good, bad = torch.zeros_like(x.weight), torch.zeros_like(x.weight)
    bad[3] = value
    for name, potentials in (("u", (bad, good)), ("v", (good, bad))):
        with pytest.raises(ValueError, match=f"{name} is not finite"):
            screen(x, y, *potentials, 1000.0, budget=1e-3)


@pytest.mark.parametrize("values", [{"k": 0.0}, {"k": math.nan}, {"budget": 0.0}, {"budget": math.inf}])
def test_bad_inputs_are_named(values):
    x, y = tiled_clouds(*(torch.rand(9, 2) for _ in range(2)), torch.ones(9), torch.ones(9), tile=4)
    given = {"k": 1.0, "budget": 1e-3} | values
    with pytest.raises(ValueError, match=f"{next(iter(values))} is"):
        screen(x, y, torch.zeros(12).double(), torch.zeros(12).double(), given["k"], budget=given["budget"])


def test_original_order_and_tiles_agree():
    """Potentials given in the original order, through to_tiles, give the mask of the same problem permuted."""
    points, other = (torch.rand(200, 2, generator=generator(s)).double() for s in (0, 1))
    values = torch.rand(200, generator=generator(2)).double()
    shuffle = torch.randperm(200, generator=generator(3))
    masks = []
    for order in (torch.arange(200), shuffle):
        x, y = tiled_clouds(points[order], other, torch.ones(200), torch.ones(200), tile=8)
        masks.append(screen(x, y, to_tiles(x, values[order]), torch.zeros_like(y.weight), 50.0, budget=1e-3))
    assert torch.equal(masks[0].cols, masks[1].cols) and torch.equal(masks[0].row_starts, masks[1].row_starts)

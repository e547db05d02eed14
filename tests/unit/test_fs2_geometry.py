"""kd trees, tiles and nodes of FlashSinkhorn2: partitions, boxes, and what a cloud says of its points."""

from __future__ import annotations

import itertools

import pytest
import torch

from solvers.flash_sinkhorn2.geometry import from_tiles, kd_tree, node_clouds, node_variance, tiled_clouds, to_tiles


def random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def points_of(cloud):
    """[N, d] float64 about the common origin, from centres and local coordinates."""
    return cloud.centre.repeat_interleave(cloud.tree.tile, 0) + cloud.local.double()


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 64, 100, 1000, 2048])
def test_nodes_are_nested_and_tiles_full(n):
    tree = kd_tree(random(n, 2), tile=32)
    assert torch.equal(tree.order.sort().values, torch.arange(n))
    assert 2 ** (tree.depths - 1) <= tree.tiles < 2**tree.depths
    for depth in range(tree.depths):
        starts = tree.starts(depth)
        assert starts[0] == 0 and starts[-1] == tree.tiles and (starts.diff() >= 1).all()
        assert starts.diff().max() - starts.diff().min() <= 1
        tiles, real = tree.tiles_of_nodes(depth)
        assert torch.equal(tiles[real], torch.arange(tree.tiles))
        assert torch.equal(torch.arange(2**depth).repeat_interleave(real.sum(1)), tree.node_of_tiles(depth))
        if depth:
            assert torch.equal(starts[::2], tree.starts(depth - 1))
    with pytest.raises(ValueError, match="depth is"):
        tree.starts(tree.depths)


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_every_split_is_along_the_widest_axis_of_its_node(d):
    """Siblings do not overlap on the axis on which their parent's box is widest."""
    n, tile = 1000, 8
    x = random(n, d) * torch.linspace(1.0, 3.0, d, dtype=torch.float64)
    tree = kd_tree(x, tile=tile)
    sorted_points = x[tree.order]
    for depth in range(tree.depths - 1):
        bounds = (tree.starts(depth + 1) * tile).clamp_max(n).tolist()
        for left, middle, right in zip(bounds[::2], bounds[1::2], bounds[2::2], strict=False):
            node = sorted_points[left:right]
            axis = (node.amax(0) - node.amin(0)).argmax()
            assert sorted_points[left:middle, axis].max() <= sorted_points[middle:right, axis].min()


def test_an_outlier_costs_no_resolution():
    x = random(4096, 2)
    x[17] = 1e9
    cloud, _ = tiled_clouds(x, x, torch.ones(4096), torch.ones(4096), tile=32)
    edges = 2 * cloud.half_box
    # 128 tiles of the unit square have edges of about 1/11; one holds the outlier
    assert (edges.amax(1) < 0.25).sum() == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(100, 64), (1, 33), (64, 1000)])
def test_clouds_hold_their_points(n, m, dtype):
    x, y = random(n, 3).to(dtype) + 1000, random(m, 3, seed=1).to(dtype) * 5 + 1000
    a, b = random(n, seed=2), random(m, seed=3)
    a[::5], b[1::3] = 0.0, 0.0
    a[0] = 1e-9
    before = x.clone(), y.clone()
    clouds = tiled_clouds(x, y, a, b, tile=16)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])  # n a multiple of tile: no copy by padding
    origin = None
    for cloud, points, weight in zip(clouds, (x, y), (a, b), strict=True):
        size = points.shape[0]
        assert cloud.local.dtype == dtype and cloud.local.shape == (cloud.tree.tiles * 16, 3)
        given, live = points[cloud.tree.order].double(), weight[cloud.tree.order] > 0
        shift, exact_shift = (given - found[:size] for found in (points_of(cloud), cloud.points))
        origin = exact_shift[live][0] if origin is None else origin
        # two local coordinates, each up to 5, are rounded to half an ulp of dtype; points near 1e3 to float64
        torch.testing.assert_close(shift, origin.expand_as(shift), atol=8 * torch.finfo(dtype).eps, rtol=1e-13)
        # with what they lost, to that of half an ulp of float32
        exact_shift = exact_shift[live]
        torch.testing.assert_close(exact_shift, origin.expand_as(exact_shift), atol=5 * 2.0**-48, rtol=1e-15)
        assert cloud.weight.sum().item() == pytest.approx(1.0, rel=1e-12)
        torch.testing.assert_close(from_tiles(cloud, cloud.weight), weight / weight.sum())
        assert (cloud.weight[size:] == 0).all() and (cloud.local[size:] == cloud.local[size - 1]).all()
        assert torch.equal(cloud.log2_weight.isinf(), cloud.weight == 0)
        torch.testing.assert_close(cloud.mass, cloud.weight.view(-1, 16).sum(1))
        inside = (cloud.local.double().view(-1, 16, 3).abs() <= cloud.half_box[:, None]).all(2)
        assert inside[cloud.weight.view(-1, 16) > 0].all()
        values = random(size, 2, seed=4)
        assert torch.equal(from_tiles(cloud, to_tiles(cloud, values)), values)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_sparse_points_have_more_places(d):
    """A tenth of the cloud is spread twenty times as wide: its tiles, and no others, are of fewer points."""
    n, m, tile = 3001, 2900, 16
    x = random(n, d)
    x[::10] = 5.0 + 20.0 * x[::10]
    y, a, b = random(m, d, seed=1), random(n, seed=2), torch.ones(m)
    a[5::7] = 0.0
    width = 2.5 * (tile / (0.9 * n)) ** (1 / d)  # edges of a tile in the dense part; some are twice as long
    plain, _ = tiled_clouds(x, y, a, b, tile=tile)
    cloud, other = tiled_clouds(x, y, a, b, tile=tile, width=width)
    tree = cloud.tree
    assert tree.points == plain.tree.points == n and n < tree.n <= 1.5 * n
    assert other.tree.n == m and other.tree.own is None
    assert torch.equal(tree.order[tree.own], torch.arange(n))
    torch.testing.assert_close(from_tiles(cloud, cloud.weight), a / a.sum())
    assert cloud.weight.sum().item() == pytest.approx(1.0, rel=1e-12)
    assert cloud.weight.count_nonzero() == a.count_nonzero()
    assert (points_of(cloud)[: tree.n] - points_of(cloud)[tree.own[tree.order]]).abs().max() < 1e-5  # float32 of 20
    places = torch.bincount(tree.order, minlength=n)
    assert places[::10].double().mean() > 2 and (places[x[:, 0] < 1] == 1).double().mean() > 0.9
    values = random(n, 2, seed=4)
    assert torch.equal(from_tiles(cloud, to_tiles(cloud, values)), values)

    def spread(of):
        """Mean square, over the sparse points' weight, of the widest edge of their tile."""
        sparse = from_tiles(of, of.half_box.amax(1).repeat_interleave(tile))[::10]
        return (a[::10] * sparse**2).sum()

    assert spread(cloud) < 0.75 * spread(plain)  # two places a point: 2^(-2/3) in space, less in lower d


def test_tiles_all_as_wide_stay_as_they_are():
    """Twice the places would be too many; coincident points have no width at all."""
    x, ones = random(1024, 2), torch.ones(1024)
    for points in (x, torch.zeros_like(x)):
        cloud, _ = tiled_clouds(points, x, ones, ones, tile=16, width=1e-3)
        assert cloud.tree.n <= 1.5 * 1024 and cloud.tree.points == 1024
    assert cloud.tree.own is None


def test_boxes_ignore_points_without_weight():
    x = random(256, 2)
    a = (x[:, 0] < 0.5).double()
    cloud, _ = tiled_clouds(x, x, a, torch.ones(256), tile=32)
    live = (cloud.weight > 0).view(-1, 32)
    assert (cloud.half_box[cloud.mass == 0] == 0).all() and cloud.centre.isfinite().all()
    assert (live.any(1) & ~live.all(1)).any()
    local = cloud.local.view(-1, 32, 2)
    for tile in range(cloud.tree.tiles):
        if live[tile].any():
            edges = local[tile][live[tile]]
            torch.testing.assert_close(edges.amax(0), cloud.half_box[tile], atol=1e-12, rtol=0)
            torch.testing.assert_close(-edges.amin(0), cloud.half_box[tile], atol=1e-12, rtol=0)


def test_nodes_are_centroids_in_kd_order():
    n, tile, d = 1000, 8, 3
    x, a = random(n, d), random(n, seed=1)
    a[:300] = 0.0
    cloud, _ = tiled_clouds(x, x + 1, a, a, tile=tile)
    points = points_of(cloud)
    for depth in range(cloud.tree.depths):
        nodes = node_clouds(cloud, depth)
        bounds = (cloud.tree.starts(depth) * tile).tolist()
        found = points_of(nodes)[: 2**depth]
        for k, (start, end) in enumerate(itertools.pairwise(bounds)):
            mass = cloud.weight[start:end].sum()
            torch.testing.assert_close(nodes.weight[k], mass, atol=1e-15, rtol=1e-12)
            if mass > 0:
                torch.testing.assert_close(found[k], cloud.weight[start:end] @ points[start:end] / mass)
        assert found.isfinite().all() and torch.equal(nodes.tree.order, torch.arange(2**depth))
        if depth >= 3:  # log2(tile)
            torch.testing.assert_close(nodes.mass, node_clouds(cloud, depth - 3).weight[: 2 ** (depth - 3)])


def test_node_variance_is_that_of_points_about_their_centroid():
    n, tile, d = 500, 8, 2
    x, a = random(n, d) + 100, random(n, seed=1)
    a[:100] = 0.0
    cloud, _ = tiled_clouds(x, x, a, a, tile=tile)
    points, weight = points_of(cloud), cloud.weight
    found = [node_variance(cloud, depth) for depth in range(cloud.tree.depths)]
    for depth, variance in enumerate(found):
        bounds = (cloud.tree.starts(depth) * tile).tolist()
        expected = 0.0
        for start, end in itertools.pairwise(bounds):
            w, p = weight[start:end], points[start:end]
            if w.sum() > 0:
                expected += (w @ (p - w @ p / w.sum()).square().mean(1)).item()
        assert variance == pytest.approx(expected, rel=1e-9)
    assert (torch.tensor(found).diff() < 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.rand(5, 7)}, "x has dimension 7"),
        ({"x": torch.rand(5)}, "x has shape"),
        ({"y": torch.rand(5, 3)}, "x has dimension 2 but y has 3"),
        ({"y": torch.rand(5, 2).half()}, "y is torch.float16"),
        ({"a": torch.ones(4)}, "a has shape"),
        ({"b": -torch.ones(5)}, "b must have"),
        ({"a": torch.zeros(5)}, "a must have"),
        ({"tile": 24}, "tile is 24"),
    ],
)
def test_bad_inputs_are_named(change, message):
    given = {"x": torch.rand(5, 2), "y": torch.rand(5, 2), "a": torch.ones(5), "b": torch.ones(5), "tile": 8} | change
    tile = given.pop("tile")
    with pytest.raises(ValueError, match=message):
        tiled_clouds(*given.values(), tile=tile)

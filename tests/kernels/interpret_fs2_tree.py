"""Run under TRITON_INTERPRET=1: kd trees and clouds by kernels against torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from solvers.flash_sinkhorn2.geometry import nodes, roomy, triton_clouds, triton_nodes, triton_tree
from solvers.flash_sinkhorn2.geometry.clouds import TiledCloud, in_kd_order
from solvers.flash_sinkhorn2.geometry.tree import Tree, kd_tree

CASES = [  # n, d, tile, kind of cloud
    (1, 3, 32, "uniform"), (31, 2, 32, "uniform"), (299, 1, 8, "lattice"), (301, 2, 8, "far"), (37, 3, 1, "uniform"),
    (300, 3, 32, "repeated"), (411, 4, 64, "far"), (203, 5, 16, "lattice"), (128, 6, 32, "one point"),
    (401, 3, 32, "columns"), (200, 2, 16, "float64"),
]  # fmt: skip
SIZES = [(512, 1024), (64, 128)]  # of nodes that are counted, of programs: those in use, and so that both ways are gone


def cloud(n, d, kind):
    """Points [n, d], and places, or None."""
    g = torch.Generator().manual_seed(n)
    x = torch.rand(n, d, generator=g)
    if kind == "lattice":  # as many equal coordinates as can be, zeros of both signs among them
        x = (8 * x).floor() - 4
        x[::2] = torch.where(x[::2] == 0, -0.0, x[::2])
    if kind == "far":
        x[n // 2 :] = 1e4 + x[n // 2 :].square()
        x[7], x[11] = 1e20, -3e-20
    if kind == "one point":
        x[:] = x[0].clone()
    if kind == "columns":
        x = torch.rand(d + 1, 2 * n, generator=g).T[::2, 1:]
    if kind == "float64":
        x = x.double().square() - 1.0
    places = None
    if kind == "repeated":
        places = torch.repeat_interleave(torch.randint(1, 4, (n,), generator=g) ** 2 // 2 + 1)
    return x, places


def case(n, d, tile, kind, device="cpu"):
    """Whether trees, and the parts that tiles need, are those of the CPU; places a point that these make at first."""
    x, places = cloud(n, d, kind)
    want = kd_tree(x, tile=tile, places=places)
    places = torch.arange(n) if places is None else places
    found = {"sorted": not torch.equal(want.order, places)}
    for sizes in SIZES:
        tree = Tree(len(places), tile, places.to(device))
        before = triton_tree.SMALL, triton_tree.POINTS
        triton_tree.SMALL, triton_tree.POINTS = sizes
        triton_tree.sort_by_depths(tree, x.to(device))
        triton_tree.SMALL, triton_tree.POINTS = before
        found[str(sizes)] = torch.equal(tree.order.cpu(), want.order)
    tree, moved = Tree(want.n, tile, want.order.to(device)), x.to(device)
    edges = roomy.in_tiles(want, x[want.order])
    width = max((edges.amax(1) - edges.amin(1)).double().mean().item() / 3, 1e-3)
    parts, totals = triton_tree.parts(tree, moved, width, step=roomy.STEP, steps=roomy.STEPS)
    tried = zip(parts.cpu(), totals.tolist(), roomy._tried(want, x, width), strict=True)
    found["parts"] = all(torch.equal(one.long(), other) and a == b for one, a, (other, b) in tried)
    found["roomier"] = totals[0].item() / want.n
    found["clouds"] = [
        of_clouds(want, x[want.order].double(), dtype, device) for dtype in (torch.float32, torch.float64)
    ]
    return found


def of_clouds(tree, points, dtype, device):
    """Whether clouds are those of the CPU but for sums and logarithms, and the largest differences of these."""
    g = torch.Generator().manual_seed(tree.n)
    weight = torch.rand(tree.n, generator=g, dtype=torch.float64)
    weight[weight < 0.3], weight[tree.n // 2 : tree.n // 2 + 2 * tree.tile] = 0.0, 0.0  # tiles of none among them
    weight[0] = 0.5
    want = in_kd_order(tree, points, weight, dtype)
    arranged = triton_clouds.arranged(tree, points.to(device), weight.to(device), dtype)
    found = TiledCloud(tree, *(values.cpu() for values in arranged))
    same = ("centre", "local", "lost", "half_box", "weight")
    exact = all(torch.equal(getattr(found, name), getattr(want, name)) for name in same)
    close = [torch.equal(found.log2_weight.isinf(), want.weight == 0), (found.mass - want.mass).abs().max().item()]
    close.append((found.log2_weight - want.log2_weight).nan_to_num(0.0).abs().max().item())
    on_device = TiledCloud(replace(tree, order=tree.order.to(device)), *arranged)
    of_depths = [of_nodes(want, on_device, depth) for depth in range(tree.depths)]
    return [exact, *close, torch.stack(of_depths).max().item()]


def of_nodes(cloud, on_device, depth):
    """The largest difference of nodes' moments, of centroids over the extent."""
    centroid, mass, square = (values.cpu() for values in triton_nodes.moments(on_device, depth))
    points, masses = nodes._centroids(cloud, depth)
    _, squares = nodes._moments(cloud, depth)
    extent = cloud.points.abs().max()
    pairs = ((centroid, points, extent), (mass, masses, masses.sum()), (square, squares, masses.sum() * extent**2))
    return torch.stack([(one - other).abs().max() / scale for one, other, scale in pairs]).max()


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

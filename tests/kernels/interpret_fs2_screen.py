"""Run under TRITON_INTERPRET=1: the screen's kernels against torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import torch

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.iterate.passes import LOST, _moved
from solvers.flash_sinkhorn2.lists import triton_mirror
from solvers.flash_sinkhorn2.screen import mask, planes, triton_planes, triton_thin, triton_walk, walk
from solvers.flash_sinkhorn2.screen.screen import _costs

CASES = [(400, 250, 3, 16), (80, 50, 2, 4), (50, 400, 1, 8), (80, 70, 6, 8), (1, 40, 3, 8)]  # n, m, d, tile
CASES += [(16, 100, 2, 8, 1)]  # rows in tiles of their own, as points without weight are


def problem(n, m, d, tile, row_tile=None):
    """Clouds with weights over six decades, some zero, tiles of them included; k; rough potentials. With tiles of rows
    of another size in float64."""
    g = torch.Generator().manual_seed(n)
    x, y = torch.rand(n, d, generator=g), torch.rand(m, d, generator=g).square()
    a, b = (10 ** (-6 * torch.rand(size, generator=g, dtype=torch.float64)) for size in (n, m))
    b[y[:, 0] < 0.04] = 0.0
    b[-1] = 0.1
    of_x, of_y = tiled_clouds(x, y, a, b, tile=tile)
    if row_tile is not None:
        of_x, of_y = (tiled_clouds(x.double(), y.double(), a, b, tile=t)[i] for i, t in enumerate((row_tile, tile)))
    k = 1.4426950408889634 * max(n, m) ** (2 / d)
    u, v = (torch.rand(len(c.weight), generator=g, dtype=torch.float64) for c in (of_x, of_y))
    points = [c.centre.repeat_interleave(c.tree.tile, 0) + c.local.double() for c in (of_x, of_y)]
    return of_x, of_y, k, u + 0.3 * k * points[0].square().sum(1), v - 0.3 * k * points[1].square().sum(1)


def moved(value, device):
    """A record of tensors, records and numbers on that device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def of_planes(cloud, u, levels):
    """Largest differences, relative, to boxes and masses as torch has them, to least squares from the same prior, and
    to the height that points need."""
    tree, tile = cloud.tree, cloud.tree.tile
    by_torch, reference = planes.levels(cloud, u)[-len(levels) :], planes._Planes(cloud, u)
    points = cloud.centre.repeat_interleave(tile, 0) + cloud.local.double()
    worst = dict.fromkeys(("boxes", "slopes", "offsets"), 0.0)
    prior = None
    for index, (level, other) in enumerate(zip(levels, by_torch, strict=True)):
        nodes, depth = len(level.mass), tree.depths + 1 - len(levels) + index
        starts = torch.arange(tree.tiles + 1) if depth == tree.depths else tree.starts(depth)
        tiles = starts[:-1, None] + torch.arange(int(starts.diff().max()))
        real = tiles < starts[1:, None]
        tiles = tiles.clamp(max=tree.tiles - 1)
        if prior is None:
            prior = reference._slope(tiles, real, torch.zeros_like(level.slope))
        slope = reference._slope(tiles, real, prior)
        node = torch.repeat_interleave(starts.diff() * tile)
        height = torch.where(
            cloud.weight > 0, u - ((points - level.centre[node]) * level.slope[node]).sum(1), -torch.inf
        )
        offset = torch.full((nodes,), -torch.inf, dtype=u.dtype).scatter_reduce_(0, node, height, "amax")
        assert torch.equal(level.children, other.children) and torch.equal(offset.isfinite(), level.offset.isfinite())
        for name, found, want in (
            *(("boxes", getattr(level, name), getattr(other, name)) for name in ("centre", "half", "mass")),
            ("slopes", level.slope, slope),
            ("offsets", level.offset.nan_to_num(neginf=0.0), offset.nan_to_num(neginf=0.0)),
        ):
            worst[name] = max(worst[name], ((found - want).abs().max() / (want.abs().max() + 1)).item())
        if index < len(levels) - 1:
            prior = level.slope.repeat_interleave(level.children.diff(), 0)
    return worst


def case(n, m, d, tile, row_tile=None, device="cpu"):
    on_host = problem(n, m, d, tile, row_tile)
    x, y, k, u, v = (moved(value, device) for value in on_host)
    triton_planes.FIRST_DEPTH = 3  # so that small clouds have levels
    if device == "cpu":
        triton_mirror.GROUPS = 16  # the interpreter takes one after the other
    levels = triton_planes.levels(x, u), triton_planes.levels(y, v)
    pairs = triton_walk.walk(*levels, k, threshold=1e-3)
    kept = mask.mask_of(pairs.row_starts, pairs.cols, pairs.row_bound, pairs.col_bound)
    exact = _costs(moved(kept, "cpu"), pairs.exponent.cpu(), on_host[0].mass, on_host[1].mass)
    costs = triton_thin.bounded_costs(kept, pairs.exponent.clone(), x.mass, y.mass)
    budget = float(max(kept.row_bound.max(), kept.col_bound.max()) + costs[0].median() * 20)
    thinned = triton_thin.thin(kept, *costs, budget)
    moved_well = risen_well(kept, costs, device)
    levels, pairs, kept, thinned = (
        [[moved(level, "cpu") for level in side] for side in levels],
        *(moved(z, "cpu") for z in (pairs, kept, thinned)),
    )
    walked = walk.walk(*levels, k, threshold=1e-3, chunk=1000)
    by_torch = mask.thin(kept, *(cost.cpu() for cost in costs), budget)
    return {
        "planes": [of_planes(on_host[side], on_host[side + 3], levels[side]) for side in (0, 1)],
        "pairs": len(pairs.cols),
        "walked": torch.equal(walked.row_starts, pairs.row_starts) and torch.equal(walked.cols, pairs.cols),
        "exponents": [f(pairs.exponent - walked.exponent).item() for f in (torch.min, torch.max)],
        "bounds": max(relative(getattr(pairs, name), getattr(walked, name)) for name in ("row_bound", "col_bound")),
        "costs": all(rounded_up(cost.cpu(), other) for cost, other in zip(costs, exact, strict=True)),
        "moved": moved_well,
        "left_out": [len(kept.cols) - len(each.cols) for each in (thinned, by_torch)],
        "thinned": thinned_well(kept, thinned, [cost.cpu() for cost in costs], budget),
    }


def risen_well(kept, costs, device):
    """Whether costs after potentials rose are the least above those of torch; some rises are infinite."""
    generator, well = torch.Generator().manual_seed(0), True
    rises = [
        40 * torch.randn(len(b), generator=generator, dtype=torch.float64) for b in (kept.row_bound, kept.col_bound)
    ]
    rises[0][::7], rises[1][1::5], rises[1][::11] = -torch.inf, 2000.0, -3000.0
    for cost, starts, lists, (own, opposite) in (
        (costs[0], kept.row_starts, kept.cols, rises),
        (costs[1], kept.col_starts, kept.rows, rises[::-1]),
    ):
        exact = _moved(cost.cpu().double(), starts.cpu(), lists.cpu(), own, opposite)
        found = triton_thin.moved_costs(starts, lists, cost.clone(), own.to(device), opposite.to(device), LOST)
        well &= rounded_up(found.cpu(), exact)
    return well


def rounded_up(cost, exact):
    """Whether float32 costs are the least above float64 ones, but for the last bits of those; infinite if they must
    be."""
    infinity = torch.tensor(torch.inf)
    bounds = exact * (1 - 1e-15), exact * (1 + 1e-15)
    least, most = (torch.where(z.float() < z, z.float().nextafter(infinity), z.float()) for z in bounds)
    return bool(((least <= cost) & (cost <= most) | exact.isnan() & cost.isnan()).all())


def relative(found, want):
    return ((found - want).abs() / want.abs().clamp(min=1e-300)).max().item()


def thinned_well(kept, thinned, costs, budget):
    """Largest relative difference of the bounds to those with the costs of what is gone; whether lists agree and bounds
    stay within the budget."""
    rows, width = kept.row_of_entries(), len(kept.col_bound)
    own = thinned.row_of_entries() * width + thinned.cols
    in_rows = torch.empty_like(costs[1]).index_copy_(0, kept.to_columns.long(), costs[1])
    gone = ~torch.isin(rows * width + kept.cols, own)
    col_of = torch.repeat_interleave(thinned.col_starts.diff())
    agree = torch.equal((thinned.rows * width + col_of), own[thinned.to_columns])
    agree &= torch.equal(col_of, thinned.cols.long().sort().values)
    off = 0.0
    for bound, new, cost, tile in (
        (kept.row_bound, thinned.row_bound, costs[0], rows),
        (kept.col_bound, thinned.col_bound, in_rows, kept.cols.long()),
    ):
        off = max(off, relative(new, bound.index_add(0, tile[gone], cost[gone].double())))
        agree &= bool((new <= budget * (1 + 1e-12)).all())
    return [off, agree]


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

"""Run under TRITON_INTERPRET=1: what is left out after potentials moved against torch, one JSON line. `case` serves
GPUs too."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import torch

from solvers.flash_sinkhorn2.iterate.triton_omitted import omitted, tile_rise

CASES = [(1, 3, 32, 1.0, 0.0), (1500, 700, 8, 3.0, 0.0), (40, 33, 64, 0.1, 0.0)]
CASES += [(40, 33, 32, 0.1, math.inf), (40, 33, 32, 0.1, math.nan)]  # one potential is not finite


def case(rows, cols, tile, far, spoiled, device="cpu"):
    """Relative errors of rises and of the bound; tiles of each cloud, points a tile, and how far potentials move."""
    g = torch.Generator().manual_seed(rows)
    random = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    sides = []
    for tiles in (rows, cols):
        weight = random(tiles, tile) * (random(tiles, tile) < 0.7)
        weight[tiles // 3] = 0.0 if tiles > 1 else 1.0  # a tile without weight
        weight /= weight.sum()
        before, bound = 10 * random(tiles, tile), 1e-6 * random(tiles)
        now = before + far * random(tiles, tile)
        now[weight == 0] = torch.inf  # says nothing
        sides.append([weight, before, now, bound])
    sides[0][2][0, sides[0][0][0].argmax()] += spoiled
    clouds, rises, held, bounds = [], [], [], []
    for weight, before, now, bound in sides:
        risen = torch.where(weight > 0, now - before, -math.inf)
        rises.append(torch.where(risen.isnan(), math.inf, risen).amax(1))
        held.append(torch.where(weight.sum(1) > 0, weight.sum(1) * bound, 0.0))
        tree = SimpleNamespace(tile=tile, tiles=len(weight))
        clouds.append(SimpleNamespace(tree=tree, weight=weight.flatten().to(device), mass=weight.sum(1).to(device)))
    for own, opposite in ((0, 1), (1, 0)):
        bounds.append((held[own] * (rises[own] + rises[opposite].amax()).exp2()).sum())
    bounds.append(math.prod((h * r.exp2().square()).sum() for h, r in zip(held, rises, strict=True)).sqrt())
    want = torch.stack(bounds).nan_to_num(math.inf, math.inf).amin()

    found = [tile_rise(c, now.flatten().to(device), before.flatten().to(device))
             for c, (_, before, now, _) in zip(clouds, sides, strict=True)]  # fmt: skip
    least = omitted(*clouds, *(side[3].to(device) for side in sides), *found).cpu()
    return {
        "rises": all(torch.equal(got.cpu(), risen) for got, risen in zip(found, rises, strict=True)),
        "omitted": 0.0 if least == want else ((least - want).abs() / want).item(),
        "finite": math.isfinite(least),
    }


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

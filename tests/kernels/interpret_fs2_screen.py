"""Run under TRITON_INTERPRET=1: the kernel of the screen's bounds against torch, one JSON line."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn2.screen import bounds, triton_bounds
from solvers.flash_sinkhorn2.screen.planes import Level


def side(nodes, d, seed):
    g = torch.Generator().manual_seed(seed)
    centre, slope, half = (torch.randn(nodes, d, generator=g, dtype=torch.float64) for _ in range(3))
    offset = torch.randn(nodes, generator=g, dtype=torch.float64)
    half[::5], offset[::7] = 0.0, -torch.inf
    return Level(10 * centre, half.abs(), 100 * slope, offset, offset, torch.arange(nodes + 1))


def run(pairs, d):
    x, y = side(40, d, 0), side(70, d, 1)
    y.slope[::3] = -x.slope[0]
    g = torch.Generator().manual_seed(2)
    i, j = (torch.randint(nodes, (pairs,), generator=g) for nodes in (40, 70))
    k = 3.0000001  # not a float32
    want, got = (module.largest_exponents(x, y, i, j, k) for module in (bounds, triton_bounds))
    some = want.isfinite()
    size = (k * (x.centre[i] - y.centre[j]).square()).sum(1)[some] + 1.0
    return {
        "pairs": len(got),
        "infinite": torch.equal(got.isfinite(), some),
        "error": ((got - want)[some].abs() / size).amax().item() if some.any() else 0.0,
    }


if __name__ == "__main__":
    print(json.dumps({f"{pairs} pairs, d = {d}": run(pairs, d) for pairs in (0, 1, 1000) for d in (1, 3, 6)}))

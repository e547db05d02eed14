"""Run under TRITON_INTERPRET=1: mixing by kernels against mixing by torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
import math

import torch

from solvers.flash_sinkhorn2.iterate.anderson import Anderson, History
from solvers.flash_sinkhorn2.iterate.triton_history import TritonHistory

CASES = [(5, 2), (1000, 5), (3001, 3), (2100, 1), (1024, 8)]  # points, memory
STEPS = 12


def case(n, memory, device="cpu"):
    """Largest difference of any mixed potential, over that step; of a contraction with constants that drift, a new
    memory on the way, and images that are not finite at the end."""
    generator = torch.Generator().manual_seed(n)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    weight = random(n).square()
    weight[::7] = 0.0
    weight /= weight.sum()
    rates, offset = torch.rand(n, generator=generator, dtype=torch.float64) * 0.98, random(n)
    by_torch, by_kernels = Anderson(weight, memory=memory), Anderson(weight.to(device), memory=memory)
    by_torch._history = History(weight, memory)
    by_kernels._history = TritonHistory(weight.to(device), memory)
    at, apart, moved = 10 * random(n), 0.0, 0.0
    for step in range(STEPS):
        image = rates * at + offset + 0.1
        if step == 7:
            by_torch.reject()
            by_kernels.reject()
        want = by_torch.next(at, image)
        found = by_kernels.next(at.to(device), image.to(device)).cpu()
        apart = max(apart, ((found - want).abs().amax() / (image - at).abs().amax()).item())
        moved = max(moved, ((want - image).abs().amax() / (image - at).abs().amax()).item())
        at = want
    image[n // 2] = math.nan
    last = by_torch.next(at, image), by_kernels.next(at.to(device), image.to(device)).cpu()
    same = all(torch.equal(mixed.nan_to_num(7.0), image.nan_to_num(7.0)) for mixed in last)
    return {"apart": apart, "moved": moved, "not_finite_is_not_mixed": same}


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

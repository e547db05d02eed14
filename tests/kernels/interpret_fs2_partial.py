"""Run under TRITON_INTERPRET=1: kernels over partial sums against torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn2.sweep.triton_partial import reduced

CASES = [(1, 1, 32), (23, 40, 8), (17, 90, 32), (9, 7, 64)]  # row tiles, column tiles, points a tile


def case(rows, cols, tile, device="cpu"):
    generator = torch.Generator().manual_seed(rows)
    kept = (torch.rand(rows, cols, generator=generator) < 0.6) | (rows == 1)
    if rows > 1:
        kept[3] = False  # an empty list
    r = kept.nonzero()[:, 0]
    starts = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    partial = torch.rand(len(r), tile, generator=generator)
    factor = torch.rand(rows, tile, generator=generator, dtype=torch.float64)
    factor[rows // 2, ::3] = 0.0
    partial[(r == rows // 2).nonzero()[:, 0], 0] = torch.inf  # of a row without weight
    weighted = torch.where(factor[r] > 0, partial.double() * factor[r], 0.0)
    partial, starts, factor = (value.to(device) for value in (partial, starts, factor.flatten()))
    found = (
        (reduced(partial, starts, factor), weighted.sum(1)),
        (reduced(partial, starts, factor, maximum=True), weighted.amax(1)),
    )
    up = found[1][1].float()
    up = torch.where(up < found[1][1], up.nextafter(torch.tensor(torch.inf)), up)
    found = found[0], (found[1][0], up)
    # inf where inf is due
    return [torch.where(got.cpu() == want, 0.0, (got.cpu() - want).abs()).max().item() for got, want in found]


if __name__ == "__main__":
    print(json.dumps({str(c): case(*c) for c in CASES}))

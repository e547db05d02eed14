"""Run under TRITON_INTERPRET=1: the survey kernel against torch, one JSON line."""

from __future__ import annotations

import json
import math

import torch

from solvers.flash_sinkhorn.inputs.survey import _summarise
from solvers.flash_sinkhorn.inputs.triton_survey import summarise

CASES = [(1, 1), (63, 3), (1000, 70), (33, 130)]  # n, d; more points than one program's block, more coordinates


def run(n, d, dtype):
    generator = torch.Generator().manual_seed(n)
    points = torch.randn(d, n, generator=generator, dtype=dtype).T  # strided
    weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    if n > 1:
        weight[n // 2], points[n // 2] = 0.0, 1e6  # no weight: must not stretch the range
    wrong_points, wrong_weight = points.clone(), weight.clone()
    wrong_points[0, -1], wrong_points[-1, 0], wrong_weight[-1] = math.nan, -math.inf, math.inf
    other = torch.rand(2, 40, d, generator=generator, dtype=dtype)  # the opposite clouds of a batch of two
    beside = torch.rand(2, 40, generator=generator, dtype=torch.float64)
    pair, weights = torch.stack([points, wrong_points]), torch.stack([weight, wrong_weight])
    numbers, sums = summarise(pair, weights, other, beside)
    (got, wrong), got_sum = numbers[:, 0], sums[0, 0]
    want_other = [_summarise(*each)[0] for each in zip(other, beside, strict=True)]
    want, want_sum = _summarise(points, weight)
    some = slice(n // 2 + 1)
    ((_, fewer),), _ = summarise(points[None], weight[None], points[None, some], weight[None, some])
    want_fewer, _ = _summarise(points[some], weight[some])
    expected = (~torch.isfinite(wrong_points)).sum()
    return {
        "summary": ((got - want).abs() / want.abs().clamp(min=1.0)).max().item(),
        "other": (numbers[:, 1] - torch.stack(want_other)).abs().max().item(),
        "fewer": ((fewer - want_fewer).abs() / want_fewer.abs().clamp(min=1.0)).max().item(),
        "sum": ((got_sum - want_sum).abs() / points.double().abs().T.mv(weight)).max().item(),
        "counts": wrong[:2].tolist() == [expected.item(), 1.0],
    }


if __name__ == "__main__":
    print(
        json.dumps({f"{n}x{d} {dtype}": run(n, d, dtype) for n, d in CASES for dtype in (torch.float32, torch.float64)})
    )

"""Run under TRITON_INTERPRET=1: a cloud swept against itself, one potential on both sides, one JSON line."""

from __future__ import annotations

import json
import math

import torch

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.iteration.loop import Limits
from solvers.flash_sinkhorn.iteration.self_transport import _SelfLoop
from solvers.flash_sinkhorn.sweeps.tiles import LOG2_E, Precision
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

CASES = [  # n, d, precision, eps, damping
    (45, 1, Precision.EXACT, 0.1, 1.0),
    (45, 3, Precision.EXACT, 0.05, 1.0),
    (45, 3, Precision.EXACT, 1e-4, 1.0),  # sums leave the plain loop's range at first
    (70, 40, Precision.EXACT, 1.0, 1.0),
    (45, 130, Precision.EXACT, 1.0, 1.0),
    (101, 5, Precision.EXACT, 0.1, 0.7),
    (63, 1, Precision.FAST, 0.01, 1.0),
    (129, 3, Precision.FAST, 0.05, 1.0),
    (101, 5, Precision.MIXED, 0.1, 0.7),
]


def run(n, d, precision, eps, damping):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=generator) + 3.0
    a = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    a[5] = 0.0
    a /= a.sum()
    inputs = checked_inputs(x, x, a, a, eps=eps, cost_scale=1.0, balanced=damping == 1.0)
    sweeps = TritonSweeps(inputs, cost_scale=1.0, precision=precision)
    for tensor in (sweeps.x.partial, sweeps.x.used):  # what is not written before it is read must show
        tensor.fill_(math.nan)
    loop = _SelfLoop(sweeps, eps, damping, 1.0)
    loop.iterate(1e-30, Limits(14, None))
    f = sweeps.x.used[:n] * eps / LOG2_E
    cost = ((x.double()[:, None] - x.double()[None]) ** 2).sum(-1)
    full = -damping * eps * torch.logsumexp((f[None] - cost) / eps + a.log()[None], 1)
    truth = (a * torch.expm1((f - full) / eps).abs())[a > 0].sum().item()
    return {"residual": loop.residual, "truth": truth, "cost_over_eps": (cost.max() / eps).item()}


if __name__ == "__main__":
    print(json.dumps({"-".join(map(str, case)): run(*case) for case in CASES}))

"""Run under TRITON_INTERPRET=1: Anderson's history in Triton against the one in torch, one JSON line."""

from __future__ import annotations

import json

import numpy as np
import torch

from solvers.flash_sinkhorn.checks import checked_inputs
from solvers.flash_sinkhorn.mixing import MEMORY, TorchHistory
from solvers.flash_sinkhorn.tiles import Precision
from solvers.flash_sinkhorn.triton_mixing import TritonHistory
from solvers.flash_sinkhorn.triton_sweeps import TritonSweeps

CASES = [(700, 300, (1.0, 1.0)), (63, 1100, (0.8, 0.95)), (5, 7, (1.0, 0.5))]  # n, m, damping


def run(n, m, damping):
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.rand(size, 2, generator=generator) for size in (n, m))
    a, b = (torch.rand(size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    b[m // 2] = 0.0
    inputs = checked_inputs(x, y, a, b, eps=0.05, cost_scale=1.0, balanced=False)
    sweeps = TritonSweeps(inputs, cost_scale=1.0, precision=Precision.EXACT)
    sweeps.set_epsilon(0.05, 1.0)
    sweeps.x.damping, sweeps.y.damping = damping
    histories = [TritonHistory(sweeps), TorchHistory(sweeps)]
    worst = dict.fromkeys(("numbers", "potential", "row_bias", "col_bias", "statistics"), 0.0)
    rng = np.random.default_rng(n)
    for k in range(MEMORY + 3):
        sweeps.half_step(sweeps.x, sweeps.y)
        sweeps.half_step(sweeps.y, sweeps.x)
        slot = None if k == 0 else (k - 1) % MEMORY
        used = slice(3) if slot is None else slice(None)
        numbers = [history.record(slot)[used].clone() for history in histories]
        worst["numbers"] = max(worst["numbers"], error(*numbers))
        before = sweeps.y.potential.clone(), sweeps.y.statistics.clone()
        coefficients = np.where(np.arange(MEMORY) < k, rng.normal(size=MEMORY), 0.0).tolist()
        found = []
        for history in histories:
            sweeps.take_potential(sweeps.y, before[0])
            sweeps.y.statistics.copy_(before[1])
            history.mix(coefficients)
            mass = sweeps.y.weight > 0
            found.append([sweeps.y.potential[mass].clone(), sweeps.y.row_bias[mass].clone(),
                          sweeps.y.col_bias[mass].clone(), sweeps.y.statistics.clone()])  # fmt: skip
        for name, got, want in zip(list(worst)[1:], *found, strict=True):
            worst[name] = max(worst[name], error(got, want))
    return worst


def error(got, want):
    return ((got - want).abs() / want.abs().clamp(min=1e-3)).max().item()


if __name__ == "__main__":
    print(json.dumps({str(case): run(*case) for case in CASES}))

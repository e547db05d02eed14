"""Run under TRITON_INTERPRET=1: Anderson mixing in Triton against that in torch, one JSON line."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.iteration.acceleration import TorchAnderson
from solvers.flash_sinkhorn.iteration.mixing import MEMORY
from solvers.flash_sinkhorn.iteration.triton_mixing import COUNT, EXTRAPOLATED, REGULARISATION, TritonAnderson
from solvers.flash_sinkhorn.sweeps.tiles import Precision, Tile
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

FEW_PROGRAMS = Tile(256, 256, 1, 1, 1, 1)  # sweeps are not what is looked at here
CASES = [(700, 300, (1.0, 1.0)), (63, 1100, (0.8, 0.95)), (5, 7, (1.0, 0.5))]  # n, m, damping
ABSURD = 8  # the iteration whose next g is spoilt, so that it must be rejected


def run(n, m, damping):
    """Both mixers take in the same pairs; the loop goes on from what torch's says."""
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.rand(size, 2, generator=generator) for size in (n, m))
    a, b = (torch.rand(size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    b[m // 2] = 0.0
    inputs = checked_inputs(x, y, a, b, eps=0.05, cost_scale=1.0, balanced=False)
    sweeps = TritonSweeps(inputs, cost_scale=1.0, precision=Precision.EXACT, tile=FEW_PROGRAMS)
    sweeps.set_epsilon(0.05, 1.0)
    sweeps.x.damping, sweeps.y.damping = damping
    theirs, ours = (kind(sweeps, mass=inputs.mass_y) for kind in (TorchAnderson, TritonAnderson))
    worst = dict.fromkeys(("numbers", "potential", "row_bias", "col_bias", "statistics", "state"), 0.0)
    rejected = []
    last = ABSURD + MEMORY + 1
    for k in range(last + 1):
        sweeps.half_step(sweeps.x, sweeps.y)
        sweeps.half_step(sweeps.y, sweeps.x)
        for mixer in (ours, theirs):
            mixer.record()
        used = slice(3) if theirs.count < 1 else slice(4 + min(theirs.count, MEMORY))
        worst["numbers"] = max(worst["numbers"], error(ours.numbers[used], theirs.numbers[used]))
        before = sweeps.y.potential.clone(), sweeps.y.statistics.clone()
        found = []
        for mixer in (ours, theirs):
            sweeps.take_potential(sweeps.y, before[0])
            sweeps.y.statistics.copy_(before[1])
            mixer.extrapolate(plain=k == last)
            mass = sweeps.y.weight > 0
            found.append([sweeps.y.potential[mass].clone(), sweeps.y.row_bias[mass].clone(),
                          sweeps.y.col_bias[mass].clone(), sweeps.y.statistics.clone()])  # fmt: skip
        kept = torch.stack([ours.state[at.value] for at in (COUNT, EXTRAPOLATED, REGULARISATION)])
        want = torch.tensor([theirs.count, theirs.extrapolated, theirs.regularisation], dtype=torch.float64)
        for name, got, expected in zip(list(worst)[1:], (*found[0], kept), (*found[1], want), strict=True):
            worst[name] = max(worst[name], error(got, expected))
        rejected += [k] if theirs.count < 0 else []
        if k == ABSURD:
            sweeps.take_potential(
                sweeps.y, sweeps.y.potential + 40 * torch.rand(sweeps.y.n_padded, generator=generator)
            )
    return {"worst": worst, "rejected": ABSURD + 1 in rejected}


def error(got, want):
    return ((got - want).abs() / want.abs().clamp(min=1e-3)).max().item()


if __name__ == "__main__":
    print(json.dumps({str(case): run(*case) for case in CASES}))

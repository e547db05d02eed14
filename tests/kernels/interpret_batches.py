"""Run under TRITON_INTERPRET=1: batches in Triton against one problem after another, one JSON line."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from solvers.flash_sinkhorn.inputs.batches import checked_batch, problem
from solvers.flash_sinkhorn.iteration import batch_loop
from solvers.flash_sinkhorn.iteration.batches import iterate_pairs, iterate_selves
from solvers.flash_sinkhorn.iteration.loop import Method, Updates
from solvers.flash_sinkhorn.iteration.triton_mixing import COUNT, TritonAnderson
from solvers.flash_sinkhorn.sweeps.tiles import Precision, Tile
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

TILE = Tile(128, 128, 64, 4, 2, 1)
CASES = [  # n, m, d, precision, damping of either side
    (63, 300, 3, Precision.EXACT, (1.0, 1.0)),
    (65, 40, 6, Precision.EXACT, (0.8, 0.95)),
    (65, 40, 4, Precision.FAST, (1.0, 0.7)),
]
ABSURD = 1  # the iteration whose next g is spoilt in one problem, so that it must be rejected there


def clouds(n, m, d, count=3):
    """The second problem leaves the plain loop's range at first, and is elsewhere."""
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.randn(count, size, d, generator=generator) for size in (n, m))
    x[1], y[1] = 6.0 * x[1] + 7.0, y[1] + 7.0
    a, b = (torch.rand(count, size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    a[0, 5] = b[1, 3] = 0.0
    return x, y, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)


def half_steps(n, m, d, precision, damping):
    """How far a batch's sweeps and mixing are from those of each problem alone; whether the absurd step was seen."""
    batch = checked_batch(*clouds(n, m, d, count=2), eps=0.3, cost_scale=1.0)
    together = mixed(problem(batch.units[0], *batch.tensors), precision, damping, batch.b.sum(1))
    alone = [
        mixed(problem(batch.units[0], *own), precision, damping, own[3].sum().item())
        for own in zip(*batch.tensors, strict=True)
    ]
    worst, rejected = 0.0, False
    for k in range(ABSURD + 2):
        plain = np.array([k == ABSURD + 1, False])
        for (sweeps, mixer), unmixed in zip((together, *alone), (plain, *plain), strict=True):
            sweeps.half_step(sweeps.x, sweeps.y)
            sweeps.half_step(sweeps.y, sweeps.x)
            mixer.record()
            mixer.extrapolate(plain=unmixed)
        for row, (sweeps, mixer) in enumerate(alone):
            for name in ("potential", "used", "row_bias", "col_bias", "statistics", "hi", "lo"):
                for mine, theirs in ((together[0].x, sweeps.x), (together[0].y, sweeps.y)):
                    worst = max(worst, difference(getattr(mine, name)[row], getattr(theirs, name)))
            for name in ("state", "numbers", "images"):
                worst = max(worst, difference(getattr(together[1], name)[row], getattr(mixer, name)))
        if k == ABSURD:
            spoilt = alone[1][0].y
            spoilt.row_bias += 400.0 * torch.rand(spoilt.n_padded, generator=torch.Generator().manual_seed(0))
            together[0].y.row_bias[1] = spoilt.row_bias
            spoilt.col_bias.copy_(spoilt.row_bias + spoilt.log2_weight)
            together[0].y.col_bias[1] = spoilt.col_bias
        counts = together[1].state[:, COUNT.value].tolist()
        rejected |= counts[1] == -1.0 != counts[0]
    return {"worst": worst, "rejected": rejected}


def mixed(inputs, precision, damping, mass):
    sweeps = TritonSweeps(inputs, cost_scale=1.0, precision=precision, tile=TILE)
    for cloud in (sweeps.x, sweeps.y):
        for tensor in (cloud.partial, cloud.used):  # what is not written before it is read must show
            tensor.fill_(torch.nan)
    sweeps.set_epsilon(0.3, 1.0)
    sweeps.x.damping, sweeps.y.damping = damping
    return sweeps, TritonAnderson(sweeps, mass=mass)


def difference(got, want):
    equal = (got == want) | (got.isnan() & want.isnan())
    return 0.0 if bool(equal.all()) else (got.double() - want.double()).abs().nan_to_num(torch.inf).max().item()


def solve(n, m, d, precision):
    """Residuals that a batch reports, and those of its potentials in float64, of pairs and of self problems."""
    batch_loop.sweeps_of = lambda inputs, **options: TritonSweeps(inputs, **options, tile=TILE)
    batch_loop.anderson = TritonAnderson
    x, y, a, b = clouds(n, m, d)
    eps, tol = 0.3 * d, np.array([1e-2, 3e-6, 1e-3])
    batch = checked_batch(x, y, a, b, eps=eps, cost_scale=1.0)
    method = Method(1.0, None, None, Updates.ALTERNATING, acceleration=True)
    loop = iterate_pairs(problem(batch.units[0], *batch.tensors), method, precision, eps, tol, 300)
    f, g = loop.potentials()
    cost = (x.double()[:, :, None] - y.double()[:, None]).square().sum(-1)
    plan = a[:, :, None] * b[:, None] * torch.exp((f[:, :, None] + g[:, None] - cost) / eps)
    truth = torch.maximum((plan.sum(2) - a).abs().sum(1), (plan.sum(1) - b).abs().sum(1))
    alone = problem(batch.units[0], batch.x, batch.x, batch.a, batch.a, batch.centre)
    rounds = Precision.EXACT if precision is Precision.EXACT else Precision.FAST  # as losses have it
    own = iterate_selves(alone, method, rounds, eps, tol, 200)
    f, _ = own.potentials()
    cost = (x.double()[:, :, None] - x.double()[:, None]).square().sum(-1)
    log_sums = torch.logsumexp((f[:, :, None] + f[:, None] - cost) / eps + batch.a.log()[:, None], 2)
    truth_alone = (batch.a * torch.expm1(log_sums).abs()).nan_to_num().sum(1)
    return {
        "residual": loop.residual.tolist(), "truth": truth.tolist(), "tol": tol.tolist(),
        "converged": loop.converged.tolist(), "made_exact": loop.made_exact.tolist(),
        "residual_alone": own.residual.tolist(), "truth_alone": truth_alone.tolist(),
        "converged_alone": own.converged.tolist(),
    }  # fmt: skip


if __name__ == "__main__":
    found = {"-".join(map(str, case)): half_steps(*case) for case in CASES}
    json.dump({"half_steps": found, "solved": solve(40, 30, 3, Precision.FAST)}, sys.stdout)

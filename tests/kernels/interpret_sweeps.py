"""Run under TRITON_INTERPRET=1: errors of a few half-steps against plain float64, one JSON line."""

from __future__ import annotations

import json
import math

import torch

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.sweeps.tiles import LOG2_E, Precision
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

CASES = [  # n, m, d, precision, eps, common offset, and the damping of either side where marginals are relaxed
    (63, 100, 1, Precision.EXACT, 0.1, 1e4),
    (65, 63, 5, Precision.EXACT, 0.1, 3.0),
    (129, 70, 40, Precision.EXACT, 0.1, 0.0),
    (129, 70, 40, Precision.MIXED, 0.1, 0.0),
    (129, 70, 40, Precision.FAST, 0.1, 0.0),
    (70, 65, 130, Precision.EXACT, 1.0, 0.0),
    (70, 65, 130, Precision.MIXED, 1.0, 0.0),
    (70, 65, 130, Precision.FAST, 1.0, 0.0),
    (65, 63, 5, Precision.EXACT, 0.01, 3.0, (0.6, 1.0)),  # row sums far from one: the guarded loop to the end
    (63, 100, 1, Precision.FAST, 0.1, 1e4),
    (101, 65, 2, Precision.MIXED, 0.01, 0.0),
    (157, 101, 3, Precision.FAST, 0.05, 0.0),
    (70, 257, 4, Precision.FAST, 1e-3, 3.0),
    (65, 63, 5, Precision.MIXED, 0.1, 1e4, (0.8, 1.0)),
]
DIRECT = [  # many small programs: with updates of both sides at once, or not
    (False, (129, 70, 3, Precision.EXACT, 0.05, 0.0)),
    (False, (70, 257, 3, Precision.EXACT, 1e-4, 0.0)),  # sums leave the plain loop's range at first
    (True, (63, 129, 3, Precision.EXACT, 0.05, 0.0, (0.8, 0.95))),
]
# each once: kernels are the same for both updates but for what is done with a sum, which every second case shows
RUNS = [(bool(index % 2), case) for index, case in enumerate(CASES)] + DIRECT


def reference(x, y, a, b, eps, damping, symmetric, iterations):
    """Log-domain Sinkhorn in float64 from the definition."""
    cost = ((x.double()[:, None] - y.double()[None]) ** 2).sum(-1)
    f, g = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(y), dtype=torch.float64)

    def update_f(g):
        return -damping[0] * eps * torch.logsumexp((g[None] - cost) / eps + b.log()[None], 1)

    def update_g(f):
        return -damping[1] * eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)

    for _ in range(iterations):
        if symmetric:
            f, g = (f + update_f(g)) / 2, (g + update_g(f)) / 2
        else:
            f = update_f(g)
            g = update_g(f)
    return f, g, (a * torch.expm1((f - update_f(g)) / eps).abs())[a > 0].sum().item()


def rounded(points, centre, unit):
    in_units = ((points.double() - centre) / unit).clamp(-32768, 32768)
    return in_units.float().half().double() * unit + centre


def split_biases(sweeps, cloud):
    """Of pairs with weight: the error of both parts' sum, the largest rest, and whether coarse parts are what float32
    adds up exactly. Where points are no pairs there is one part."""
    if not sweeps.whole:
        return 0.0, 0.0, not cloud.coarse_bias.any()
    mass = cloud.weight > 0
    step = 2.0 ** -math.ceil(math.log2(abs(sweeps.scale)))
    coarse, rest = cloud.coarse_bias[mass].double(), cloud.row_bias[mass].double()
    error = sweeps.scale * coarse + rest - sweeps.bias(cloud)[mass]
    steps = coarse / step
    return error.abs().max().item(), rest.abs().max().item(), bool(((steps % 1 == 0) & (steps.abs() < 2**23)).all())


def run(n, m, d, precision, eps, offset, damping=(1.0, 1.0), *, symmetric):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=generator) + offset
    y = torch.randn(m, d, generator=generator) + offset + 0.3
    a = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    b = torch.rand(m, generator=generator, dtype=torch.float64) + 0.1
    a[5] = 0.0
    x[5] += 1e6  # no weight: wherever it is, it must not matter
    a, b = a / a.sum(), b / b.sum()
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=1.0)
    sweeps = TritonSweeps(inputs, cost_scale=1.0, precision=precision)
    for cloud in (sweeps.x, sweeps.y):  # what is not written before it is read must show
        for tensor in (cloud.partial, cloud.used, cloud.statistics, cloud.block_statistics):
            tensor.fill_(math.nan)
    sweeps.set_epsilon(eps, 1.0)
    sweeps.x.damping, sweeps.y.damping = damping
    iterations = 3
    for _ in range(iterations):
        if symmetric:
            sweeps.symmetric_step()
        else:
            sweeps.half_step(sweeps.x, sweeps.y)
            sweeps.half_step(sweeps.y, sweeps.x)
    f = sweeps.x.potential[:n] * eps / LOG2_E
    g = sweeps.y.potential[:m] * eps / LOG2_E
    if sweeps.rounded:  # the rounded problem is solved exactly
        y = rounded(y, inputs.centre, inputs.unit)
        x = x if precision.splits_x else rounded(x, inputs.centre, inputs.unit)
    want_f, want_g, want_residual = reference(x, y, a, b, eps, damping, symmetric, iterations)
    sweeps.half_step(sweeps.x, sweeps.y)
    weighted = a > 0
    biases = [split_biases(sweeps, cloud) for cloud in (sweeps.x, sweeps.y)]
    return {
        "bias": max(error for error, *_ in biases),
        "rest": max(rest for _, rest, _ in biases),
        "coarse": all(coarse for *_, coarse in biases),
        "whole": not sweeps.whole or all(bool((c.hi == c.hi.round()).all()) for c in (sweeps.x, sweeps.y)),
        "f": ((f - want_f)[weighted].abs().max() / eps).item(),
        "g": ((g - want_g).abs().max() / eps).item(),
        "residual": abs(sweeps.x.residual.item() - want_residual) / max(1.0, want_residual),
        "cost_over_eps": ((x[weighted].double()[:, None] - y.double()[None]) ** 2).sum(-1).max().item() / eps,
    }


if __name__ == "__main__":
    print(json.dumps({f"{case} symmetric={symmetric}": run(*case, symmetric=symmetric) for symmetric, case in RUNS}))

"""Run under TRITON_INTERPRET=1: means and moments over a plan against plain float64, one JSON line."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn.plan.triton_averages import TritonAverages
from solvers.flash_sinkhorn.sweeps.tiles import Precision

EACH = ("v", "w", "both", "none")
CASES = [  # n, m, d, precision, eps, common offset, columns of values, motions whose moments are taken
    (63, 150, 1, Precision.EXACT, 0.3, 1e3, 1, ("both",)),
    (40, 35, 3, Precision.EXACT, 0.2, 0.0, 7, ("v", "w", "both")),
    (65, 63, 5, Precision.EXACT, 2.0, 3.0, 2, EACH),
    (65, 150, 40, Precision.EXACT, 20.0, 0.0, 9, ("both", "none")),
    (40, 35, 3, Precision.FAST, 0.2, 0.0, 1, ()),  # exact: the same code as above from here on
    (65, 63, 5, Precision.MIXED, 2.0, 3.0, 2, EACH),
    (65, 63, 40, Precision.MIXED, 20.0, 0.0, 9, ("w", "both")),
    (65, 63, 40, Precision.FAST, 20.0, 0.0, 9, ("v", "both")),
    (65, 63, 130, Precision.EXACT, 60.0, 0.0, 150, ("both",)),
]


def case(n, m, d, precision, eps, offset, k, moved):
    generator = torch.Generator().manual_seed(n + d)
    x = torch.randn(n, d, generator=generator) + offset
    y = torch.randn(m, d, generator=generator) + offset + 0.3
    a = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    b = torch.rand(m, generator=generator, dtype=torch.float64) + 0.1
    a[5] = 0.0
    f, g = (20 * eps * torch.randn(size, generator=generator, dtype=torch.float64) for size in (n, m))
    v, w = torch.randn(n, d, generator=generator), torch.randn(m, d, generator=generator)
    values = torch.randn(m, k, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(k).sub(k // 2).clamp(
        -9, 9
    )
    alpha, beta = torch.randn(n, generator=generator).double(), torch.randn(m, generator=generator).double()
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=0.7, balanced=False)
    averages = TritonAverages(inputs, cost_scale=0.7, precision=precision)
    averages.set_potentials(f, g, eps)

    def plan(x, y):
        cost = 0.7 * (x.double()[:, None] - y.double()[None]).square().sum(-1)
        log = (f[:, None] + g - cost) / eps + b.log()
        return torch.softmax(log, 1), torch.logsumexp(log, 1) / torch.log(torch.tensor(2.0)).double()

    def relative(got, want):
        return ((got.double() - want).abs().amax(0) / want.abs().amax(0)).amax().item()

    p, sums = plan(x, y)
    centred = y.double() - averages.centre
    errors = {}
    for state in ("first", "settled"):
        errors[f"means {state}"] = relative(averages.means(values), p @ values)
        errors[f"sums {state}"] = (averages.log2_sums() - sums).abs().amax().item()
        errors[f"points {state}"] = relative(averages.point_means(), p @ centred)
    averages.set_potentials(f, g, eps)
    errors["points first"] = relative(averages.point_means(), p @ centred)
    averages.set_potentials(f, g, eps)
    errors["sums swept"] = (averages.log2_sums() - sums).abs().amax().item()
    motions = {"v": Motion(v, None), "w": Motion(None, w), "both": Motion(v, w), "none": Motion(None, None)}
    for name in moved:
        motion = motions[name]
        move = torch.zeros(n, m, d, dtype=torch.float64)
        move += 0.0 if motion.v is None else v.double()[:, None]
        move -= 0.0 if motion.w is None else w.double()[None]
        change = 1.4 * ((x.double()[:, None] - y.double()[None]) * move).sum(-1)
        q = alpha[:, None] + beta - change
        means, moments = averages.moments(alpha, beta, motion)
        errors[f"moment {name}"] = relative(means, (p * q).sum(1))
        errors[f"moments {name}"] = relative(moments, (p * q) @ centred)
        if name == "both":
            errors[f"cost change {name}"] = relative(averages.cost_change_means(motion), (p * change).sum(1))
    (p_t,) = (
        torch.softmax(
            (f[:, None] + g - 0.7 * (x.double()[:, None] - y.double()[None]).square().sum(-1)) / eps + a.log()[:, None],
            0,
        ),
    )
    errors["transpose"] = relative(averages.means(v, transpose=True), p_t.T @ v.double())
    return errors


if __name__ == "__main__":
    print(json.dumps([case(*arguments) for arguments in CASES]))

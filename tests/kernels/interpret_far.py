"""Run under TRITON_INTERPRET=1: potentials of near and far points without weight from Triton sweeps, one JSON line."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.iteration import loop
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

SPANS = (0.5, 2.0, 3.0, 10.0, 1e3, 1e8)
EPS = 1.0


def error(d, precision):
    """Errors of f at points so many spans from the centre of y, each over eps plus its cost."""
    generator = torch.Generator().manual_seed(d)
    x, y = (torch.rand(size, d, generator=generator) + 3.0 for size in (40, 37))
    a, b = torch.ones(40, dtype=torch.float64), torch.rand(37, generator=generator, dtype=torch.float64) + 0.1
    a[: len(SPANS)] = 0.0
    away = torch.nn.functional.normalize(torch.randn(len(SPANS), d, generator=generator), dim=1)
    x[: len(SPANS)] = 3.5 + torch.tensor(SPANS)[:, None] * away
    a, b = a / a.sum(), b / b.sum()
    found = solve(x, y, a, b, eps=EPS, tol=1e-4, precision=precision)
    far, others = x[: len(SPANS)].double(), y.double()
    excess = ((others - others[0]) * (others + others[0] - 2.0 * far[:, None])).sum(2)
    first = (far - others[0]).square().sum(1)
    expected = first - EPS * torch.logsumexp((found.g - excess) / EPS + b.log(), 1)
    return ((found.f[: len(SPANS)] - expected).abs() / (EPS + first)).tolist()


if __name__ == "__main__":
    loop.sweeps_of = lambda inputs, **options: TritonSweeps(inputs, **options)
    print(json.dumps({f"{d} {p}": error(d, p) for d in (3, 7, 20) for p in ("exact", "fast")}))

"""Run under TRITON_INTERPRET=1: the divergence of a cloud from itself on the kernels, over eps, one JSON line."""

from __future__ import annotations

import json

import torch

from solvers.flash_sinkhorn import transport
from solvers.flash_sinkhorn.iteration import loop, self_transport
from solvers.flash_sinkhorn.sweeps.tiles import Precision
from solvers.flash_sinkhorn.sweeps.triton_sweeps import TritonSweeps

CASES = [(64, 128, 0.01), (50, 40, 1.0)]  # n, d, eps: exponents of 2e4 and of a hundred


def on_kernels(inputs, cost_scale, precision):
    return TritonSweeps(inputs, cost_scale=cost_scale, precision=precision)


loop.Loop._make_sweeps = lambda self: on_kernels(self.inputs, self.method.cost_scale, self.precision)
self_transport.sweeps_of = on_kernels


def run(n, d, eps, precision):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(n))
    result = transport(x, x.clone(), eps=eps, debias=True, precision=precision)
    return {"divergence_over_eps": result.value.item() / eps, "converged": result.converged}


if __name__ == "__main__":
    found = {f"{case}-{precision}": run(*case, precision) for case in CASES for precision in Precision}
    print(json.dumps(found))

"""Fixed iterations, of one problem or of each of a batch; small ones on a GPU are recorded and replayed."""

from __future__ import annotations

import torch

from ..inputs.batches import Batch, problem
from ..inputs.checks import Inputs
from ..sweeps.replay import replayed
from ..sweeps.tiles import Precision
from .loop import Loop, Method


def iterate(
    inputs: Inputs, levels: tuple[float, ...], method: Method, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """f [n], g [m] after one iteration from zero at each level."""
    loop = Loop(inputs, method, precision)
    for eps in levels:
        if eps != loop.eps:
            loop.set_epsilon(eps)
        loop.iterate()
    return loop.potentials()


def iterated(
    batch: Batch, levels: tuple[float, ...], method: Method, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """f [B, n], g [B, m] of each problem, as of `iterate`."""

    def compute(unit: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return iterate(problem(unit, *tensors), levels, method, precision)

    f, g = replayed(("iterations", levels, method, precision), batch.units, compute, *batch.tensors)
    shift = levels[-1] * batch.log_mass / 2  # rounding moves masses from call to call: they are not recorded
    rho_x, rho_y = method.rho_x, method.rho_y
    return batch.extended(f - shift, g - shift, eps=levels[-1], cost_scale=method.cost_scale, rho_x=rho_x, rho_y=rho_y)

"""The plan of given potentials over pairs chosen for them, without a solve."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import checked_inputs, positive

from ..cascade import squared_diameter
from ..geometry import TiledCloud, to_tiles
from ..iterate import ScreenedPasses
from ..solver import RELAX, check_dimension, sorted_clouds
from .kept import Kept
from .operators import KeptPlan
from .weightless import weightless


@torch.no_grad()
def plan_at(
    x: Tensor,
    y: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    f: Tensor,
    g: Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    tol: float = 1e-4,
    tile: int = 32,
) -> KeptPlan:
    """The plan of potentials f [n], g [m] for weights as given, at or near convergence; other arguments as of `solve`.

    No row and no column leaves out more than tol eps / (cost_scale diameter^2) of its mass: over the least eigenvalue
    of a Hessian product's system, which is of that order or larger, it is tol.

    Raises ValueError as `solve` does, and for potentials of the wrong shape or not finite where there is weight.
    """
    eps, cost_scale, tol = positive("eps", eps), positive("cost_scale", cost_scale), positive("tol", tol)
    check_dimension(x)
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, relax=RELAX)
    for name, potential, weight in (("f", f, inputs.a), ("g", g, inputs.b)):
        if potential.shape != weight.shape:
            raise ValueError(f"{name} must have shape [{len(weight)}], got {tuple(potential.shape)}")
        if not bool((potential.isfinite() | (weight == 0)).all()):
            raise ValueError(f"{name} contains NaN or infinite values where there is weight: give converged potentials")
    of_x, of_y, rounding = sorted_clouds(inputs, eps=eps, cost_scale=cost_scale, tol=tol, tile=tile)
    passes = ScreenedPasses(of_x, of_y, cost_scale * math.log2(math.e) / eps, thins=False)
    u, v = (_in_base_2(cloud, z, eps, inputs.mass) for cloud, z in ((of_x, f), (of_y, g)))
    passes.refresh(u, v, tol * min(1.0, eps / (cost_scale * squared_diameter(of_x, of_y) or eps)))
    apart = (
        weightless(x, inputs.a, of_y, inputs.y, v, passes.k),
        weightless(y, inputs.b, of_x, inputs.x, u, passes.k),
    )
    kept = Kept.of(passes, u, v, rounding, apart)
    return KeptPlan(x, y, a, b, kept, eps=eps, cost_scale=cost_scale)


def _in_base_2(cloud: TiledCloud, potential: Tensor, eps: float, mass: float) -> Tensor:
    """[N] of weights that sum to one; 0 without weight."""
    u = to_tiles(cloud, potential.detach().double()) * (math.log2(math.e) / eps) + math.log2(mass) / 2
    return torch.where(cloud.weight > 0, u, 0.0)

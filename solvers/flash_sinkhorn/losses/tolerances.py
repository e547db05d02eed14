"""The residual that problems are solved to unless it is given, and what float32 allows."""

from __future__ import annotations

import torch

from ..inputs.checks import LARGEST_IN_UNITS
from .loss import Regularisation
from .notices import tell

DEFAULT_TOL, LARGEST_DEFAULT_TOL = 1e-4, 1e-2
FLOAT32_FLOOR = 4e-7  # residual that rounding of exponents leaves, over cost_scale |x|^2 / eps, as measured
VALUE_ROUNDING, VALUE_DIGITS = 1e-7, 1e-4


def default_tols(
    problem: Regularisation, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> list[float]:
    """Of each problem of a batch, x [B, n, d] and so on: 1e-4, or more where float32 exponents, which are as large as
    |x|^2 / eps, allow no less; that is told."""
    if x.device.type == "cpu" and x.dtype is torch.float64:
        return [DEFAULT_TOL] * len(x)
    centre = (_mean(x, a) + _mean(y, b)) / 2
    of_x, of_y = (_mean((v - centre[:, None]).square().sum(2, keepdim=True), w)[:, 0] for v, w in ((x, a), (y, b)))
    floors = (FLOAT32_FLOOR * problem.cost_scale / problem.eps * torch.maximum(of_x, of_y)).tolist()
    tols = [min(max(DEFAULT_TOL, floor), LARGEST_DEFAULT_TOL) for floor in floors]
    asked = f"{DEFAULT_TOL:.0e}"
    for used in dict.fromkeys(f"{tol:.0e}" for tol in tols):
        if used != asked:
            tell(
                f"solved to tol {used}, not {asked}: float32 rounds exponents as large as |x|^2 / eps, and eps = "
                f"{problem.eps:g} is small for these clouds; set tol= to choose, or raise eps (blur)",
                RuntimeWarning,
            )
    return tols


def tell_if_eps_hides_the_costs(x: torch.Tensor, unit: float, problem: Regularisation) -> None:
    """float32 sums of exponentials are off by 1e-7, which times eps is an error of the value. unit: of `Inputs`."""
    if x.device.type == "cpu" and x.dtype is torch.float64:
        return
    if VALUE_ROUNDING * problem.eps > VALUE_DIGITS * problem.cost_scale * (LARGEST_IN_UNITS * unit) ** 2:
        tell(
            f"eps = {problem.eps:g} is far above the costs, and in float32 values are known to {VALUE_ROUNDING:g} eps: "
            "give float64 points on the CPU, or lower eps (blur)",
            RuntimeWarning,
        )


def _mean(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, d] of values [B, n, d]."""
    share = (weight / weight.sum(1, keepdim=True)).to(values.dtype)
    return torch.bmm(share[:, None], values)[:, 0]

"""Score a pair of potentials on the clouds as given: marginal residuals, dual and primal value, in float64.

All pairs, direct differences (x - y), exponents formed in float64 (float32 loses them where f / eps is 1e4), sums in
float64; a GPU passes over pairs of which boxes around points show that their exponential is zero in float64. Extra
memory is O(n + m) plus one bounded block. Nothing of what a solver says of itself is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fsbench.api import Clouds

_BLOCK_PAIRS = 1 << 20  # 8 MiB a float64 block: stays near the cache


@dataclass(frozen=True)
class Score:
    """What (f, g) are worth. P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps); values in units of C.

    residual_row_l1 = |P1 - a|_1, residual_col_l1 = |P^T 1 - b|_1, residual_l1 the larger.
    half_step_error: min over the sides of max |log(marginal / weight)| over points of positive weight; the side that
    was updated last has it at rounding level. inf where a marginal underflows to zero.
    dual_value = <a, f> + <b, g> - eps (mass - |a||b|); primal_value = <P, C> + eps KL(P | a x b), KL with the
    mass terms, so both agree with OT_eps at the optimum. A plan that overflows has residual inf, and inf or nan values.
    """

    residual_row_l1: float
    residual_col_l1: float
    residual_l1: float
    half_step_error: float
    dual_value: float
    primal_value: float
    mass: float


def score(
    clouds: Clouds, f: np.ndarray, g: np.ndarray, *, eps: float, cost_scale: float = 1.0, device: str = "cpu"
) -> Score:
    """Score potentials f [n], g [m] on `clouds`. Points of zero weight count for nothing, whatever their potential.

    Raises ValueError if eps is not positive, a shape is wrong, no weight is positive, or a potential is not finite on a
    point of positive weight.
    """
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    x, a, f = _positive("f", clouds.x, clouds.a, f)
    y, b, g = _positive("g", clouds.y, clouds.b, g)
    on_device = [torch.from_numpy(np.ascontiguousarray(v)).to(device) for v in (x, y, f / eps, g / eps, a, b)]
    row_sums, col_sums = _plan_sums(on_device, cost_scale / eps)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflowing plan scores inf
        row, col = a * row_sums.cpu().numpy(), b * col_sums.cpu().numpy()  # P1 [n], P^T 1 [m]
        mass = float(row.sum())
        entropic = eps * (mass - a.sum() * b.sum())
        residual_row, residual_col = float(np.abs(row - a).sum()), float(np.abs(col - b).sum())
        return Score(
            residual_row_l1=residual_row,
            residual_col_l1=residual_col,
            residual_l1=max(residual_row, residual_col),
            half_step_error=min(_log_error(row, a), _log_error(col, b)),
            dual_value=float(a @ f + b @ g - entropic),
            # <P, C> + eps <P, log(P / ab)> = <P, f + g>: the cost cancels, so it needs no second pass.
            primal_value=float(row @ f + col @ g - entropic),
            mass=mass,
        )


def _positive(
    name: str, points: np.ndarray, weights: np.ndarray, potential: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    potential = np.asarray(potential)
    if potential.shape != weights.shape:
        raise ValueError(f"{name} has shape {potential.shape}, its weights {weights.shape}")
    keep = weights > 0
    if not keep.any():
        raise ValueError(f"the weights of {name} have no positive entry")
    potential = potential[keep].astype(np.float64)
    bad = int(np.count_nonzero(~np.isfinite(potential)))
    if bad:
        raise ValueError(f"{name} is not finite on {bad} of {len(potential)} points of positive weight")
    return points[keep], weights[keep].astype(np.float64), potential


def _log_error(marginal: np.ndarray, weights: np.ndarray) -> float:
    with np.errstate(divide="ignore"):
        return float(np.abs(np.log(marginal / weights)).max())


def _plan_sums(arrays: list[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `metrics_kernel.plan_sums` on x, y, f, g, a, b, on either device."""
    x, y, f, g, a, b = arrays
    if x.is_cuda:
        from fsbench.metrics_kernel import plan_sums  # here, so that a machine without Triton can score on its CPU

        return plan_sums(x, y, f, g, a, b, scale)
    x, y = x.double(), y.double()
    row, col = torch.empty_like(a), torch.zeros_like(b)
    step = max(1, _BLOCK_PAIRS // len(y))
    for i in range(0, len(x), step):
        rows = slice(i, i + step)
        # Not the matrix-product form, which cancels; the root that cdist takes costs one rounding of C.
        block = torch.cdist(x[rows], y, compute_mode="donot_use_mm_for_euclid_dist")
        block.square_().mul_(-scale).add_(f[rows, None]).add_(g).exp_()
        row[rows] = block @ b
        col.addmv_(block.t(), a[rows])
    return row, col

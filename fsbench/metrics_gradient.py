"""Score the gradient of OT_eps in the points against float64, at the solver's own potentials.

P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps) from the (f, g) that the solver ended with, all pairs, in float64. Two
formulas are the gradient at convergence, and away from it solvers differ in which they use: at fixed potentials,
2 cost_scale (r_i x_i - (P y)_i) with r = P 1, and with rows normalised, 2 cost_scale a_i (x_i - (P y)_i / r_i). Each
cloud's error is to the nearer of the two, so that it measures arithmetic and not the choice.
"""

from __future__ import annotations

import numpy as np
import torch

from fsbench.api import Clouds

_BLOCK_PAIRS = {"cpu": 1 << 20, "cuda": 1 << 26}  # 8 MiB stays near a CPU's cache; 512 MiB fills a GPU


def gradient_error(
    clouds: Clouds,
    f: np.ndarray,
    g: np.ndarray,
    grad_x: np.ndarray,
    grad_y: np.ndarray,
    *,
    eps: float,
    cost_scale: float = 1.0,
    device: str = "cpu",
) -> float:
    """|grad - reference| / |reference| of grad_x [n, d] and grad_y [m, d], Frobenius; the larger of the two clouds'.

    Points of zero weight count for nothing, whatever their potential. inf or nan where the plan overflows. A reference
    that is exactly zero is compared with one unit of it: 2 cost_scale times the mass times the largest distance from
    the centre. Raises ValueError for a gradient of the wrong shape, or not finite on a point of positive weight.
    """
    rows, columns = clouds.a > 0, clouds.b > 0
    grads = []
    for name, grad, points, keep in (("grad_x", grad_x, clouds.x, rows), ("grad_y", grad_y, clouds.y, columns)):
        if np.shape(grad) != points.shape:
            raise ValueError(f"{name} has shape {np.shape(grad)}, its points {points.shape}")
        grads.append(np.asarray(grad)[keep].astype(np.float64))
        bad = int(np.count_nonzero(~np.isfinite(grads[-1]).all(1)))
        if bad:
            raise ValueError(f"{name} is not finite on {bad} of {len(grads[-1])} points of positive weight")
    kept = (clouds.x[rows], clouds.y[columns], clouds.a[rows], clouds.b[columns], f[rows] / eps, g[columns] / eps)
    x, y, a, b, f_, g_ = (torch.from_numpy(np.ascontiguousarray(v)).double().to(device) for v in kept)
    centre = (a @ x + b @ y) / (a.sum() + b.sum())
    x, y = x - centre, y - centre
    f_, g_ = f_ + a.log(), g_ + b.log()
    (r, mean_y), (c, mean_x) = _marginals_and_means(x, y, f_, g_, cost_scale / eps)
    factor = 2.0 * cost_scale
    unit = factor * float(torch.cat([x, y]).norm(dim=1).max())
    sides = ((grads[0], x - mean_y, r, a), (grads[1], y - mean_x, c, b))
    errors = [_error(grad, factor * shift, (sums, weight), unit) for grad, shift, sums, weight in sides]
    return float(np.max(errors))  # nan if either is


def _error(grad: np.ndarray, shift: torch.Tensor, masses: tuple[torch.Tensor, torch.Tensor], unit: float) -> float:
    """To the nearer of the references mass * shift."""
    given = torch.from_numpy(grad).to(shift.device)
    errors = []
    for mass in masses:
        reference = mass[:, None] * shift
        errors.append(float((given - reference).norm()) / (float(reference.norm()) or unit or 1.0))
    return min(errors)


def _marginals_and_means(
    x: torch.Tensor, y: torch.Tensor, f: torch.Tensor, g: torch.Tensor, scale: float
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(P 1 [n], (P y) / (P 1) [n, d]) and (P^T 1 [m], (P^T x) / (P^T 1) [m, d]), P = exp(f + g - scale |x - y|^2).

    Centred float64 points: expanding the square loses 1e-16 of their squared distance from the centre, over eps.
    """
    square_x, square_y = x.square().sum(1), y.square().sum(1)
    # A column of ones beside the coordinates: sums and moments come from one product.
    ones_x, ones_y = (torch.cat([torch.ones_like(v[:, :1]), v], 1) for v in (x, y))
    moments_y, moments_x = torch.empty_like(ones_x), torch.zeros_like(ones_y)
    step = max(1, _BLOCK_PAIRS[x.device.type] // len(y))
    bias_y = g - scale * square_y
    for i in range(0, len(x), step):
        rows = slice(i, i + step)
        plan = torch.addmm(bias_y, x[rows], y.T, alpha=2.0 * scale)  # [step, m]
        plan.add_((f[rows] - scale * square_x[rows])[:, None]).exp_()
        moments_y[rows] = plan @ ones_y
        moments_x.addmm_(plan.T, ones_x[rows])
    (r, sum_y), (c, sum_x) = (torch.tensor_split(moments, [1], dim=1) for moments in (moments_y, moments_x))
    return (r[:, 0], sum_y / r), (c[:, 0], sum_x / c)

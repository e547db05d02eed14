"""Balancing of a small dense matrix by Newton's method."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 30.0  # of a multiplier's logarithm
STEPS = 4
STOP = 1e-2  # of |columns - B|_1 at first: 60 problems take 690 passes, 688 down to rounding, 696 at a tenth
BALANCED = 1e-11  # of that sum: more is rounding
LARGEST_STEP = 4.0  # of a multiplier's logarithm
TRIALS = 2  # multiples of a step, each half of the one before: nearly always the first is the best


def newton(S: Tensor, A: Tensor, B: Tensor, *, steps: int = STEPS, stop: float = STOP) -> Tensor:
    """w [columns] that nearly maximises D(w) = <B, w> - sum_I A_I log sum_J S_IJ e^w_J, of S [rows, columns] with row
    sums A [rows]; |w| <= 30 and D(w) >= D(0).

    Each step takes the best of some multiples of Newton's direction and of the plain update w + log(B / column sums),
    which never lowers D, until |columns - B|_1 has fallen to `stop` of it.
    """
    w = torch.zeros_like(B)
    enough = 0.0
    fractions = 0.5 ** torch.arange(TRIALS, dtype=S.dtype, device=S.device)
    for step in range(steps):
        scale = w.exp()
        q = positive(S @ scale)
        c = scale * (S.T @ (A / q))
        off = float((B - c).abs().sum())
        if step == 0:
            enough = max(stop * off, BALANCED)
        if off <= enough:
            break
        weighted = S * scale * (A.sqrt() / q)[:, None]
        hessian = B[:, None] * B - weighted.T @ weighted
        hessian.diagonal().add_(c * (1 + 1e-10) + 1e-14)
        factor, _ = torch.linalg.cholesky_ex(hessian)
        direction = torch.cholesky_solve((B - c)[:, None], factor)
        direction = direction * (LARGEST_STEP / direction.abs().amax()).clamp(max=1.0)
        plain = torch.where(B > 0, w + (B / positive(c)).log(), w)
        candidates = torch.cat([w[:, None] + fractions * direction, plain[:, None]], 1).clamp(-LARGEST, LARGEST)
        dual = B @ candidates - A @ positive(S @ candidates.exp()).log()
        best = torch.where(dual.isfinite(), dual, -torch.inf).argmax(0, keepdim=True)
        w = candidates.index_select(1, best)[:, 0]
    return w


def positive(sums: Tensor) -> Tensor:
    """So that a starved row or column has a logarithm."""
    return sums.clamp(min=1e-300)

"""Balancing of a sparse matrix: the scheme that it corrects, one level up and without exponentials."""

from __future__ import annotations

import torch
from torch import Tensor

from .levels import Level
from .newton import LARGEST, newton, positive

SWEEPS = 4  # a level: two need half as many passes again once a cloud is a thousand blurs long, six save little
FACTORS = 1.0, 2.0  # of a correction: constants over nodes of two are up to twice as stiff as what they stand for


def balance(level: Level, S: Tensor, A: Tensor, B: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    """w [columns], natural logarithms of column multipliers of S that nearly maximise

        D(w) = <B, w> - sum_I A_I log sum_J S_IJ e^w_J.

    S [K] in row order with row sums A [rows]; B [columns] sums to one; all float64. <B, w> = 0, |w| <= 30 and
    D(w) >= D(0).

    A V-cycle: the balance of S summed over the nodes of the next level, times the best of some factors, then `sweeps`
    alternating updates; at the coarsest level, Newton's method. -log is convex, so D gains at least what its
    aggregation gains, updates never lower D, and D is concave, so that w may be shortened. Decides on the device.
    """
    pairs, coarsening = level.pairs, level.coarsening
    if coarsening is None:
        return _bounded(newton(pairs.matrix(S).to_dense(), A, B), B)
    forward, backward = pairs.matrix(S), pairs.transposed(S)
    coarse_w = balance(
        coarsening.level, coarsening.sums(S), coarsening.row_sums(A), coarsening.col_sums(B), sweeps=sweeps
    )
    candidates = coarse_w[coarsening.col_parents, None] * B.new_tensor(FACTORS)
    row_sums = positive(forward @ candidates.exp())
    best = (B @ candidates - A @ row_sums.log()).argmax(0, keepdim=True)
    w, q = candidates.index_select(1, best)[:, 0], row_sums.index_select(1, best)[:, 0]
    for sweep in range(sweeps):
        if sweep:
            q = positive(forward @ w.exp())
        c = positive(w.exp() * (backward @ (A / q)))
        updated = torch.where(B > 0, w + (B / c).log(), w)
        # a part of the way to a column's maximum never lowers D
        w = torch.minimum(torch.maximum(updated, w.clamp(max=-LARGEST)), w.clamp(min=LARGEST))
    return _bounded(w, B)


def _bounded(w: Tensor, B: Tensor) -> Tensor:
    w = w - B @ w
    return w * (LARGEST / w.abs().amax()).clamp(max=1.0)

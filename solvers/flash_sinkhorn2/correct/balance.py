"""Balancing of a sparse matrix: the scheme that it corrects, one level up and without exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .levels import Level
from .newton import LARGEST, STEPS, STOP, newton, positive

SWEEPS = 4  # a level: two need half as many passes again once a cloud is a thousand blurs long, six save little
FACTORS = 2  # of a correction, 1, 2: constants over nodes of two are up to twice as stiff as what they stand for

Masses = Sequence[tuple[Tensor, Tensor]]  # A and B of every level, finest first


class Balance:
    """w [columns], natural logarithms of column multipliers of S that nearly maximise

        D(w) = <B, w> - sum_I A_I log sum_J S_IJ e^w_J.

    S [K] in row order with row sums A [rows]; B [columns] sums to one; all float64. <B, w> = 0, |w| <= 30 and
    D(w) >= D(0). flipped: of the transposed matrix, A and B of its rows and columns, S ordered as ever.

    A V-cycle: the balance of S summed over the nodes of the next level, times the best of some factors, then `sweeps`
    alternating updates; at the coarsest level, Newton's method. -log is convex, so D gains at least what its
    aggregation gains, updates never lower D, and D is concave, so that w may be shortened. `fine`: those updates of the
    finest level alone, for what is off within a few tiles. Decides on the device. steps, stop: of Newton's method.
    """

    def __init__(
        self,
        level: Level,
        A: Tensor,
        B: Tensor,
        *,
        sweeps: int = SWEEPS,
        flipped: bool = False,
        steps: int = STEPS,
        stop: float = STOP,
    ) -> None:
        self.A, self.B = A, B
        masses = [(rows, cols) for cols, rows in level.masses(B, A)] if flipped else level.masses(A, B)
        self._cycle: Callable[[Tensor, bool], Tensor]
        if A.is_cuda and sweeps:
            from .triton_balance import TritonBalance  # Triton need not be there on machines without a GPU

            self._cycle = TritonBalance(
                level, masses, flipped=flipped, sweeps=sweeps, factors=FACTORS, steps=steps, stop=stop
            )
        else:
            coarsest = partial(newton, steps=steps, stop=stop)
            self._cycle = lambda S, fine: bounded(_cycle(level, S, masses, flipped, sweeps, fine, coarsest), B)

    def __call__(self, S: Tensor, *, fine: bool = False) -> Tensor:
        """On a GPU in the memory that the last w was in, `fine` or not."""
        return self._cycle(S, fine)


def bounded(w: Tensor, B: Tensor) -> Tensor:
    """w - <B, w>, shortened to at most 30."""
    w = w - B @ w
    return w * (LARGEST / w.abs().amax()).clamp(max=1.0)


def _cycle(
    level: Level, S: Tensor, masses: Masses, flipped: bool, sweeps: int, fine: bool, coarsest: Callable[..., Tensor]
) -> Tensor:
    pairs, coarsening = level.pairs, level.coarsening
    A, B = masses[0]
    if coarsening is None:
        dense = S.new_zeros(len(A) * len(B)).index_copy_(0, level.places(flipped=flipped), S)
        return coarsest(dense.view(len(A), len(B)), A, B)
    forward, backward, parents = pairs.matrix(S), pairs.transposed(S), coarsening.col_parents
    if flipped:
        forward, backward, parents = backward, forward, coarsening.row_parents
    if fine:
        w, q = torch.zeros_like(B), positive(forward @ torch.ones_like(B))
    else:
        coarse_w = _cycle(coarsening.level, coarsening.sums(S), masses[1:], flipped, sweeps, fine, coarsest)
        candidates = coarse_w[parents, None] * 2.0 ** torch.arange(FACTORS, dtype=S.dtype, device=S.device)
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
    return w

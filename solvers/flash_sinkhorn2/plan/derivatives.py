"""OT values over kept pairs and their first derivatives, by the envelope theorem; second ones go over all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solvers.flash_sinkhorn.losses.loss import Pair, Regularisation, SelfPair

from .kept import Kept
from .operators import KeptPlan


class KeptPair(Pair):
    """The dense solver's `Pair`, but that a gradient in the points is of the kept pairs' plan: a pair left out moves a
    point's mean by the share of the row that it holds, times its distance."""

    def __init__(self, problem: Regularisation, kept: Kept):
        super().__init__(problem)
        self.kept = kept

    def plan(self, tensors: Sequence[torch.Tensor]) -> KeptPlan:
        x, y, a, b = tensors[:4]
        return KeptPlan(x, y, a, b, self.kept, eps=self.problem.eps, cost_scale=self.problem.cost_scale)


class KeptSelfPair(SelfPair):
    """The same of a cloud with itself; kept: at the update on both sides."""

    def __init__(self, problem: Regularisation, kept: Kept):
        self.pair = KeptPair(problem, kept)

"""OT values over kept pairs and their derivatives, first and second, by the envelope theorem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from solvers.flash_sinkhorn.losses.loss import Gradients, Pair, Regularisation, SelfPair
from solvers.flash_sinkhorn.plan.hvp import HessianProduct

from .kept import Kept
from .operators import KeptPlan


class KeptPair(Pair):
    """The dense solver's `Pair`, but that a gradient in the points is of the kept pairs' plan: a pair left out moves a
    point's mean by the share of the row that it holds, times its distance. So are second derivatives."""

    def __init__(self, problem: Regularisation, kept: Kept):
        super().__init__(problem)
        self.kept = kept

    def plan(self, tensors: Sequence[torch.Tensor]) -> KeptPlan:
        x, y, a, b = tensors[:4]
        return KeptPlan(x, y, a, b, self.kept, eps=self.problem.eps, cost_scale=self.problem.cost_scale)

    def product(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> HessianProduct:
        found = self.plan(tensors).hvp(*direction, tol=self.problem.hessian_tol)
        h_x, h_y = (
            None if h is None else h.to(points.dtype)
            for h, points in ((found.h_x, tensors[0]), (found.h_y, tensors[1]))
        )
        return replace(found, h_x=h_x, h_y=h_y)


class KeptSelfPair(SelfPair):
    """The same of a cloud with itself; kept: at the update on both sides."""

    def __init__(self, problem: Regularisation, kept: Kept):
        self.pair = KeptPair(problem, kept)

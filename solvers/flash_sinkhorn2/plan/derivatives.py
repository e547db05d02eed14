"""The derivatives of OT values over kept pairs, by the envelope theorem: nothing is propagated through iterations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solvers.flash_sinkhorn.losses.loss import Gradients
from solvers.flash_sinkhorn.losses.values import weight_gradients

from .operators import KeptPlan

NO_SECOND_DERIVATIVE = (
    "second derivatives are not offered over kept pairs: differentiate once, or use the dense solver, "
    "solvers.flash_sinkhorn.transport, or backend='tensorized' of SamplesLoss"
)


class KeptPair:
    """The first derivatives of OT_eps(a, b) in (x, y, a, b), given (x, y, a, b, f, g): as the dense `Pair`."""

    def __init__(self, plan: KeptPlan):
        self.plan = plan

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        """2 cost_scale a_i (x_i - (P y)_i / (P 1)_i), and likewise in y; the weights' are of f and g.

        Zero for points without weight. A pair left out moves a point's mean by the share of the row that it holds,
        times its distance.
        """
        a, b, f, g = tensors[2:]
        mass = (a.sum() + b.sum()) / 2
        points: list[torch.Tensor | None] = []
        for transpose, is_needed, weight in ((False, needed[0], a), (True, needed[1], b)):
            if not is_needed:
                points.append(None)
                continue
            moved = torch.where(weight[:, None] > 0, self.plan.displacement(transpose=transpose), 0.0)
            points.append((2.0 * self.plan.cost_scale * mass / weight.sum() * weight)[:, None] * moved)
        weights: Gradients = (None, None)
        if needed[2] or needed[3]:
            weights = weight_gradients(a, b, f, g, eps=self.plan.eps)
        in_dtype = (None if point is None else point.to(tensors[0].dtype) for point in points)
        return *in_dtype, *weights

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


class KeptSelfPair:
    """The same of OT_eps(a, a) in (x, a), given (x, a, f): both sides are alike."""

    def __init__(self, plan: KeptPlan):
        self.pair = KeptPair(plan)

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        x, a, f = tensors
        of_x, _, of_a, _ = self.pair.gradients([x, x, a, a, f, f], [needed[0], False, needed[1], False])
        return tuple(half if half is None else 2.0 * half for half in (of_x, of_a))

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)

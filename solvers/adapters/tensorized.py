"""The textbook baseline: the whole cost matrix in memory, PyTorch operations only."""

from __future__ import annotations

import torch

from fsbench.api import Budget, Framework, Problem, Solution, Spec, Task, ToResidual
from solvers.common.alternating import alternating_sinkhorn, log_weights
from solvers.common.divergence import divergence
from solvers.common.hessian import PlanProducts, hessian_product
from solvers.common.scheme import Scheme


class Tensorized:
    """Log-domain Sinkhorn on a stored -C / eps and one buffer of the same size: 2 n m numbers in all.

    The cost is expanded, |x|^2 + |y|^2 - 2 x.y, by one matrix product in the problem's own precision (torch's default:
    no TF32) on clouds centred first, so a common offset costs no accuracy. Half-steps work in place in the buffer.

    The gradient takes the plan, rows normalised by their own sum, in the same buffer: a pass and a product a cloud.

    check_every: iterations between two looks at the residual; each look stalls the device once and adds no pass.
    """

    framework = Framework.TORCH
    scheme = Scheme.ROWS_FIRST

    def __init__(self, *, check_every: int = 1) -> None:
        self.check_every = check_every

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Everything: any size, dimension, dtype and device, as long as the memory holds it."""

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Nothing to compile."""

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        if problem.spec.task is Task.DIVERGENCE:
            return divergence(self.solve, problem, budget)
        eps, scale = problem.spec.eps, problem.spec.cost_scale
        with torch.no_grad():
            centre = 0.5 * (problem.a @ problem.x + problem.b @ problem.y)  # of mass: points without any may be far
            x, y = problem.x - centre, problem.y - centre
            logits = _negative_cost(x, y, scale / eps)
            work = torch.empty_like(logits)
            solution = alternating_sinkhorn(
                lambda h: _lse(logits, h[None, :], work, dim=1),
                lambda h: _lse(logits, h[:, None], work, dim=0),
                a=problem.a,
                b=problem.b,
                eps=eps,
                budget=budget,
                check_every=self.check_every,
            )
            if problem.spec.task is Task.FORWARD:
                return solution
            u, v = log_weights(problem.a) + solution.f / eps, log_weights(problem.b) + solution.g / eps
            mean_y = _softmax(logits, v[None, :], work, dim=1) @ y
            mean_x = _softmax(logits, u[:, None], work, dim=0).T @ x
            grad_x, grad_y = problem.a[:, None] * (x - mean_y), problem.b[:, None] * (y - mean_x)
            factor = 2 * scale
            return solution.with_gradients(factor * grad_x, factor * grad_y, passes=2)

    def hvp(self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual) -> Solution:
        """Conjugate gradients on products with the stored plan."""
        eps = problem.spec.eps
        with torch.no_grad():
            centre = 0.5 * (problem.a @ problem.x + problem.b @ problem.y)
            x, y = problem.x - centre, problem.y - centre
            plan = _negative_cost(x, y, problem.spec.cost_scale / eps)
            plan.add_((log_weights(problem.a) + f / eps)[:, None]).add_(log_weights(problem.b) + g / eps).exp_()
            products = PlanProducts(
                rows=lambda values: plan @ values,
                columns=lambda values: plan.T @ values,
                second_moment=lambda v: (v @ y.T).mul_(plan) @ y,
                x=x,
                y=y,
            )
            return hessian_product(products, problem, f, g, v, budget)


def _negative_cost(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """-scale |x_i - y_j|^2 [n, m], in one buffer."""
    cost = torch.addmm(y.square().sum(1), x, y.T, alpha=-2.0)
    return cost.add_(x.square().sum(1)[:, None]).clamp_min_(0).mul_(-scale)


def _lse(logits: torch.Tensor, bias: torch.Tensor, work: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Log-sum-exp of logits + bias along dim, all of it in `work`."""
    torch.add(logits, bias, out=work)
    peak = work.amax(dim, keepdim=True)
    return work.sub_(peak).exp_().sum(dim).log_().add_(peak.squeeze(dim))


def _softmax(logits: torch.Tensor, bias: torch.Tensor, work: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Softmax of logits + bias along dim, in `work`."""
    torch.add(logits, bias, out=work)
    work.sub_(work.amax(dim, keepdim=True)).exp_()
    return work.div_(work.sum(dim, keepdim=True))

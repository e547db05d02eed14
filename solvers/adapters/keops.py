"""KeOps: the log-sum-exps as compiled map-reduce kernels that never store the cost matrix."""

from __future__ import annotations

from solvers.common.keops_runtime import check_device  # isort: skip  # first: it must run before torch is imported

from functools import lru_cache

import torch
from pykeops.torch import Genred

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec
from solvers.common.alternating import alternating_sinkhorn
from solvers.common.scheme import Scheme


class KeOps:
    """Log-domain Sinkhorn with KeOps' LogSumExp reduction of B - P |X - Y|^2: linear memory, direct differences.

    One formula serves rows and columns. Default settings of KeOps, which its documentation recommends; float32 sums
    stay in float32 blocks, as there. Compiled and loaded in `prepare`.

    check_every: iterations between two looks at the residual; each look stalls the device once and adds no pass.
    """

    framework = Framework.TORCH
    scheme = Scheme.ROWS_FIRST

    def __init__(self, *, check_every: int = 1) -> None:
        self.check_every = check_every

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Any size, dimension and dtype; Unsupported on CUDA if KeOps itself would fall back to the CPU."""
        check_device(spec.device)

    def prepare(self, spec: Spec, budget: Budget) -> None:
        dtype = getattr(torch, spec.dtype)
        x = torch.zeros(2, spec.d, dtype=dtype, device=spec.device)
        weights = torch.full((2,), 0.5, dtype=dtype, device=spec.device)
        tiny = Spec(2, 2, spec.d, spec.eps, spec.cost_scale, spec.dtype, spec.device)
        self.solve(Problem(x, x, weights, weights, tiny), FixedIterations(1))

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        x, y = problem.x.contiguous(), problem.y.contiguous()
        eps = problem.spec.eps
        reduce = _log_sum_exp(x.shape[1])
        inverse = torch.tensor([problem.spec.cost_scale / eps], dtype=x.dtype, device=x.device)
        with torch.no_grad():
            return alternating_sinkhorn(
                lambda h: reduce(x, y, h[:, None], inverse)[:, 0],
                lambda h: reduce(y, x, h[:, None], inverse)[:, 0],
                a=problem.a,
                b=problem.b,
                eps=eps,
                budget=budget,
                check_every=self.check_every,
            )


@lru_cache
def _log_sum_exp(d: int) -> Genred:
    """log sum_j exp(B_j - P |X_i - Y_j|^2) for points of dimension d."""
    aliases = [f"X = Vi({d})", f"Y = Vj({d})", "B = Vj(1)", "P = Pm(1)"]
    return Genred("B - P * SqDist(X, Y)", aliases, reduction_op="LogSumExp", axis=1)

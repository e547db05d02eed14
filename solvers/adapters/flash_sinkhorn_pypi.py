"""The published flash-sinkhorn package (0.4.1): fused Triton kernels, forward, squared Euclidean cost."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from flash_sinkhorn import SamplesLoss
from flash_sinkhorn.hvp import hvp_x_sqeuclid_from_potentials
from flash_sinkhorn.samples_loss import _center_coords, _round_to_tf32  # what its dense backends are given

from fsbench.api import (
    Budget,
    FixedIterations,
    Framework,
    Problem,
    Solution,
    Spec,
    Task,
    ToResidual,
    TracePoint,
    Unsupported,
)
from solvers.common.scheme import Scheme

_HVP_TIKHONOV = 1e-8
_LARGEST_DENSE_PLAN = 64_000_000  # entries, up to which the package recommends its dense product
_EXTRA_SWEEPS = 2  # the symmetric solver adds an initial and a closing sweep to n_iters


class FlashSinkhornPypi:
    """Its public `SamplesLoss(potentials=True)` at fixed eps, which centres the clouds and, with TF32, rounds them.

    Documented best settings: exp2, its own choice of fused or separate kernels, and autotune, which takes place in
    `prepare` and can take minutes at a new shape.
    updates: "alternating" contracts faster; "symmetric" is the package's default.
    allow_tf32: True is the package's default, products and coordinates then have 10-bit mantissas; False is FP32.
    threshold_factor: the package stops on the largest change of a potential over `inner_iterations` iterations, not
    on the residual. A change of eps log(1 + tol) in one iteration bounds the L1 residual by tol, so its threshold is
    threshold_factor times that; the bound is loose, so the harness runs a ladder of factors, from large to small.

    A sweep here updates both potentials. The symmetric solver adds two sweeps to n_iters; they are taken off it, so
    that every solver does the same number. The package does not tell how many it did before it stopped.

    Gradients are `SamplesLoss(...)` and torch's backward, as documented. The loss does not return the potentials, so
    they are read from its autograd node: solving twice would double its time. So are those of the three problems of
    `SamplesLoss(debias=True)`, the divergence.

    Hessian products are `hvp_x_sqeuclid_from_potentials`, strict FP32 by the package's choice, with the stored plan up
    to the size its documentation recommends that for. Its Tikhonov term tau2 is at the low end of what it documents as
    safe, 1e-8: the default, 1e-5, adds eps tau2 to weights of 1 / m and moves the answer by percents at large m. Its
    absolute tolerance is off, since it is above the right-hand side's own norm there.
    """

    framework = Framework.TORCH

    def __init__(
        self,
        *,
        allow_tf32: bool,
        updates: str = "alternating",
        threshold_factor: float = 1.0,
        inner_iterations: int = 10,
        autotune: bool = True,
    ) -> None:
        if updates not in ("alternating", "symmetric"):
            raise ValueError(f"updates must be alternating or symmetric, got {updates!r}")
        self.allow_tf32 = allow_tf32
        self.updates = updates
        self.threshold_factor = threshold_factor
        self.inner_iterations = inner_iterations
        self.autotune = autotune
        self.scheme = Scheme.ROWS_FIRST if updates == "alternating" else Scheme.SYMMETRIC

    def supports(self, spec: Spec, budget: Budget) -> None:
        """CUDA and float32 only; symmetric updates need at least 3 sweeps."""
        if spec.device != "cuda":
            raise Unsupported("flash-sinkhorn 0.4.1 takes CUDA tensors only")
        if spec.dtype != "float32":
            raise Unsupported(f"flash-sinkhorn 0.4.1 computes in float32 whatever it is given, got {spec.dtype}")
        if self.updates == "symmetric" and _limit(budget) <= _EXTRA_SWEEPS:
            raise Unsupported(f"flash-sinkhorn's symmetric solver does at least 3 sweeps, got {_limit(budget)}")

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile and autotune at this shape, on clouds of its own."""
        generator = torch.Generator(device=spec.device).manual_seed(0)
        x = torch.randn(spec.n, spec.d, device=spec.device, generator=generator)
        y = torch.randn(spec.m, spec.d, device=spec.device, generator=generator)
        a = torch.full((spec.n,), 1 / spec.n, device=spec.device)
        b = torch.full((spec.m,), 1 / spec.m, device=spec.device)
        problem = Problem(x, y, a, b, spec)
        if spec.task is Task.HVP:
            near = math.sqrt(spec.eps / spec.cost_scale / spec.d)  # a plan of far points would be zero in float32
            problem = Problem(near * x, near * y, a, b, spec)
            self.hvp(problem, torch.zeros_like(a), torch.zeros_like(b), x, ToResidual(1e-2, max_iterations=2))
        else:
            self.solve(problem, FixedIterations(_EXTRA_SWEEPS + 1))

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        # A cost s |x - y|^2 at eps is the full cost at eps / s with potentials s times as large.
        scale = problem.spec.cost_scale
        eps = problem.spec.eps / scale
        threshold = None
        if isinstance(budget, ToResidual):
            threshold = self.threshold_factor * eps * math.log1p(budget.tol)
        sweeps = _limit(budget)
        n_iters = sweeps if self.updates == "alternating" else sweeps - _EXTRA_SWEEPS
        forward = problem.spec.task is Task.FORWARD
        settings = (self.allow_tf32, eps, n_iters, threshold, self.inner_iterations, self.autotune)
        debias = problem.spec.task is Task.DIVERGENCE
        loss = _loss(self.updates, *settings, potentials=forward, debias=debias)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if debias:
                return _divergence(loss, problem, scale, sweeps if threshold is None else None, caught)
            f, g, *gradients = _potentials(loss, problem) if forward else _with_gradients(loss, problem)
        if scale != 1:
            f, g, *gradients = (scale * found for found in (f, g, *gradients))
        solution = Solution(f, g, sweeps, 2.0 * sweeps)
        if threshold is not None:
            solution = Solution(f, g, n_iterations=None, n_passes=None, converged=_converged(caught))
        if self.allow_tf32:
            solution = replace(solution, solved=partial(_rounded, problem))
        return solution if forward else solution.with_gradients(*gradients, passes=2)

    def hvp(self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual) -> Solution:
        scale = problem.spec.cost_scale
        eps = problem.spec.eps / scale
        centre = 0.5 * (problem.a @ problem.x + problem.b @ problem.y)
        with torch.no_grad():
            h_x, info = hvp_x_sqeuclid_from_potentials(
                problem.x - centre,
                problem.y - centre,
                f / scale + eps * problem.a.log(),
                g / scale + eps * problem.b.log(),
                v,
                eps=eps,
                tau2=_HVP_TIKHONOV,
                max_cg_iter=budget.max_iterations,
                cg_rtol=budget.tol,
                cg_atol=0.0,
                use_dense_cg=problem.spec.n * problem.spec.m <= _LARGEST_DENSE_PLAN,
                autotune=self.autotune,
            )
        first = info.cg_initial_residual
        trace = (TracePoint(info.cg_iters, None, info.cg_residual / first if first else 0.0),)
        return Solution(f, g, info.cg_iters, None, info.cg_converged, trace, h_x=scale * h_x)


def _rounded(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Both clouds as the loss centres and rounds them before it solves."""
    with torch.no_grad():
        x, y = _center_coords(problem.x, problem.y, problem.a, problem.b, batched=False)
        return _round_to_tf32(x), _round_to_tf32(y)


def _potentials(loss: SamplesLoss, problem: Problem) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return loss(problem.a, problem.x, problem.b, problem.y)


def _with_gradients(loss: SamplesLoss, problem: Problem) -> tuple[torch.Tensor, ...]:
    """f [n], g [m], and the gradients of the loss in x [n, d] and y [m, d]."""
    x, y = (points.detach().requires_grad_() for points in (problem.x, problem.y))
    value = loss(problem.a, x, problem.b, y)
    return *_saved_potentials(value.grad_fn, len(x), len(y)), *torch.autograd.grad(value, (x, y))


def _converged(caught: list[warnings.WarningMessage]) -> bool:
    return not any("convergence to threshold" in str(warning.message) for warning in caught)


def _divergence(
    loss: SamplesLoss, problem: Problem, scale: float, sweeps: int | None, caught: list[warnings.WarningMessage]
) -> Solution:
    """Without any backward pass: the clouds ask for gradients so that the loss keeps its potentials. sweeps: None where
    a threshold ends each problem; then warnings tell whether all got there."""
    x, y = (points.detach().requires_grad_() for points in (problem.x, problem.y))
    value = loss(problem.a, x, problem.b, y)
    sizes = (len(x), len(y)), (len(x), len(x)), (len(y), len(y))
    nodes = _cost_nodes(value.grad_fn)
    saved = (_saved_potentials(node, *size) for node, size in zip(nodes, sizes, strict=True))
    (f, g), of_x, of_y = ((scale * f, scale * g) for f, g in saved)
    passes, converged = (None, _converged(caught)) if sweeps is None else (3 * 2.0 * sweeps, None)
    return Solution(f, g, sweeps, passes, converged, value=scale * value.detach(), self_potentials=(of_x, of_y))


def _saved_potentials(node: Any, n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    saved = node.saved_tensors  # x, y, a, b, f, g, ...: padded, if at all, at the end
    return saved[4][:n], saved[5][:m]


def _cost_nodes(node: Any) -> list[Any]:
    """The autograd nodes of the loss's OT problems, in the order in which it combines them."""
    if type(node).__name__ == "_SinkhornCostFnBackward":
        return [node]
    return [found for child, _ in node.next_functions if child is not None for found in _cost_nodes(child)]


def _limit(budget: Budget) -> int:
    return budget.iterations if isinstance(budget, FixedIterations) else budget.max_iterations


@lru_cache(maxsize=8)
def _loss(
    backend: str,
    allow_tf32: bool,
    eps: float,
    n_iters: int,
    threshold: float | None,
    inner_iterations: int,
    autotune: bool,
    *,
    potentials: bool,
    debias: bool = False,
) -> SamplesLoss:
    """A user builds the module once and calls it often, so it is kept between solves."""
    return SamplesLoss(
        "sinkhorn",
        backend=backend,
        use_epsilon_scaling=False,
        eps=eps,
        n_iters=n_iters,
        threshold=threshold,
        inner_iterations=inner_iterations,
        allow_tf32=allow_tf32,
        autotune=autotune,
        debias=debias,
        potentials=potentials,
    )

"""OTT-JAX: `Sinkhorn` on a stored cost matrix, or on a `PointCloud` that recomputes it in batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ott.geometry import geometry, pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import implicit_differentiation, sinkhorn

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

_ATOL = 1e-8  # of a linear system whose right-hand side is of masses: under float32's rounding of them


class OttJax:
    """OTT-JAX's log-domain Sinkhorn with its squared Euclidean cost, jitted; shapes and budget compile in `prepare`.

    batch_size: None stores the cost matrix, computed once a solve from `PointCloud`; a number recomputes it that many
    lines at a time. On JAX 0.9 and later OTT 0.6.0 needs `jax.interpreters.batching.is_vmappable` for the latter (its
    issue 700): where it is missing a stand-in is set that answers False, which holds for plain arrays.
    inner_iterations: iterations between two looks at the L1 marginal error (OTT's own norm and default).

    Matrix products run at precision "highest", as JAX's default on a GPU is TF32; clouds are centred first because
    OTT expands the cost. Fixed iterations use threshold -1 and min_iterations = max_iterations, as OTT documents; OTT
    still takes the error once at the end, which is counted in the passes. The loop runs inside XLA: `max_seconds` of
    a budget cannot stop it and its trace has no times.

    Gradients are `jax.grad` of `reg_ot_cost` at the solver's defaults, as OTT documents: by Danskin's theorem, so that
    nothing is differentiated through the loop. It is reverse mode over the plan's total mass, counted as two passes.

    Hessian products are reverse over reverse with use_danskin=False, as OTT documents for second derivatives, around
    one iteration from the potentials given. Its linear systems are told to be symmetric, with the identity as
    preconditioning function, since the default solver of the others cannot be differentiated again on this JAX; the
    ridge that OTT recommends for balanced problems has about the size of the other eigenvalues. It does not tell
    iterations.
    """

    framework = Framework.JAX
    scheme = Scheme.COLUMNS_FIRST_UNWEIGHTED

    def __init__(self, *, batch_size: int | None, inner_iterations: int = 10) -> None:
        self.batch_size = batch_size
        self.inner_iterations = inner_iterations
        self._product: Any = None
        if batch_size is not None and not hasattr(jax.interpreters.batching, "is_vmappable"):
            jax.interpreters.batching.is_vmappable = lambda _: False  # type: ignore[attr-defined]

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Any size, dimension and dtype (the process enables float64 in JAX), on a device that this JAX has."""
        if spec.task is Task.DIVERGENCE:
            raise Unsupported("no divergence in this adapter: it has OTT's Sinkhorn, not its sinkhorn_divergence")
        try:
            jax.devices(spec.device)
        except RuntimeError as error:
            raise Unsupported(f"this JAX has no {spec.device} device") from error

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile for these shapes, of a solve by a run on clouds of zeros."""
        device = jax.devices(spec.device)[0]
        x, y, a, b = (
            jax.device_put(jnp.full(shape, value, spec.dtype), device)
            for shape, value in (
                ((spec.n, spec.d), 0),
                ((spec.m, spec.d), 0),
                (spec.n, 1 / spec.n),
                (spec.m, 1 / spec.m),
            )
        )
        if isinstance(budget, ToResidual) and spec.task is Task.HVP:
            settings = {"eps": spec.eps, "cost_scale": spec.cost_scale, "batch_size": self.batch_size}
            settings |= {"tol": budget.tol, "max_steps": budget.max_iterations}
            # Not by a run: the linear system of clouds of zeros is singular, which its solver refuses.
            self._product = _hessian_product.lower(x, y, a, b, a, b, x, **settings).compile()
        else:
            self.solve(Problem(x, y, a, b, spec), budget)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        inner, limit = self._iterations(budget)
        forward = problem.spec.task is Task.FORWARD
        (f, g, errors, converged), (grad_x, grad_y) = _solve(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            eps=problem.spec.eps,
            cost_scale=problem.spec.cost_scale,
            batch_size=self.batch_size,
            tol=budget.tol if isinstance(budget, ToResidual) else None,
            inner=inner,
            limit=limit,
            with_gradient=not forward,
        )
        if isinstance(budget, FixedIterations):
            solution = Solution(f, g, limit, 2.0 * limit + 1)
        else:
            solution = _with_trace(f, g, np.asarray(errors), inner, converged=bool(converged))
        return solution if forward else solution.with_gradients(grad_x, grad_y, passes=2)

    def hvp(self, problem: Problem, f: jax.Array, g: jax.Array, v: jax.Array, budget: ToResidual) -> Solution:
        """As `prepare` compiled it, eps and budget included."""
        h_x = self._product(problem.x, problem.y, problem.a, problem.b, f, g, v)
        return Solution(f, g, None, None, h_x=h_x)

    def _iterations(self, budget: Budget) -> tuple[int, int]:
        """Iterations between two errors, and at most; OTT runs whole groups of the former only."""
        if isinstance(budget, FixedIterations):
            return budget.iterations, budget.iterations
        inner = min(self.inner_iterations, budget.max_iterations)
        return inner, budget.max_iterations // inner * inner


def _with_trace(f: jax.Array, g: jax.Array, errors: np.ndarray, inner: int, *, converged: bool) -> Solution:
    seen = [error for error in errors.tolist() if error != -1]  # -1: never reached
    trace = tuple(TracePoint((k + 1) * inner, None, error) for k, error in enumerate(seen))
    iterations = len(seen) * inner
    return Solution(f, g, iterations, 2.0 * iterations + len(seen), converged, trace)


@partial(jax.jit, static_argnames=("eps", "cost_scale", "batch_size", "tol", "inner", "limit", "with_gradient"))
def _solve(
    x: jax.Array,
    y: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    eps,
    cost_scale,
    batch_size,
    tol,
    inner,
    limit,
    with_gradient,
) -> tuple[tuple[jax.Array, jax.Array, Any, Any], tuple[jax.Array | None, jax.Array | None]]:
    """Potentials f [n], g [m], errors [looks], whether OTT calls it converged; gradients [n, d], [m, d] or None."""

    def cost(x: jax.Array, y: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array, Any, Any]]:
        geom = _geometry(x, y, eps, cost_scale, batch_size)
        solver = sinkhorn.Sinkhorn(
            threshold=-1.0 if tol is None else tol,
            inner_iterations=inner,
            min_iterations=limit if tol is None else 0,
            max_iterations=limit,
        )
        out = solver(linear_problem.LinearProblem(geom, a, b))
        f, g = _common_potentials(geom, out.f, out.g, a, b, eps)
        return out.reg_ot_cost, (f, g, out.errors, out.converged)

    with jax.default_matmul_precision("highest"):
        centre = 0.5 * (a @ x + b @ y)
        if not with_gradient:
            return cost(x - centre, y - centre)[1], (None, None)
        (_, found), gradients = jax.value_and_grad(cost, argnums=(0, 1), has_aux=True)(x - centre, y - centre)
        return found, gradients


@partial(jax.jit, static_argnames=("eps", "cost_scale", "batch_size", "tol", "max_steps"))
def _hessian_product(
    x: jax.Array,
    y: jax.Array,
    a: jax.Array,
    b: jax.Array,
    f: jax.Array,
    g: jax.Array,
    v: jax.Array,
    *,
    eps,
    cost_scale,
    batch_size,
    tol,
    max_steps,
) -> jax.Array:
    """The Hessian of reg_ot_cost in x times v, [n, d].

    Of n times the masses, over n: OTT's conjugate gradients go on past what float32 holds, and with masses of 1 / n
    their products underflow to 0 / 0 there.
    """
    n = x.shape[0]
    ridge = 1.0 / n
    implicit = implicit_differentiation.ImplicitDiff(  # type: ignore[call-arg]
        symmetric=True,
        precondition_fun=lambda marginal: marginal,
        solver_kwargs={"rtol": tol, "atol": _ATOL, "max_steps": max_steps, "ridge_kernel": ridge},
    )
    solver = sinkhorn.Sinkhorn(
        threshold=-1.0,
        inner_iterations=1,
        min_iterations=1,
        max_iterations=1,
        use_danskin=False,
        implicit_diff=implicit,
    )

    def cost(x: jax.Array) -> Any:
        problem = linear_problem.LinearProblem(_geometry(x, y - centre, eps, cost_scale, batch_size), n * a, n * b)
        return solver(problem, init=(f + eps * jnp.log(a), g + eps * jnp.log(n * b))).reg_ot_cost

    with jax.default_matmul_precision("highest"):
        centre = 0.5 * (a @ x + b @ y)
        return jax.grad(lambda x: jnp.vdot(jax.grad(cost)(x), v))(x - centre) / n


def _geometry(x: jax.Array, y: jax.Array, eps, cost_scale, batch_size) -> geometry.Geometry:
    cloud = pointcloud.PointCloud(x, y, epsilon=eps, batch_size=batch_size, scale_cost=1 / cost_scale)
    return cloud if batch_size is not None else geometry.Geometry(cost_matrix=cloud.cost_matrix, epsilon=eps)


def _common_potentials(
    geom: geometry.Geometry, f: jax.Array, g: jax.Array, a: jax.Array, b: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """From P = exp((f + g - C) / eps) to the common convention; where a weight is zero, the potential's extension."""

    def extended() -> tuple[jax.Array, jax.Array]:
        on_rows = geom.update_potential(jnp.zeros_like(f), g, jnp.zeros_like(a), axis=1)
        on_columns = geom.update_potential(f, jnp.zeros_like(g), jnp.zeros_like(b), axis=0)
        return jnp.where(a > 0, f - eps * jnp.log(a), on_rows), jnp.where(b > 0, g - eps * jnp.log(b), on_columns)

    def plain() -> tuple[jax.Array, jax.Array]:
        return f - eps * jnp.log(a), g - eps * jnp.log(b)

    return jax.lax.cond(jnp.all(a > 0) & jnp.all(b > 0), plain, extended)

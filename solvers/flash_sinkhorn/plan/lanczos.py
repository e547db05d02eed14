"""The smallest eigenvalue of the Hessian of the OT value in x, by Lanczos over streamed Hessian-vector products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..inputs.checks import positive, whole
from ..sweeps.tiles import Precision
from .hvp import Hessian
from .operators import Plan


@dataclass(frozen=True)
class MinEigenvalue:
    """value and its unit vector [n, d] in x's dtype, an upper bound on the smallest eigenvalue up to `solve_residual`.

    residual: |H v - value v|, as Lanczos knows it: some eigenvalue of H is no further than this from `value`. spread:
    the largest eigenvalue found, in size. converged: residual <= tol * spread. solve_residual: the worst true relative
    residual of the linear systems behind the products; marginal_residual as of `hvp`. n_steps products, n_passes over
    all pairs.
    """

    value: float
    vector: torch.Tensor
    residual: float
    spread: float
    converged: bool
    solve_residual: float
    marginal_residual: float
    n_steps: int
    n_passes: int


def lanczos_min_eigenvalue(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho_x: float | None = None,
    rho_y: float | None = None,
    n_steps: int = 20,
    tol: float = 1e-3,
    solve_tol: float = 1e-6,
    max_iterations: int = 1000,
    seed: int = 0,
    precision: Precision | str = Precision.EXACT,
) -> MinEigenvalue:
    """Lanczos with full reorthogonalisation, at most n_steps products, from a random start over points with weight.

    A negative value says that (x, y) is no local minimum in x. Stored: n_steps vectors [n, d]. tol: stop when the
    residual is below tol times the largest eigenvalue found; solve_tol, max_iterations: of each product's linear
    system, as tol and max_iterations of `hvp`, which also states the other arguments and the errors.

    Raises ValueError as well where f and g are so far from the problem's that a product overflows.
    """
    n_steps, tol, solve_tol = whole("n_steps", n_steps), positive("tol", tol), positive("solve_tol", solve_tol)
    max_iterations = whole("max_iterations", max_iterations)
    plan = Plan(x, y, a, b, f, g, eps=eps, cost_scale=cost_scale, precision=precision)
    hessian = Hessian(plan, f, g, rho_x=rho_x, rho_y=rho_y)
    points, weighted = plan.inputs.x, plan.inputs.a > 0
    n_steps = min(n_steps, int(weighted.sum()) * points.shape[1])
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(points.shape, generator=generator, dtype=torch.float64).to(points) * weighted[:, None]
    basis = torch.empty(n_steps, points.numel(), dtype=points.dtype, device=points.device)
    basis[0] = (start / start.norm()).flatten()
    projected = torch.zeros(n_steps, n_steps, dtype=torch.float64)
    solve_residual = 0.0
    for step in range(n_steps):
        tangent = hessian.tangent(basis[step].view_as(points)[None], tol=solve_tol, max_iterations=max_iterations)
        solve_residual = max(solve_residual, tangent.solution.residual)
        image = hessian.change(tangent)[0].flatten().to(points.dtype)
        found = basis[: step + 1]
        components = found @ image
        image = image - components @ found
        image = image - (found @ image) @ found  # once more: rounding of the first leaves what float32 leaves
        if not bool(torch.isfinite(image).all()):
            raise ValueError(
                f"f and g are not potentials of this problem: marginal residual {hessian.marginal_residual:.1e}; "
                "solve with the same clouds, eps and cost_scale"
            )
        projected[step, step] = components[step].double().cpu()
        values, vectors = torch.linalg.eigh(projected[: step + 1, : step + 1])
        length = image.norm().item()
        residual, spread = length * abs(vectors[-1, 0].item()), values.abs().amax().item()
        if step + 1 == n_steps or residual <= tol * spread or length <= 1e-12 * spread:
            break
        projected[step, step + 1] = projected[step + 1, step] = length
        basis[step + 1] = image / length
    vector = vectors[:, 0].to(points) @ found
    return MinEigenvalue(
        value=values[0].item(),
        vector=(vector / vector.norm()).view_as(points).to(x.dtype),
        residual=residual,
        spread=spread,
        converged=residual <= tol * spread,
        solve_residual=solve_residual,
        marginal_residual=hessian.marginal_residual,
        n_steps=step + 1,
        n_passes=plan.averages.n_passes,
    )

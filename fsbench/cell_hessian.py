"""What the task hvp adds to a measurement: the point and direction of the product, and its score."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsbench.api import Budget, Cell, Clouds, HessianSolver, Problem, Solution, Spec, ToResidual


class HessianPoint:
    """Converged potentials and a direction, the same for every solver: from the clouds and the seed, in float64.

    Raises fsbench.reference.NotConverged if plain float64 iterations do not bring the problem there.
    """

    def __init__(self, cell: Cell, clouds: Clouds) -> None:
        from fsbench.reference import converged_potentials  # brings torch, which a solver's module may precede

        self._cell = cell
        problem = {"eps": cell.eps, "cost_scale": cell.cost_scale}
        self._f, self._g = converged_potentials(clouds, device=cell.device, **problem)
        self._v = np.random.default_rng([cell.seed, cell.n, cell.d]).standard_normal((cell.n, cell.d))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """f [n], g [m], v [n, d] as solvers get them, in the cell's dtype."""
        return tuple(values.astype(self._cell.dtype) for values in (self._f, self._g, self._v))

    def error(self, clouds: Clouds, h_x: np.ndarray) -> float:
        """|h_x - reference| / |reference|, Frobenius. ValueError for a wrong shape or values that are not finite."""
        from fsbench.reference import hessian_product

        if np.shape(h_x) != clouds.x.shape:
            raise ValueError(f"h_x has shape {np.shape(h_x)}, its points {clouds.x.shape}")
        if not np.isfinite(h_x).all():
            raise ValueError(f"h_x is not finite on {np.count_nonzero(~np.isfinite(h_x).all(1))} of {len(h_x)} points")
        cell = self._cell
        v = self.arrays[2]
        want = hessian_product(
            clouds, self._f, self._g, v, eps=cell.eps, cost_scale=cell.cost_scale, device=cell.device
        )
        return float(np.linalg.norm(h_x - want) / np.linalg.norm(want))


class AtPotentials:
    """A solver whose `solve` is its Hessian product at given potentials f [n], g [m] along v [n, d]."""

    def __init__(self, solver: HessianSolver, f: Any, g: Any, v: Any) -> None:
        self._solver, self._arguments, self.framework = solver, (f, g, v), solver.framework

    def supports(self, spec: Spec, budget: Budget) -> None:
        self._solver.supports(spec, budget)

    def prepare(self, spec: Spec, budget: Budget) -> None:
        self._solver.prepare(spec, budget)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        assert isinstance(budget, ToResidual)
        return self._solver.hvp(problem, *self._arguments, budget)

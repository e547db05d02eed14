"""What the task divergence adds to a measurement: the value, the potentials of the self problems, and their score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsbench.api import Cell, Clouds, Solution
from fsbench.frameworks import Backend
from fsbench.records import Record

if TYPE_CHECKING:
    from fsbench.metrics import Score


@dataclass(frozen=True)
class KeptDivergence:
    """value: the Sinkhorn divergence as the solver returned it. of_x, of_y: potentials (f, g) of OT_eps of that cloud
    with itself, in host memory.
    """

    value: float
    of_x: tuple[np.ndarray, np.ndarray]
    of_y: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, solution: Solution, backend: Backend) -> KeptDivergence:
        """ValueError unless the solution has a finite scalar value and the self problems' potentials."""
        if solution.value is None or solution.self_potentials is None:
            raise ValueError(
                "task divergence: the solution must hold value and self_potentials; or raise Unsupported in supports"
            )
        value = backend.host(solution.value)
        if value.size != 1 or not np.isfinite(value).all():
            raise ValueError(f"value must be one finite number, got shape {value.shape}: {value.ravel()[:3]}")
        of_x, of_y = ((backend.host(f), backend.host(g)) for f, g in solution.self_potentials)
        return cls(value.item(), of_x, of_y)

    def columns(self, cell: Cell, clouds: Clouds, pair: Score) -> Record:
        """The value and its error: to the same combination of the three dual values, of the solver's own potentials
        and in float64, relative; `pair` is the score of OT_eps(a, b). A reference that is exactly zero counts as eps.

        Raises ValueError as `score` does, and where a self problem's plan overflows.
        """
        from fsbench.metrics import score  # brings torch, which a solver's module may precede

        x, y, a, b = clouds.x, clouds.y, clouds.a, clouds.b
        own = [
            score(cloud, *potentials, eps=cell.eps, cost_scale=cell.cost_scale, device=cell.device)
            for cloud, potentials in ((Clouds(x, x, a, a), self.of_x), (Clouds(y, y, b, b), self.of_y))
        ]
        residual = max(scored.residual_l1 for scored in own)
        if not math.isfinite(residual):
            raise ValueError("the potentials of a self problem are finite, but their plan overflows float64")
        reference = pair.dual_value - sum(scored.dual_value for scored in own) / 2
        return {
            "value": self.value,
            "value_rel_err": abs(self.value - reference) / (abs(reference) or cell.eps),
            "self_residual_l1": residual,
        }

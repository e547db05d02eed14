"""Solvers of known cost or known mistakes for the tests of one cell, and a small cell made and measured."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp

from fsbench.api import (
    Budget,
    Cell,
    Clouds,
    FixedIterations,
    Framework,
    Problem,
    Solution,
    Spec,
    Task,
    Timing,
    ToResidual,
    TracePoint,
    Unsupported,
)
from fsbench.cell import Measurement
from fsbench.records import Record, check_record, describe

QUICK = Timing(1, 0.0, 1, 3, 5, 0.0, 10.0, slope=False, memory=False)
ONCE = Timing(1, 0.0, 1, 1, 1, 0.0, 10.0, slope=False, memory=True)
TEN = FixedIterations(10)


class Fake:
    """A solver of known cost and no worth; remembers its calls."""

    framework = Framework.TORCH

    def __init__(self, *, solve_s: float = 0.0, first_s: float = 0.0, per_iteration_s: float = 0.0) -> None:
        self.solve_s, self.first_s, self.per_iteration_s = solve_s, first_s, per_iteration_s
        self.calls: list[str] = []
        self.budgets: list[Budget] = []
        self.took_s: list[float] = []

    def supports(self, spec: Spec, budget: Budget) -> None: ...

    def prepare(self, spec: Spec, budget: Budget) -> None:
        self.calls.append("prepare")

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        first = "solve" not in self.calls
        self.calls.append("solve")
        self.budgets.append(budget)
        iterations = budget.iterations if isinstance(budget, FixedIterations) else 1
        begin = time.perf_counter()
        time.sleep(self.solve_s + self.per_iteration_s * iterations + first * self.first_s)
        self.took_s.append(time.perf_counter() - begin)
        return Solution(problem.a, problem.b, iterations, 2.0 * iterations)


class Allocates(Fake):
    def solve(self, problem: Problem, budget: Budget) -> Solution:
        block = torch.ones(64 << 17, dtype=torch.float64)  # 64 MiB
        return Solution(problem.a * block[0], problem.b, 1, 2.0)


class InJax(Fake):
    framework = Framework.JAX

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        import jax.numpy as jnp

        assert problem.x.dtype == jnp.float64  # the harness switches x64 on for float64 cells
        cost = ((problem.x[:, None] - problem.y[None]) ** 2).sum(-1)
        g = -jnp.log((jnp.exp(-cost) * problem.a[:, None]).sum(0))
        return Solution(jnp.zeros_like(problem.a), g, 1, 1.0)


class Differentiates(Fake):
    """The plan is the product of the weights, and so is its gradient, but for what `wrong` says."""

    def __init__(self, *, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        a, b, x, y, spec = problem.a, problem.b, problem.x, problem.y, problem.spec
        cost = spec.cost_scale * ((x[:, None] - y[None]) ** 2).sum(-1)
        g = -spec.eps * torch.logsumexp(a.log()[:, None] - cost / spec.eps, 0)
        plan = a[:, None] * b * ((g - cost) / spec.eps).exp()
        grad_x = 2 * spec.cost_scale * (plan.sum(1)[:, None] * x - plan @ y)
        grad_y = 2 * spec.cost_scale * (b[:, None] * y - plan.T @ x)
        if self.wrong == "absent":
            return Solution(torch.zeros_like(a), g, 1, 1.0)
        if self.wrong == "nan":
            grad_y[2] = torch.nan
        if self.wrong == "shape":
            grad_x = grad_x.T
        if self.wrong == "value":
            grad_x = 1.25 * grad_x
        return Solution(torch.zeros_like(a), g, 1, 1.0).with_gradients(grad_x, grad_y, passes=2)


class Picky(Fake):
    def supports(self, spec: Spec, budget: Budget) -> None:
        raise Unsupported("only on Tuesdays")


class Sinkhorn(Fake):
    """Plain float64 Sinkhorn, with switches for what a solver may get wrong."""

    def __init__(self, *, most: int = 2000, boasts: bool = False, poison: str = "") -> None:
        super().__init__()
        self.most, self.boasts, self.poison = most, boasts, poison

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        self.calls.append("solve")
        limit = budget.iterations if isinstance(budget, FixedIterations) else budget.max_iterations
        x, y, a, b = (v.numpy().astype(float) for v in (problem.x, problem.y, problem.a, problem.b))
        cost, eps = problem.spec.cost_scale * ((x[:, None] - y[None]) ** 2).sum(-1), problem.spec.eps
        f, g = np.zeros(len(a)), np.zeros(len(b))
        iterations, change = 0, np.inf
        while iterations < min(limit, self.most) and (change > 1e-13 or isinstance(budget, FixedIterations)):
            before, iterations = f, iterations + 1
            f = -eps * logsumexp((g - cost) / eps, axis=1, b=b)
            g = -eps * logsumexp((f[:, None] - cost) / eps, axis=0, b=a[:, None])
            change = np.abs(f - before).max()
        if self.poison == "nan":
            f[0] = np.nan
        if self.poison == "nan without weight":
            f[a == 0] = np.nan
        if self.poison == "overflow":
            f += 1e6
        trace = (TracePoint(iterations, None, 1e-9), TracePoint(iterations, 0.1, float("nan"))) if self.boasts else ()
        f, g = torch.from_numpy(f), torch.from_numpy(g)
        return Solution(f, g, iterations, 2.0 * iterations, self.boasts or None, trace)


class Rounds(Sinkhorn):
    """Solves the points rounded to 2^-4, and says so, at once or later; `drops` so many of them from what it says."""

    def __init__(self, *, drops: int = 0, later: bool = False) -> None:
        super().__init__()
        self.drops, self.later = drops, later

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        x, y = ((16 * points).round() / 16 for points in (problem.x, problem.y))
        solved = x[self.drops :], y
        solution = super().solve(replace(problem, x=x, y=y), budget)
        return replace(solution, solved=(lambda: solved) if self.later else solved)


class Counts(Sinkhorn):
    """Says besides how many pairs it kept."""

    def __init__(self, *, kept: Any = 12.5) -> None:
        super().__init__()
        self.kept = kept

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        return replace(super().solve(problem, budget), stats={"screens": 3, "kept_pairs_per_point": self.kept})


class Curves(Sinkhorn):
    """The exact product by central differences of the plan's gradient, but for what `wrong` says."""

    def __init__(self, *, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def hvp(self, problem: Problem, f: Any, g: Any, v: Any, budget: ToResidual) -> Solution:
        self.calls.append("hvp")
        ends = [self._gradient(replace(problem, x=problem.x + step * v)) for step in (1e-4, -1e-4)]
        h_x = (ends[0] - ends[1]) / 2e-4
        h_x = {"value": 1.25 * h_x, "shape": h_x.T, "nan": h_x * torch.nan, "absent": None}.get(self.wrong, h_x)
        return Solution(f, g, 7, 14.0, True, (TracePoint(7, None, 3e-6),), h_x=h_x)

    def _gradient(self, problem: Problem) -> torch.Tensor:
        found = super().solve(problem, ToResidual(1e-12))
        cost = problem.spec.cost_scale * ((problem.x[:, None] - problem.y[None]) ** 2).sum(-1)
        plan = problem.a[:, None] * problem.b * ((found.f[:, None] + found.g - cost) / problem.spec.eps).exp()
        return 2 * problem.spec.cost_scale * (plan.sum(1)[:, None] * problem.x - plan @ problem.y)


class Diverges(Sinkhorn):
    """Three plain solves, each of the self problems in at most `most_self` iterations, but for what `wrong` says."""

    def __init__(self, *, wrong: str = "", most_self: int = 2000) -> None:
        super().__init__()
        self.wrong, self.most_self = wrong, most_self

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        x, y, a, b = problem.x, problem.y, problem.a, problem.b

        def solve(one: Problem, budget: Budget) -> Solution:
            own = replace(budget, max_iterations=self.most_self) if isinstance(budget, ToResidual) else budget
            return super(Diverges, self).solve(one, budget if len(one.x) != len(one.y) else own)

        clouds = (x, x, a, a), (y, y, b, b), (x, y, a, b)
        solved = [solve(Problem(*cloud, problem.spec), budget) for cloud in clouds]
        if self.wrong == "self":
            solved[0] = replace(solved[0], f=solved[0].f - 0.1)
        duals = [_dual(*cloud, each.f, each.g, problem.spec) for cloud, each in zip(clouds, solved, strict=True)]
        value = duals[2] - duals[0] / 2 - duals[1] / 2
        wrong = {"value": 1.25 * value, "nan": value * torch.nan, "many": value.repeat(2), "absent": None}
        of_x, of_y = ((each.f, each.g) for each in solved[:2])
        own = (of_y, of_x) if self.wrong == "shape" else (of_x, of_y)
        return replace(solved[2], n_passes=60.0, value=wrong.get(self.wrong, value), self_potentials=own)


def _dual(x: Any, y: Any, a: Any, b: Any, f: Any, g: Any, spec: Spec) -> torch.Tensor:
    cost = spec.cost_scale * ((x[:, None] - y[None]) ** 2).sum(-1)
    mass = (a[:, None] * b * ((f[:, None] + g - cost) / spec.eps).exp()).sum()
    return a @ f + b @ g - spec.eps * (mass - 1)


def weightless(*, n: int, m: int, d: int, eps: float, seed: int) -> Clouds:
    rng = np.random.default_rng(seed)
    a = np.append(rng.dirichlet(np.ones(n - 1)), 0.0)
    return Clouds(rng.normal(size=(n, d)), rng.normal(size=(m, d)), a, rng.dirichlet(np.ones(m)))


def make(solver: type | str = Sinkhorn, *, timing: Timing = QUICK, budget: Budget = TEN, **fields: Any) -> Cell:
    """A small cell; `fields` override its own and what is left are the solver's settings."""
    described: dict[str, Any] = {
        "experiment": "test", "solver": "fake", "ladder": (), "matmul_precision": "exact", "problem": "family",
        "problem_target": "fsbench.problems.gaussian.gaussian", "problem_params": {}, "seed": 0, "n": 13, "m": 9,
        "d": 2, "eps": 1.0, "cost_scale": 1.0, "dtype": "float64", "device": "cpu", "timeout_s": 60.0,
        "task": Task.FORWARD,
    }  # fmt: skip
    described |= {name: fields.pop(name) for name in set(fields) & set(described)}
    target = solver if isinstance(solver, str) else f"{solver.__module__}.{solver.__name__}"
    return Cell(solver_target=target, solver_params=fields, timing=timing, budget=budget, **described)


def run(cell: Cell) -> tuple[Measurement, Record]:
    """Measure, and check what comes out against the record's rules."""
    measurement = Measurement(cell)
    measurement.start()
    for _ in range(cell.timing.rounds):
        measurement.sample()
    record = measurement.finish()
    identity = dict.fromkeys(("record_id", "run_id", "code_id", "env_id", "started_at"), "x") | {"attempt": 1}
    check_record(describe(cell) | identity | record)
    json.dumps(record, allow_nan=False)
    return measurement, record

"""Every solver of conf/solver, on every device of this machine, behind one small driver."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small problems, and pytest runs several processes
os.environ.setdefault("POT_BACKEND_DISABLE_JAX", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_ENABLE_X64", "1")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # two processes that compile one formula at once break each other
    os.environ.setdefault("KEOPS_CACHE_FOLDER", str(Path.home() / ".cache" / "keops-tests" / worker))

import solvers.common.keops_runtime  # noqa: F401  # isort: skip  # before torch

try:
    import keopscore  # isort: skip
except ImportError:
    pass
else:  # g++ takes half as long where it optimises nothing, and a formula for each dimension is compiled
    keopscore.config.cpp_flags = keopscore.config.cpp_flags.replace("-O3", "-O0").replace("-flto=auto", "")

import importlib
import importlib.metadata
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ot_reference import Scored, cost_matrix, score

from fsbench.api import Budget, Framework, Problem, Solution, Spec, Task, ToResidual, Unsupported

SOLVERS = Path(__file__).parents[2] / "conf" / "solver"
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
if DEVICES == ["cpu"]:  # XLA compiles for every shape here, which takes half as long where LLVM optimises nothing
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


@dataclass(frozen=True)
class Outcome:
    """One solve: what the solver returned, and what float64 numpy says of it on the clouds as given."""

    solution: Solution
    scored: Scored
    inputs: tuple[np.ndarray, ...]
    slack: float  # how far the value may be from OT_eps: see Driver.solve

    @property
    def f(self) -> np.ndarray:
        return host(self.solution.f)

    @property
    def g(self) -> np.ndarray:
        return host(self.solution.g)

    @property
    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        return host(self.solution.grad_x), host(self.solution.grad_y)


@dataclass(frozen=True)
class Driver:
    """Builds and runs one solver of conf/solver as the harness does, its ladder included."""

    name: str
    device: str
    target: str
    params: dict[str, Any]
    ladder: list[dict[str, Any]]
    rounded: bool  # operands of products, of one cloud at least, have 10-bit mantissas
    _built: dict[str, Any] = field(default_factory=dict)

    def build(self, rung: dict[str, Any] | None = None) -> Any:
        key = repr(rung)
        if key not in self._built:
            module, name = self.target.rsplit(".", 1)
            params = {**self.params, **(rung or {})}
            if "autotune" in params:
                params["autotune"] = False  # changes speed only, and takes minutes over the many shapes here
            self._built[key] = getattr(importlib.import_module(module), name)(**params)
        return self._built[key]

    @property
    def unit(self) -> float:
        """Relative rounding of the coordinates this solver computes with, float32 inputs."""
        return 2.0**-11 if self.rounded else 2.0**-24

    def spec(
        self, x, y, eps: float, cost_scale: float = 1.0, dtype: str = "float32", task: Task = Task.FORWARD
    ) -> Spec:
        return Spec(len(x), len(y), x.shape[1], eps, cost_scale, dtype, self.device, task)

    def array(self, values: np.ndarray, framework: Framework) -> Any:
        if framework == Framework.TORCH:
            return torch.from_numpy(values.copy()).to(self.device)
        import jax

        return jax.device_put(values.copy(), jax.devices(self.device)[0])

    def problem(self, solver: Any, x, y, a, b, spec: Spec) -> Problem:
        x, y, a, b = (self.array(v, solver.framework) for v in (x, y, a, b))
        return Problem(x, y, a, b, spec)

    def solve(
        self,
        x,
        y,
        a=None,
        b=None,
        *,
        eps: float,
        budget: Budget | None = None,
        cost_scale=1.0,
        dtype="float32",
        task: Task = Task.FORWARD,
    ) -> Outcome:
        """Solve to a residual of 1e-4 unless told otherwise; skips what the solver says it does not support.

        A solver with a ladder gets its cheapest rung, then its dearest if the residual does not pass.
        slack: a plan with L1 residual r can be made feasible by moving mass r, each at a cost of at most max C plus
        the entropy of spreading it; rounding errors of the cost are a few units of the largest centred square.
        """
        budget = budget or ToResidual(1e-4, max_iterations=4000)
        a = np.full(len(x), 1 / len(x)) if a is None else a
        b = np.full(len(y), 1 / len(y)) if b is None else b
        x, y, a, b = inputs = tuple(np.ascontiguousarray(v, dtype=dtype) for v in (x, y, a, b))
        spec = self.spec(x, y, eps, cost_scale, dtype, task)
        climbs = bool(self.ladder) and isinstance(budget, ToResidual)
        best: Outcome | None = None
        for rung in (self.ladder[0], self.ladder[-1]) if climbs else (None,):
            solver = self.build(rung)
            try:
                solver.supports(spec, budget)
            except Unsupported as reason:
                pytest.skip(str(reason))
            solver.prepare(spec, budget)
            problem = self.problem(solver, x, y, a, b, spec)
            solution = solver.solve(problem, budget)
            scored = score(host(solution.f), host(solution.g), *inputs, eps=eps, cost_scale=cost_scale)
            outcome = Outcome(solution, scored, inputs, self._slack(scored, inputs, eps, cost_scale, dtype))
            if best is None or scored.residual < best.scored.residual:
                best = outcome
            if isinstance(budget, ToResidual) and scored.residual <= budget.tol:
                break
        assert best is not None
        return best

    def rounding(self, inputs, cost_scale: float, dtype: str) -> float:
        """Error of one cost value as this solver computes it, weighted points only."""
        x, y, a, b = (v.astype(float) for v in inputs)
        centre = (a @ x + b @ y) / 2
        square = max(np.square(x[a > 0] - centre).sum(1).max(), np.square(y[b > 0] - centre).sum(1).max())
        return 16 * cost_scale * square * (2.0**-53 if dtype == "float64" else self.unit)

    def _slack(self, scored: Scored, inputs, eps: float, cost_scale: float, dtype: str) -> float:
        x, y, a, b = inputs
        largest = cost_matrix(x[a > 0], y[b > 0], cost_scale).max()
        spread = eps * np.log(len(x) * len(y) + 1)
        machine = 16 * float(np.finfo(dtype).eps) * (largest + eps)
        return 2 * scored.residual * (largest + spread) + self.rounding(inputs, cost_scale, dtype) + machine


def host(array: Any) -> np.ndarray:
    """A float64 copy in host memory, whatever the framework."""
    return np.asarray(array.cpu().numpy() if isinstance(array, torch.Tensor) else array).astype(float)


def missing_requirement(requires: list[str]) -> str | None:
    """The first distribution of `requires` that is not installed."""
    for name in requires:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return name
    return None


@pytest.fixture(
    scope="session", params=[(path, device) for path in sorted(SOLVERS.glob("*.yaml")) for device in DEVICES],
    ids=lambda p: f"{p[0].stem}-{p[1]}",
)  # fmt: skip
def driver(request) -> Driver:
    path, device = request.param
    conf = yaml.safe_load(path.read_text())
    if missing := missing_requirement(conf.get("requires", [])):
        pytest.skip(f"{missing} is not installed")
    rounded = conf["matmul_precision"] in ("fast", "mixed")
    return Driver(path.stem, device, conf["_target_"], conf.get("params") or {}, conf.get("ladder") or [], rounded)

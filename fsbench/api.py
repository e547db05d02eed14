"""What a solver is given and what it returns. Standard library and numpy only.

Convention, everywhere: C_ij = cost_scale * |x_i - y_j|^2, eps in units of C, and potentials (f, g) with
P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps). Adapters translate from their library's own convention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

PRODUCT_MARGIN = 10.0  # a Hessian product may be this many times less accurate than the tolerance of its linear system


class Unsupported(Exception):
    """Raised by `Solver.supports` with the reason why this solver cannot take this problem."""


class Framework(StrEnum):
    """Whose arrays a solver takes; picks conversion, synchronisation and allocator statistics."""

    TORCH = "torch"
    JAX = "jax"


class Task(StrEnum):
    """What a timed call computes."""

    FORWARD = "forward"  # the potentials
    FORWARD_BACKWARD = "forward_backward"  # and the gradient of OT_eps in both clouds
    HVP = "hvp"  # the Hessian of OT_eps in x times a direction, at converged potentials that are given
    DIVERGENCE = "divergence"  # the value OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2, without any gradient


@dataclass(frozen=True)
class FixedIterations:
    """Exactly `iterations` iterations, no stopping rule. One iteration updates both potentials."""

    iterations: int

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")


@dataclass(frozen=True)
class ToResidual:
    """Stop when max(|P1 - a|_1, |P^T 1 - b|_1) <= tol, of each problem where a task has several, or at a limit; the
    seconds are those of all together."""

    tol: float
    max_iterations: int = 10_000
    max_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not self.tol > 0:
            raise ValueError(f"tol must be positive, got {self.tol}")
        if self.max_iterations < 1 or not self.max_seconds > 0:
            raise ValueError("max_iterations and max_seconds must be positive")


Budget = FixedIterations | ToResidual


@dataclass(frozen=True)
class Spec:
    """All that `supports` and `prepare` see of a problem: no values, so nothing of the data is prepared untimed."""

    n: int
    m: int
    d: int
    eps: float
    cost_scale: float
    dtype: str  # "float32" or "float64"
    device: str  # "cpu" or "cuda"
    task: Task = Task.FORWARD


@dataclass(frozen=True)
class Problem:
    """One entropic OT problem in the solver's own framework and on its device.

    x [n, d], y [m, d] points; a [n], b [m] non-negative weights, each summing to one.
    """

    x: Any
    y: Any
    a: Any
    b: Any
    spec: Spec


@dataclass(frozen=True)
class TracePoint:
    """One point of a solver's own convergence trace; `seconds` since `solve` began, None where it cannot be known."""

    iteration: int
    seconds: float | None
    residual: float


@dataclass(frozen=True)
class Solution:
    """Potentials f [n], g [m] in the common convention, and what the solver believes of them.

    n_passes counts sweeps over all n * m pairs: a half-step is one pass, a fused row and column update also one.
    `converged` is None where the solver has no stopping rule of its own.
    grad_x [n, d], grad_y [m, d]: gradient of OT_eps in the clouds at these potentials, by the envelope theorem, if
    the task asks for it: 2 cost_scale (r_i x_i - (P y)_i), r = P 1, and likewise in y; or with each row normalised by
    its own sum, 2 cost_scale a_i (x_i - (P y)_i / r_i). The two agree at convergence; either will do.
    h_x [n, d]: the Hessian product, if that is the task; iterations, convergence and trace are then those of its linear
    system, the trace's residuals relative to the right-hand side.
    value, self_potentials: the Sinkhorn divergence as a scalar, and pairs (f [n], g [n]) and (f [m], g [m]) of each
    cloud's OT_eps with itself, if that is the task; f, g are then those of OT_eps(a, b), n_iterations of each of the
    three problems, None where they differ, n_passes of all together, each over its own pairs, and `converged` of all.
    solved: points x [n, d], y [m, d] that a solver put in the place of those given, as by rounding, where it can tell;
    or what makes them, called once no clock runs. The residual is judged on those given, and on these besides.
    stats: what else the solver counted, finite numbers by name, for reports that know these names.
    """

    f: Any
    g: Any
    n_iterations: int | None
    n_passes: float | None
    converged: bool | None = None
    trace: tuple[TracePoint, ...] = ()
    grad_x: Any = None
    grad_y: Any = None
    h_x: Any = None
    value: Any = None
    self_potentials: tuple[tuple[Any, Any], tuple[Any, Any]] | None = None
    solved: tuple[Any, Any] | Callable[[], tuple[Any, Any]] | None = None
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """All that the device may still be working on."""
        made = None if callable(self.solved) else self.solved
        return self.f, self.g, self.grad_x, self.grad_y, self.h_x, self.value, self.self_potentials, made

    def with_gradients(self, grad_x: Any, grad_y: Any, *, passes: float) -> Solution:
        """This solution with its gradients, which took so many more passes over all pairs."""
        total = None if self.n_passes is None else self.n_passes + passes
        return replace(self, grad_x=grad_x, grad_y=grad_y, n_passes=total)


class Solver(Protocol):
    """One class a solver. Constructor arguments are its settings, as the yaml in conf/solver gives them."""

    framework: Framework

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Raise `Unsupported` with the reason if this problem, task or kind of budget cannot be run."""

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile, autotune, allocate. Untimed; sees no values."""

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        """Timed. Everything that depends on the data belongs here."""


class HessianSolver(Solver, Protocol):
    """A solver that also has the task hvp."""

    def hvp(self, problem: Problem, f: Any, g: Any, v: Any, budget: ToResidual) -> Solution:
        """Timed. The Hessian of OT_eps in x times v [n, d], at converged potentials f [n], g [m] in the common
        convention. budget.tol: relative residual of the linear system. Returns f and g as given, and h_x.
        """


@dataclass(frozen=True)
class Clouds:
    """A problem family's output: float64 numpy arrays x [n, d], y [m, d], a [n], b [m].

    optimal_value is the exact OT_eps (full cost, KL to a x b) where a closed form exists, else None.
    """

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    optimal_value: float | None = None


@dataclass(frozen=True)
class Timing:
    """How one cell is measured; conf/timing names the presets.

    Warm until `warmup_calls` calls and `warmup_seconds`; then `rounds` rounds, interleaved over the solvers of a
    comparison, that together take min_samples to max_samples samples in about `sample_seconds`. A cell whose warm
    solve takes longer than `slow_seconds` is sampled once a round.
    """

    warmup_calls: int = 3
    warmup_seconds: float = 0.5
    rounds: int = 2
    min_samples: int = 5
    max_samples: int = 50
    sample_seconds: float = 2.0
    slow_seconds: float = 10.0
    slope: bool = True  # fixed iterations only: time k // 2 as well, so set-up does not leak into per-iteration time
    memory: bool = True
    counters: bool = False  # hardware counters through Nsight Compute, where a GPU and the tool are there


@dataclass(frozen=True)
class Cell:
    """One planned measurement: solver x problem x size x eps x budget. Travels to the worker as JSON."""

    experiment: str
    solver: str
    solver_target: str
    solver_params: dict[str, Any]
    ladder: tuple[dict[str, Any], ...]  # for a solver without a stopping rule: settings tried from cheap to dear
    matmul_precision: str
    problem: str
    problem_target: str
    problem_params: dict[str, Any]
    seed: int
    n: int
    m: int
    d: int
    eps: float
    cost_scale: float
    dtype: str
    device: str
    budget: Budget
    timing: Timing
    timeout_s: float | None  # None: no limit
    requires: tuple[str, ...] = field(default=())  # distributions the solver needs, for doctor's advice
    task: Task = Task.FORWARD

    @property
    def spec(self) -> Spec:
        return Spec(self.n, self.m, self.d, self.eps, self.cost_scale, self.dtype, self.device, self.task)

    @property
    def group_id(self) -> str:
        """Same for all cells that differ in the solver alone: these are compared, and sampled in turn."""
        keys = ("problem_target", "problem_params", "seed", "n", "m", "d", "eps", "cost_scale", "dtype", "device")
        # Identities of forward cells are older than tasks, and stay.
        task = {} if self.task is Task.FORWARD else {"task": self.task}
        return _digest({k: getattr(self, k) for k in keys} | {"budget": budget_to_dict(self.budget)} | task)

    @property
    def cell_id(self) -> str:
        """Identity of the measurement: everything that can change its numbers; no label, no deadline."""
        keys = ("solver_target", "solver_params", "ladder")
        described = {k: getattr(self, k) for k in keys} | {"timing": asdict(self.timing), "group": self.group_id}
        return _digest(described)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"budget": budget_to_dict(self.budget)})

    @classmethod
    def from_json(cls, text: str) -> Cell:
        raw = json.loads(text)
        raw["budget"] = budget_from_dict(raw["budget"])
        raw["timing"] = Timing(**raw["timing"])
        raw["ladder"] = tuple(raw["ladder"])
        raw["requires"] = tuple(raw["requires"])
        raw["task"] = Task(raw["task"])
        return cls(**raw)


def budget_to_dict(budget: Budget) -> dict[str, Any]:
    kind = "fixed_iterations" if isinstance(budget, FixedIterations) else "to_residual"
    return {"kind": kind, **asdict(budget)}


def budget_from_dict(raw: dict[str, Any]) -> Budget:
    """Inverse of `budget_to_dict`. ValueError if `kind` is not a known budget."""
    fields = dict(raw)
    kind = fields.pop("kind", None)
    if kind == "fixed_iterations":
        return FixedIterations(**fields)
    if kind == "to_residual":
        return ToResidual(**fields)
    raise ValueError(f"budget.kind must be fixed_iterations or to_residual, got {kind!r}")


def _digest(described: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

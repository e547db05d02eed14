"""Measure one cell: import, prepare, warm up, sample in rounds, a memory pass of its own, then score.

Runs inside a worker. `Measurement` raises whatever goes wrong; `cell_failure` turns that into record columns. Importing
this module loads no framework: the solver's own module comes first, for it may have to load libraries that must precede
torch's.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fsbench.api import (
    PRODUCT_MARGIN,
    Budget,
    Cell,
    Clouds,
    FixedIterations,
    Framework,
    HessianSolver,
    Problem,
    Solution,
    Solver,
    Task,
    ToResidual,
    Unsupported,
)
from fsbench.cell_divergence import KeptDivergence
from fsbench.cell_hessian import AtPotentials, HessianPoint
from fsbench.cell_inputs import arrays_of, clouds_of, input_hash, load_target
from fsbench.clock import evict_l2, time_solve
from fsbench.frameworks import Backend, backend
from fsbench.memory import HostLoad, PeakMemory, energy_j, gpu_state
from fsbench.records import Phase, Record, Status
from fsbench.stats import quartiles

if TYPE_CHECKING:
    from fsbench.metrics import Score

ENERGY_WINDOW_S = 1.0  # the GPU's energy counter moves in steps of up to a tenth of a second


class InvalidSolution(Exception):
    """The solver returned potentials that cannot be scored."""


@dataclass(frozen=True)
class _Kept:
    """The part of a `Solution` that scoring needs, in host memory."""

    f: np.ndarray
    g: np.ndarray
    gradients: tuple[np.ndarray, np.ndarray] | None
    h_x: np.ndarray | None
    divergence: KeptDivergence | None
    solved: tuple[np.ndarray, np.ndarray] | None
    said: Solution


@dataclass(frozen=True)
class _Rung:
    """One rung of a ladder, warm: what it costs and whether it converges."""

    params: dict[str, Any]
    solver: Solver
    first_call_s: float
    seconds: float
    residual: float

    def passes(self, tol: float) -> bool:
        return self.residual <= tol


class Measurement:
    """One cell in three steps: `start` once, `sample` once a round, `finish` after any of them. `phase`: which is on.

    Between the steps the framework's caches are empty, so that other solvers' workers find room on the same GPU.
    """

    phase: Phase
    _backend: Backend
    _solver: Solver
    _clouds: Clouds
    _problem: Problem
    _kept: _Kept
    _gpu_state: Record
    _point: HessianPoint  # task hvp only

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.phase = Phase.IMPORT
        self._rungs: list[_Rung] = []
        self._first_call_s = math.nan
        self._last_s = math.inf
        self._seconds: list[float] = []
        self._device_seconds: list[float] = []
        self._half_seconds: list[float] = []
        self._load = HostLoad()
        self._judged: Record | None = None

    @property
    def _half(self) -> FixedIterations | None:
        """The shorter budget of the slope, or None where per-iteration time is not asked for or has no meaning."""
        budget = self.cell.budget
        if not (isinstance(budget, FixedIterations) and self.cell.timing.slope and budget.iterations >= 2):
            return None
        return FixedIterations(budget.iterations // 2)

    def start(self) -> None:
        """Everything before the first sample: import, inputs, compilation, warm-up, choice of the ladder's rung."""
        cell = self.cell
        solver_class = load_target(cell.solver_target)
        is_ladder = bool(cell.ladder) and isinstance(cell.budget, ToResidual)
        settings = [{**cell.solver_params, **rung} for rung in cell.ladder] if is_ladder else [cell.solver_params]
        solvers = [solver_class(**params) for params in settings]
        self._solver = solvers[0]
        self._solver.supports(cell.spec, cell.budget)
        if cell.task is Task.HVP and not hasattr(self._solver, "hvp"):
            raise Unsupported("no Hessian-vector product in this solver or its adapter")
        self.phase = Phase.PREPARE
        self._backend = backend(self._solver.framework, cell.device, cell.dtype)
        self._clouds = clouds_of(cell)
        x, y, a, b = (self._backend.array(v) for v in arrays_of(self._clouds))
        self._problem = Problem(x, y, a, b, cell.spec)
        if cell.task is Task.HVP:
            self._point = HessianPoint(cell, self._clouds)
            self._solver = AtPotentials(
                cast(HessianSolver, self._solver), *map(self._backend.array, self._point.arrays)
            )
        evict_l2(cell.device)  # its own start-up must not count as the solver's first call
        if is_ladder:
            self._climb(settings, solvers)
        else:
            self._warm_up()
        if self._half:
            self._solver.prepare(cell.spec, self._half)
            self.solve(self._half)
        self._backend.empty_cache()

    def _climb(self, settings: list[dict[str, Any]], solvers: list[Solver]) -> None:
        """Warm and score the rungs from cheap to dear; keep the first whose residual passes, else the best one."""
        assert isinstance(self.cell.budget, ToResidual)
        tol = self.cell.budget.tol
        for params, solver in zip(settings, solvers, strict=True):
            self._solver = solver
            solver.supports(self.cell.spec, self.cell.budget)
            kept = self._keep(self._warm_up())
            scored = self._score(kept)
            residual = _worst_residual(scored, self._divergence_columns(kept, scored))
            self._rungs.append(_Rung(params, solver, self._first_call_s, self._last_s, residual))
            self._backend.empty_cache()
            if self._rungs[-1].passes(tol):
                break
        chosen = min(self._rungs, key=lambda r: (not r.passes(tol), r.residual))
        self._solver, self._first_call_s, self._last_s = chosen.solver, chosen.first_call_s, chosen.seconds

    def _warm_up(self) -> Solution:
        """Solve until warm; the cold first call, compilation included, is timed on its own."""
        timing, budget = self.cell.timing, self.cell.budget
        self.phase = Phase.PREPARE
        begin = time.perf_counter()
        self._solver.prepare(self.cell.spec, budget)
        self.phase = Phase.WARMUP
        timed = time_solve(self._solver, self._problem, budget, self._backend)
        self._first_call_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for calls in itertools.count(1):
            self._last_s = timed.seconds
            warm = calls >= timing.warmup_calls and time.perf_counter() - begin >= timing.warmup_seconds
            if warm or timed.seconds > timing.slow_seconds:
                return timed.solution
            timed = time_solve(self._solver, self._problem, budget, self._backend)
        raise AssertionError("unreachable")

    def solve(self, budget: Budget | None = None) -> Solution:
        """One solve outside every clock, finished when this returns."""
        solution = self._solver.solve(self._problem, budget or self.cell.budget)
        self._backend.wait(solution.outputs)
        return solution

    def sampled(self, seconds: float) -> None:
        """Called after each sample of the full budget; a subclass may pass it on."""

    def sample(self) -> None:
        """One round: its share of the samples, the shorter budget of the slope in turn with the full one."""
        self.phase = Phase.TIME
        timing, half = self.cell.timing, self._half
        at_least = math.ceil(timing.min_samples / timing.rounds)
        at_most = max(at_least, timing.max_samples // timing.rounds)
        if self._last_s <= timing.slow_seconds:
            self.solve()  # refills the caches that were emptied after the last step
        with self._load:
            begin = time.perf_counter()
            for count in itertools.count(1):
                timed = time_solve(self._solver, self._problem, self.cell.budget, self._backend)
                self._seconds.append(timed.seconds)
                self.sampled(timed.seconds)
                if timed.device_seconds is not None:
                    self._device_seconds.append(timed.device_seconds)
                if half:
                    self._half_seconds.append(time_solve(self._solver, self._problem, half, self._backend).seconds)
                enough = count >= at_least and time.perf_counter() - begin >= timing.sample_seconds / timing.rounds
                if enough or count >= at_most or timed.seconds > timing.slow_seconds:
                    break
        self._gpu_state = gpu_state(self.cell.device)
        self._last_s = timed.seconds
        self._kept = self._keep(timed.solution)
        del timed
        self._backend.empty_cache()

    def finish(self) -> Record:
        """The record's columns of this measurement, without identity. `sample` must have run at least once.

        Solutions are judged once, by the first call; a later one adds the samples since.

        Raises InvalidSolution if the potentials are not finite where there is weight, or their plan overflows.
        """
        if self._judged is None:
            self._judged = self._judge()
        self.phase = Phase.SCORE
        reached, in_time = self._judged["residual_reached"], True
        if isinstance(self.cell.budget, ToResidual):
            in_time = quartiles(self._seconds).median <= self.cell.budget.max_seconds
        return {
            **self._judged,
            "status": Status.NOT_CONVERGED.value if reached is False or not in_time else Status.OK.value,
            "status_detail": None if in_time else "the solve took longer than max_seconds",
            "phase": self.phase.value,
            **self._time_columns(),
            "host_load_cpus": self._load.cpus,
            **self._gpu_state,
        }

    def _judge(self) -> Record:
        """What does not depend on how many samples were taken: memory and quality."""
        self.phase = Phase.MEMORY
        memory = self._memory_pass() if self.cell.timing.memory else {}
        self.phase = Phase.SCORE
        scored = self._score(self._kept)
        divergence = self._divergence_columns(self._kept, scored)
        product_error = None if self._kept.h_x is None else self._product_error(self._kept.h_x)
        reached = None
        if isinstance(self.cell.budget, ToResidual):
            worst = _worst_residual(scored, divergence)
            reached = worst <= self.cell.budget.tol  # all pairs: nothing left out to add to it
            if product_error is not None:
                reached = product_error <= PRODUCT_MARGIN * self.cell.budget.tol
        return {
            "framework": self._solver.framework.value,
            "input_hash": input_hash(self._clouds),
            "input_bytes": sum(v.nbytes for v in arrays_of(self._clouds)),
            "residual_reached": reached,
            "residual_solved_l1": self._residual_as_solved(),
            "ladder": self._ladder_column(),
            **self._quality_columns(scored, reached=bool(reached)),
            "gradient_rel_err": self._gradient_error(),
            "hvp_rel_err": product_error,
            **divergence,
            **memory,
        }

    def _memory_pass(self) -> Record:
        """Peak memory and energy of solves from empty caches, with no flush buffer alive."""
        device = self.cell.device
        self._backend.empty_cache()
        self._backend.reset_peak()
        with PeakMemory(device, idle_bytes=self._backend.idle_bytes()) as peak:
            joules, begin, calls = energy_j(device), time.perf_counter(), 0
            while calls == 0 or (joules is not None and time.perf_counter() - begin < ENERGY_WINDOW_S):
                self.solve()
                calls += 1
            after = energy_j(device)
        allocated = self._backend.peak_alloc_bytes()
        # A pool that an earlier, larger cell filled hides this cell's own need: then neither number is known.
        on_device = peak.peak_device_bytes if allocated is not None else None
        self._backend.empty_cache()
        return {
            "peak_alloc_bytes": allocated,
            "peak_device_bytes": on_device,
            "peak_host_bytes": self._host_peak(peak.peak_host_bytes),
            "energy_j": None if joules is None or after is None else (after - joules) / calls,
        }

    def _host_peak(self, seen_bytes: int) -> int | None:
        """None where the solve found pages that its process already had, as JAX on the CPU does after its warm-up."""
        if self._solver.framework is Framework.JAX and self.cell.device == "cpu":
            return None
        return seen_bytes or None

    def _keep(self, solution: Solution) -> _Kept:
        if not isinstance(solution, Solution):
            raise InvalidSolution(f"solve must return a fsbench.api.Solution, got {type(solution).__name__}")
        f, g = self._backend.host(solution.f), self._backend.host(solution.g)
        gradients = None
        if self.cell.task is Task.FORWARD_BACKWARD:
            if solution.grad_x is None or solution.grad_y is None:
                raise InvalidSolution(
                    "task forward_backward: the solution must hold grad_x and grad_y; or raise Unsupported in supports"
                )
            gradients = self._backend.host(solution.grad_x), self._backend.host(solution.grad_y)
        h_x = None
        if self.cell.task is Task.HVP:
            if solution.h_x is None:
                raise InvalidSolution("task hvp: the solution must hold h_x")
            h_x = self._backend.host(solution.h_x)
        divergence = None
        if self.cell.task is Task.DIVERGENCE:
            with _scoring():
                divergence = KeptDivergence.of(solution, self._backend)
        _check_stats(solution.stats)
        counted = (solution.n_iterations, solution.n_passes, solution.converged, solution.trace)
        said = Solution(None, None, *counted, stats=solution.stats)
        solved = None
        if solution.solved is not None:
            x, y = solution.solved() if callable(solution.solved) else solution.solved
            solved = self._backend.host(x), self._backend.host(y)
        return _Kept(f, g, gradients, h_x, divergence, solved, said)

    def _score(self, kept: _Kept, clouds: Clouds | None = None) -> Score:
        """On the points as given unless told otherwise."""
        from fsbench.metrics import score  # brings torch: see the module's docstring

        cell, clouds = self.cell, clouds or self._clouds
        with _scoring():
            scored = score(clouds, kept.f, kept.g, eps=cell.eps, cost_scale=cell.cost_scale, device=cell.device)
        if not math.isfinite(scored.residual_l1):
            raise InvalidSolution("f and g are finite, but their plan overflows float64: the residual is infinite")
        return scored

    def _residual_as_solved(self) -> float | None:
        """On the points that the solver put in the place of those given, if it tells them."""
        if self._kept.solved is None:
            return None
        x, y = self._kept.solved
        if x.shape != self._clouds.x.shape or y.shape != self._clouds.y.shape:
            raise InvalidSolution(f"solved must hold points of the shapes given, got {x.shape} and {y.shape}")
        return self._score(self._kept, Clouds(x, y, self._clouds.a, self._clouds.b)).residual_l1

    def _gradient_error(self) -> float | None:
        """InvalidSolution if a gradient has the wrong shape or is not finite where there is weight."""
        if self._kept.gradients is None:
            return None
        from fsbench.metrics_gradient import gradient_error  # brings torch

        cell, kept = self.cell, self._kept
        error = partial(gradient_error, eps=cell.eps, cost_scale=cell.cost_scale, device=cell.device)
        with _scoring():
            return _finite(error(self._clouds, kept.f, kept.g, *self._kept.gradients))

    def _divergence_columns(self, kept: _Kept, scored: Score) -> Record:
        """InvalidSolution if the potentials of a self problem cannot be scored."""
        if kept.divergence is None:
            return {}
        with _scoring():
            return kept.divergence.columns(self.cell, self._clouds, scored)

    def _product_error(self, h_x: np.ndarray) -> float:
        with _scoring():
            return self._point.error(self._clouds, h_x)

    def _ladder_column(self) -> str | None:
        if not self._rungs:
            return None
        return json.dumps([{"params": r.params, "seconds": r.seconds, "residual": r.residual} for r in self._rungs])

    def _time_columns(self) -> Record:
        cell, said = self.cell, self._kept.said
        summary = quartiles(self._seconds)
        columns: Record = {
            "first_call_s": self._first_call_s,
            "time_to_solution_s": summary.median,
            "time_q25_s": summary.q25,
            "time_q75_s": summary.q75,
            "samples_s": self._seconds,
            "device_time_s": quartiles(self._device_seconds).median if self._device_seconds else None,
        }
        if said.n_passes:
            columns["time_per_pass_s"] = summary.median / said.n_passes
            columns["pairs_per_s"] = cell.n * cell.m * said.n_passes / summary.median
        if self._half and isinstance(cell.budget, FixedIterations):
            iterations = cell.budget.iterations
            gained = summary.median - quartiles(self._half_seconds).median
            slope = gained / (iterations - self._half.iterations)
            setup = summary.median - iterations * slope
            if slope > 0:  # a slope or a set-up below zero is noise: not resolved
                columns |= {"time_per_iteration_s": slope, "setup_s": setup if setup >= 0 else None}
        return columns

    def _quality_columns(self, scored: Score, *, reached: bool) -> Record:
        said, optimal = self._kept.said, self._clouds.optimal_value
        curve = [p for p in said.trace if math.isfinite(p.residual)]
        own = float(curve[-1].residual) if curve else None
        return {
            "n_iterations": said.n_iterations,
            "n_passes": None if said.n_passes is None else float(said.n_passes),
            "residual_l1": scored.residual_l1,
            "residual_row_l1": scored.residual_row_l1,
            "residual_col_l1": scored.residual_col_l1,
            "residual_bound": 0.0,
            "half_step_error": _finite(scored.half_step_error),
            "residual_self": own if self.cell.task is not Task.HVP else None,
            "hvp_residual_self": own if self.cell.task is Task.HVP else None,
            "converged_self": None if said.converged is None else bool(said.converged),
            "dual_value": scored.dual_value,
            "primal_value": scored.primal_value,
            "ref_rel_err": abs(scored.dual_value - optimal) / abs(optimal) if reached and optimal else None,
            "curve": [
                {
                    "iteration": int(p.iteration),
                    "seconds": None if p.seconds is None else float(p.seconds),
                    "residual": float(p.residual),
                }
                for p in curve
            ],
            "solver_stats": json.dumps(dict(said.stats), sort_keys=True) if said.stats else None,
        }


def _check_stats(stats: Mapping[str, float]) -> None:
    for name, value in stats.items():
        if not (isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)):
            raise InvalidSolution(f"stats must hold finite numbers by name, got {name!r}: {value!r}")


@contextmanager
def _scoring() -> Iterator[None]:
    """What cannot be scored is the solver's mistake."""
    try:
        yield
    except ValueError as reason:
        raise InvalidSolution(str(reason)) from reason


def _worst_residual(scored: Score, divergence: Record) -> float:
    """Of all problems solved: a divergence's three, else one."""
    return max(scored.residual_l1, divergence.get("self_residual_l1", 0.0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

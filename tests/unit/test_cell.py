"""Measuring one cell with fake solvers: what is timed, how it is judged, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from fsbench import cell as cell_module
from fsbench import cell_inputs
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
from fsbench.cell import InvalidSolution, Measurement, describe_failure
from fsbench.cell_inputs import clouds_of, input_hash
from fsbench.records import Phase, Record, check_record, describe

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
    target = solver if isinstance(solver, str) else f"{__name__}.{solver.__name__}"
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


def test_first_call_is_kept_apart() -> None:
    """P07: compilation of one second in the first call must not touch a median of 20 ms."""
    _, record = run(make(Fake, first_s=1.0, solve_s=0.02))
    assert record["first_call_s"] == pytest.approx(1.02, rel=0.1)
    assert record["time_to_solution_s"] == pytest.approx(0.02, rel=0.2)
    assert record["time_q25_s"] <= record["time_to_solution_s"] <= record["time_q75_s"]


def test_overhead_is_under_two_percent_of_100_ms() -> None:
    measurement, record = run(make(Fake, solve_s=0.1))
    took = np.median(measurement._solver.took_s[-3:])  # the sleeps of the timed calls, as the machine gave them
    assert took <= record["time_to_solution_s"] <= 1.02 * took


def test_slope_separates_set_up_from_iterations() -> None:
    """P10: one long set-up and short iterations; the median alone would mix them."""
    timing = Timing(1, 0, 2, 6, 6, 0.0, 10.0, slope=True, memory=False)
    cell = make(Fake, solve_s=0.05, per_iteration_s=0.01, budget=FixedIterations(11), timing=timing)
    measurement, record = run(cell)
    assert record["time_to_solution_s"] == pytest.approx(0.16, rel=0.1)
    assert record["time_per_iteration_s"] == pytest.approx(0.01, rel=0.1)
    assert record["setup_s"] == pytest.approx(0.05, rel=0.2)
    assert len(record["samples_s"]) == 6
    assert measurement._solver.calls[:4] == ["prepare", "solve", "prepare", "solve"]
    solved = [budget.iterations for budget in measurement._solver.budgets]
    assert solved == [11, 5] + 2 * [11, *(3 * [11, 5])]  # in turn; each round begins with a solve that is not timed


def test_number_of_samples() -> None:
    one = run(make(Fake, timing=Timing(1, 0, 2, 5, 50, 0.0, 10.0, slope=False, memory=False)))[1]
    assert len(one["samples_s"]) == 6  # min_samples, rounded up to whole rounds
    many = run(make(Fake, timing=Timing(1, 0, 2, 5, 20, 100.0, 10.0, slope=False, memory=False)))[1]
    assert len(many["samples_s"]) == 20
    timing = Timing(3, 9.0, 2, 5, 50, 1.0, 0.01, slope=False, memory=False)
    slow, record = run(make(Fake, solve_s=0.02, timing=timing))
    assert len(record["samples_s"]) == 2  # once a round
    assert slow._solver.calls == ["prepare", "solve", "solve", "solve"]  # warm after the first


def test_a_slow_compilation_does_not_make_a_cell_slow() -> None:
    timing = Timing(3, 0.0, 2, 6, 6, 1.0, 0.1, slope=False, memory=False)
    assert len(run(make(Fake, first_s=0.2, timing=timing))[1]["samples_s"]) == 6


def test_warm_until_calls_and_seconds() -> None:
    def calls(timing: Timing) -> int:
        measurement = Measurement(make(Fake, solve_s=0.01, timing=timing))
        measurement.start()
        return measurement._solver.calls.count("solve")

    assert calls(Timing(4, 0.0, slope=False)) == 4
    assert calls(Timing(1, 0.1, slope=False)) >= 5


def test_fixed_iterations_are_ok_however_far_from_converged() -> None:
    _, record = run(make(budget=FixedIterations(1)))
    assert record["status"] == "ok" and record["residual_reached"] is None
    assert record["residual_l1"] > 1e-3 and record["half_step_error"] < 1e-12
    assert record["n_iterations"] == 1 and record["ref_rel_err"] is None
    assert record["pairs_per_s"] == pytest.approx(13 * 9 * 2 / record["time_to_solution_s"])


def test_convergence_is_the_harness_s_word_not_the_solver_s() -> None:
    boasting = run(make(budget=ToResidual(1e-6, max_iterations=2), boasts=True))[1]
    assert boasting["status"] == "not_converged" and boasting["residual_reached"] is False
    assert boasting["converged_self"] is True and boasting["residual_self"] == 1e-9
    assert boasting["curve"] == [{"iteration": 2, "seconds": None, "residual": 1e-9}]  # a nan is no point of a curve
    modest = run(make(budget=ToResidual(1e-6)))[1]
    assert modest["status"] == "ok" and modest["residual_reached"] is True
    assert modest["converged_self"] is None and modest["residual_bound"] == 0.0


@pytest.mark.parametrize("cost_scale", [1.0, 0.5])
def test_error_against_the_closed_form_follows_the_cost(cost_scale: float) -> None:
    gauss = {"problem_target": "fsbench.problems.gaussian_1d.gaussian_1d", "n": 95, "m": 101, "d": 1, "eps": 0.8}
    assert run(make(budget=ToResidual(1e-9), cost_scale=cost_scale, **gauss))[1]["ref_rel_err"] < 1e-7
    assert run(make(budget=FixedIterations(99), cost_scale=cost_scale, **gauss))[1]["ref_rel_err"] is None
    far = run(make(budget=ToResidual(1e-9), most=1, cost_scale=cost_scale, **gauss))[1]
    assert far["status"] == "not_converged" and far["ref_rel_err"] is None


LADDER = ({"most": 1}, {"most": 3}, {"most": 1000}, {"most": 2000})


def test_ladder_times_the_first_rung_that_passes() -> None:
    measurement, record = run(make(budget=ToResidual(1e-5), ladder=LADDER, boasts=False))
    rungs = json.loads(record["ladder"])
    assert [r["params"] for r in rungs] == [{"boasts": False, "most": most} for most in (1, 3, 1000)]
    assert rungs[0]["residual"] > rungs[1]["residual"] > 1e-5 >= rungs[2]["residual"]
    assert all(r["seconds"] > 0 for r in rungs)
    assert record["status"] == "ok" and measurement._solver.most == 1000


def test_ladder_without_a_passing_rung_gives_the_best_one() -> None:
    _, record = run(make(budget=ToResidual(1e-5), ladder=({"most": 1}, {"most": 4}, {"most": 2})))
    assert record["status"] == "not_converged" and record["residual_reached"] is False
    assert len(json.loads(record["ladder"])) == 3
    assert record["n_iterations"] == 4


def test_ladder_is_for_residual_budgets_only() -> None:
    assert run(make(ladder=LADDER, most=7))[1]["ladder"] is None


def test_inputs_are_the_same_for_every_solver() -> None:
    """H14: they depend on the case and the seed alone, and are hashed as they were given, after the cast."""
    assert run(make(Fake, solve_s=0.001))[1]["input_hash"] == run(make(budget=FixedIterations(2)))[1]["input_hash"]
    hashes = {input_hash(clouds_of(make(seed=seed, dtype=t))) for seed in (0, 1) for t in ("float32", "float64")}
    assert len(hashes) == 4
    assert clouds_of(make(dtype="float32")).x.dtype == np.float32


def test_memory_pass_is_of_a_solve_alone() -> None:
    _, record = run(make(Allocates, timing=ONCE))
    assert record["peak_host_bytes"] == pytest.approx(64 << 20, rel=0.05)
    assert record["peak_alloc_bytes"] is None and record["peak_device_bytes"] is None and record["energy_j"] is None
    assert record["input_bytes"] == 8 * (13 * 2 + 9 * 2 + 13 + 9)


def test_scoring_is_outside_every_timed_and_memory_window(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Phase] = []
    measurement = Measurement(make(timing=ONCE))
    scored = measurement._score
    monkeypatch.setattr(measurement, "_score", lambda kept: (phases.append(measurement.phase), scored(kept))[1])
    measurement.start()
    measurement.sample()
    measurement.finish()
    assert phases == [Phase.SCORE]


def test_caches_are_empty_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement(make(timing=Timing(1, 0, 2, 2, 2, 0.0, slope=False, memory=True)))
    measurement.start()
    emptied: list[int] = []
    monkeypatch.setattr(measurement._backend, "empty_cache", lambda: emptied.append(len(measurement._solver.calls)))
    for step in (measurement.sample, measurement.sample, measurement.finish):
        step()
        assert emptied[-1] == len(measurement._solver.calls)  # nothing was solved after the last emptying


@pytest.mark.parametrize("poison", ["nan", "overflow"])
def test_a_solution_that_cannot_be_scored_is_an_error(poison: str) -> None:
    measurement = Measurement(make(poison=poison))
    measurement.start()
    measurement.sample()
    with pytest.raises(InvalidSolution) as caught:
        measurement.finish()
    failure = describe_failure(caught.value, measurement.phase)
    assert (failure["status"], failure["phase"]) == ("error", "score")
    words = {"nan": "f is not finite on 1 of 13 points", "overflow": "overflows"}
    assert words[poison] in failure["status_detail"]


def test_potentials_of_points_without_weight_do_not_matter() -> None:
    _, record = run(make(problem_target=f"{__name__}.weightless", budget=ToResidual(1e-8), poison="nan without weight"))
    assert record["status"] == "ok"


def _out_of_memory(how: Callable[[], Any]) -> BaseException:
    try:
        how()
    except (MemoryError, RuntimeError) as error:
        return error
    raise AssertionError("that was allocated")


def _caused() -> None:
    try:
        raise MemoryError
    except MemoryError as cause:
        raise RuntimeError("while building the cost") from cause


@pytest.mark.parametrize(
    ("error", "status", "phase"),
    [
        (Unsupported("float64 only"), "unsupported", "warmup"),
        (ModuleNotFoundError("No module named 'pykeops'"), "error", "import"),
        (ImportError("libcuda: out of memory"), "error", "import"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error", "warmup"),
        (RuntimeError("out of resource: shared memory, Required: 270336, Hardware limit: 232448"), "error", "warmup"),
        (RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"), "error", "warmup"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 40000000000 bytes."), "oom", "warmup"),
        (RuntimeError("CUDA error: out of memory"), "oom", "warmup"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom", "warmup"),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), "oom", "warmup"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.25 GiB"), "oom", "warmup"),
        (_out_of_memory(lambda: np.ones(1 << 55)), "oom", "warmup"),
        (_out_of_memory(lambda: torch.ones(1 << 55)), "oom", "warmup"),
        (_out_of_memory(_caused), "oom", "warmup"),
    ],
)
def test_failures_are_named(error: BaseException, status: str, phase: str) -> None:
    got = describe_failure(error, Phase.WARMUP)
    assert (got["status"], got["phase"]) == (status, phase)
    assert str(error) in got["status_detail"]
    assert (got["traceback"] is None) == (status == "unsupported")


@pytest.mark.parametrize("target", ["no_such_package.Solver", f"{__name__}.Misspelt"])
def test_a_solver_that_is_not_there_fails_on_import(target: str) -> None:
    measurement = Measurement(make(target))
    with pytest.raises(ImportError) as caught:
        measurement.start()
    assert measurement.phase == Phase.IMPORT
    assert target.rpartition(".")[2] in str(caught.value) or "no_such_package" in str(caught.value)


def test_unsupported_is_said_before_anything_is_prepared() -> None:
    measurement = Measurement(make(Picky))
    with pytest.raises(Unsupported, match="only on Tuesdays"):
        measurement.start()
    assert measurement._solver.calls == []


def test_phases_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Phase] = []

    class Watched(Measurement):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "phase":
                seen.append(value)
            super().__setattr__(name, value)

    measurement = Watched(make(timing=ONCE))
    measurement.start()
    measurement.sample()
    measurement.finish()
    assert list(dict.fromkeys(seen)) == list(Phase)


def test_jax_solver_end_to_end() -> None:
    pytest.importorskip("jax")
    _, record = run(make(InJax, timing=ONCE))
    assert record["framework"] == "jax" and record["residual_col_l1"] < 1e-12


def test_module_loads_no_framework_before_the_solver_does() -> None:
    code = f"import sys, {cell_module.__name__}; sys.exit(any(m in sys.modules for m in ('torch', 'jax', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, a=c.a * 2), "a that sums to one"),
        (lambda c: replace(c, b=np.append(c.b, 0.0)), "b of shape"),
        (lambda c: replace(c, x=np.full_like(c.x, np.nan)), "x with NaN"),
        (lambda c: None, "must return fsbench.api.Clouds, got NoneType"),
    ],
)
def test_a_problem_family_is_held_to_its_promise(monkeypatch, change, said):
    family = cell_inputs.load_target(make().problem_target)
    monkeypatch.setattr(cell_inputs, "load_target", lambda target: lambda **keys: change(family(**keys)))
    with pytest.raises(ValueError, match=said):
        clouds_of(make())


def test_a_solve_beyond_max_seconds_is_not_converged_whatever_its_residual():
    _, record = run(make(budget=ToResidual(1.0, max_seconds=1e-9)))
    assert record["residual_reached"] is True
    assert (record["status"], record["status_detail"]) == ("not_converged", "the solve took longer than max_seconds")


def test_the_gradient_is_scored_where_the_task_asks_for_it() -> None:
    both = {"task": Task.FORWARD_BACKWARD, "cost_scale": 0.5}
    right, off = (run(make(Differentiates, wrong=wrong, **both))[1] for wrong in ("", "value"))
    assert right["gradient_rel_err"] < 1e-12 and right["n_passes"] == 3.0
    assert off["gradient_rel_err"] == pytest.approx(0.25)
    assert run(make(Differentiates))[1]["gradient_rel_err"] is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("absent", "task forward_backward: the solution must hold grad_x and grad_y"),
        ("nan", "grad_y is not finite on 1 of 9 points"),
        ("shape", "grad_x has shape (2, 13), its points (13, 2)"),
    ],
)
def test_a_gradient_that_cannot_be_scored_is_an_error(wrong: str, said: str) -> None:
    with pytest.raises(InvalidSolution) as caught:
        run(make(Differentiates, wrong=wrong, task=Task.FORWARD_BACKWARD))
    assert said in str(caught.value)


HVP = {"task": Task.HVP, "budget": ToResidual(1e-4), "cost_scale": 0.5}


def test_a_hessian_product_is_timed_at_given_potentials_and_scored() -> None:
    _, record = run(make(Curves, **HVP))
    assert record["status"] == "ok" and record["residual_reached"] is True
    assert record["hvp_rel_err"] < 1e-5 and record["residual_l1"] < 1e-9
    assert (record["hvp_residual_self"], record["residual_self"], record["n_iterations"]) == (3e-6, None, 7)
    assert record["gradient_rel_err"] is None and record["ladder"] is None
    assert run(make(budget=ToResidual(1e-6)))[1]["hvp_rel_err"] is None


def test_a_product_that_is_wrong_has_not_converged_whatever_its_solver_says() -> None:
    _, record = run(make(Curves, wrong="value", **HVP))
    assert record["hvp_rel_err"] == pytest.approx(0.25, rel=1e-4)
    assert record["status"] == "not_converged" and record["converged_self"] is True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("shape", "h_x has shape (2, 13)"), ("nan", "not finite on 13 of 13"), ("absent", "must hold h_x")],
)
def test_a_product_that_cannot_be_scored_is_an_error(wrong: str, said: str) -> None:
    with pytest.raises(InvalidSolution) as caught:
        run(make(Curves, wrong=wrong, **HVP))
    assert said in str(caught.value)


def test_a_solver_without_a_product_does_not_support_the_task() -> None:
    with pytest.raises(Unsupported, match="no Hessian-vector product"):
        Measurement(make(Sinkhorn, **HVP)).start()

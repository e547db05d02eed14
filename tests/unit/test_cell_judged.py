"""How one cell's solution is judged, by the harness alone, and how its failures are named."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cell_fakes import Counts, Curves, Differentiates, Diverges, Rounds, Sinkhorn, make, run

from fsbench.api import FixedIterations, Task, ToResidual, Unsupported
from fsbench.cell import InvalidSolution, Measurement
from fsbench.cell_failure import describe_failure
from fsbench.records import Phase


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


@pytest.mark.parametrize("later", [False, True])
def test_a_solver_that_rounds_is_judged_on_the_points_given_and_on_its_own(later) -> None:
    settings = {"solver": Rounds, "budget": ToResidual(1e-6), "later": later}
    _, record = run(make(**settings))
    assert record["status"] == "not_converged" and record["residual_reached"] is False
    assert record["residual_solved_l1"] < 1e-6 < 1e-4 < record["residual_l1"]
    assert run(make(budget=ToResidual(1e-6)))[1]["residual_solved_l1"] is None
    measurement = Measurement(make(**settings, drops=1))
    measurement.start()
    measurement.sample()
    with pytest.raises(InvalidSolution, match="solved must hold points of the shapes given"):
        measurement.finish()


def test_numbers_of_the_solver_s_own_are_kept_by_name() -> None:
    settings = {"solver": Counts, "budget": ToResidual(1e-6)}
    assert run(make(**settings))[1]["solver_stats"] == '{"kept_pairs_per_point": 12.5, "screens": 3}'
    assert run(make(budget=ToResidual(1e-6)))[1]["solver_stats"] is None
    for wrong in (float("nan"), "many"):
        measurement = Measurement(make(**settings, kept=wrong))
        measurement.start()
        with pytest.raises(InvalidSolution, match="stats must hold finite numbers by name, got 'kept_pairs_per_point'"):
            measurement.sample()


@pytest.mark.parametrize("cost_scale", [1.0, 0.5])
def test_error_against_the_closed_form_follows_the_cost(cost_scale: float) -> None:
    gauss = {"problem_target": "fsbench.problems.gaussian_1d.gaussian_1d", "n": 95, "m": 101, "d": 1, "eps": 0.8}
    assert run(make(budget=ToResidual(1e-9), cost_scale=cost_scale, **gauss))[1]["ref_rel_err"] < 1e-7
    assert run(make(budget=FixedIterations(99), cost_scale=cost_scale, **gauss))[1]["ref_rel_err"] is None
    far = run(make(budget=ToResidual(1e-9), most=1, cost_scale=cost_scale, **gauss))[1]
    assert far["status"] == "not_converged" and far["ref_rel_err"] is None


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
    _, record = run(make(problem_target="cell_fakes.weightless", budget=ToResidual(1e-8), poison="nan without weight"))
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


def test_failures_name_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaking.py").write_text("def solve():\n    raise RuntimeError(f'called from {__file__}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        importlib.import_module("breaking").solve()
    got = describe_failure(caught.value, Phase.WARMUP)
    assert got["status_detail"] == "RuntimeError: called from breaking.py"
    assert 'File "breaking.py", line 2, in solve' in got["traceback"]
    assert str(tmp_path) not in got["traceback"] and str(Path(__file__).parent) not in got["traceback"]


@pytest.mark.parametrize("target", ["no_such_package.Solver", f"{__name__}.Misspelt"])
def test_a_solver_that_is_not_there_fails_on_import(target: str) -> None:
    measurement = Measurement(make(target))
    with pytest.raises(ImportError) as caught:
        measurement.start()
    assert measurement.phase == Phase.IMPORT
    assert target.rpartition(".")[2] in str(caught.value) or "no_such_package" in str(caught.value)


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


DIVERGENCE = {"task": Task.DIVERGENCE, "cost_scale": 0.5, "eps": 0.3}


def test_a_divergence_is_scored_against_its_own_potentials() -> None:
    _, record = run(make(Diverges, **DIVERGENCE))
    assert record["value"] > 0 and record["value_rel_err"] < 1e-12 and record["self_residual_l1"] < 0.1
    assert record["n_passes"] == 60.0 and record["status"] == "ok"
    plain = run(make())[1]
    assert "value" not in plain and "value_rel_err" not in plain


def test_a_wrong_value_and_wrong_potentials_of_a_self_problem_show_as_errors() -> None:
    right, off, lost = (run(make(Diverges, wrong=wrong, **DIVERGENCE))[1] for wrong in ("", "value", "self"))
    assert off["value_rel_err"] == pytest.approx(0.25)
    # Its value agrees with its potentials: only their residual tells.
    assert lost["value_rel_err"] < 1e-12 and lost["self_residual_l1"] > 10 * right["self_residual_l1"]


def test_a_divergence_has_converged_once_all_three_problems_have() -> None:
    to_residual = DIVERGENCE | {"budget": ToResidual(1e-6)}
    _, record = run(make(Diverges, **to_residual))
    assert record["status"] == "ok" and record["residual_reached"] is True
    assert max(record["residual_l1"], record["self_residual_l1"]) < 1e-6
    for wrong in ({"most_self": 2}, {"wrong": "self"}):
        _, record = run(make(Diverges, **wrong, **to_residual))
        assert record["residual_l1"] < 1e-6 < record["self_residual_l1"]
        assert record["status"] == "not_converged" and record["residual_reached"] is False


def test_rungs_of_a_divergence_pass_by_the_worst_of_its_problems() -> None:
    rungs = {"most_self": 1}, {"most_self": 2}, {"most_self": 2000}, {"most_self": 3}
    measurement, record = run(make(Diverges, ladder=rungs, **DIVERGENCE | {"budget": ToResidual(1e-6)}))
    tried = json.loads(record["ladder"])
    assert [rung["params"]["most_self"] for rung in tried] == [1, 2, 2000]
    assert tried[0]["residual"] > tried[1]["residual"] > 1e-6 >= tried[2]["residual"]
    assert record["status"] == "ok" and measurement._solver.most_self == 2000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("absent", "task divergence: the solution must hold value and self_potentials"),
        ("nan", "value must be one finite number"),
        ("many", "value must be one finite number, got shape (2,)"),
        ("shape", "f has shape (9,), its weights (13,)"),
    ],
)
def test_a_divergence_that_cannot_be_scored_is_an_error(wrong: str, said: str) -> None:
    with pytest.raises(InvalidSolution) as caught:
        run(make(Diverges, wrong=wrong, **DIVERGENCE))
    assert said in str(caught.value)


def test_a_solver_without_a_product_does_not_support_the_task() -> None:
    with pytest.raises(Unsupported, match="no Hessian-vector product"):
        Measurement(make(Sinkhorn, **HVP)).start()

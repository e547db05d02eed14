"""From overrides to cells: selection, order, identity, and one clear line for every mistake."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from pathlib import Path

import pytest

from fsbench import compose
from fsbench.api import Cell, FixedIterations, Task, ToResidual, budget_to_dict
from fsbench.compose import ConfigError
from fsbench.plan import make_plan

EXPERIMENT = """
# @package _global_
experiment: mine
question: Does it plan?
grid:
  gpu: {solver: [toy, toy2], problem: [gaussian], n: [3000, 100], d: [64, 3], eps: [0.1], seed: [0], dtype: [float32]}
  cpu: {n: [200]}
budget: {kind: fixed_iterations, iterations: 10}
timing: {counters: true}
"""


@pytest.fixture
def conf(tmp_path) -> Path:
    for group in ("solver", "experiment", "problem"):
        (tmp_path / group).mkdir()
    (tmp_path / "solver" / "toy.yaml").write_text("_target_: toy.Toy\nparams: {speed: 1}\n")
    (tmp_path / "solver" / "toy2.yaml").write_text("_target_: toy.Toy\nparams: {speed: 2}\nmatmul_precision: fast\n")
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture
def plan(conf):
    def make(*overrides: str, gpu: bool = True):
        return make_plan(["experiment=mine", *overrides], [conf], gpu=gpu)

    return make


def line_of(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_the_grid_of_the_machine_and_cpu_overrides_only_what_differs(plan):
    on_gpu, on_cpu = plan(), plan(gpu=False)
    assert [cell.n for cell in on_gpu.cells] == [100] * 4 + [3000] * 4
    assert {cell.n for cell in on_cpu.cells} == {200}
    assert {cell.d for cell in on_cpu.cells} == {3, 64}
    assert {cell.device for cell in on_gpu.cells} == {"cuda"}
    assert {cell.device for cell in on_cpu.cells} == {"cpu"}
    assert any("CPU profile" in notice for notice in on_cpu.notices)
    assert on_gpu.notices == ()


def test_solvers_of_a_comparison_are_neighbours_and_sizes_increase(plan):
    cells = plan("problem=[uniform_gaussian,gaussian]", "eps=[0.5,0.1]").cells
    groups = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.group_id)]
    assert len(groups) == len({cell.group_id for cell in cells})
    assert all([cell.solver for cell in group] == ["toy", "toy2"] for group in groups)
    assert [cell.problem for cell in cells] == ["uniform_gaussian"] * 16 + ["gaussian"] * 16
    sizes = [(cell.n, cell.d) for cell in cells if cell.problem == "gaussian"]
    assert sizes == sorted(sizes)


def test_the_command_line_wins_scalar_or_list(plan):
    cells = plan("solver=toy", "n=50", "m=[70,60]", "d=2", "eps=0.3", "seed=[4]", "dtype=float64").cells
    assert [(c.n, c.m, c.d, c.eps, c.seed, c.dtype) for c in cells] == [
        (50, 60, 2, 0.3, 4, "float64"), (50, 70, 2, 0.3, 4, "float64")
    ]  # fmt: skip


def test_m_follows_n_by_default(plan):
    assert all(cell.m == cell.n for cell in plan().cells)


@pytest.mark.parametrize("spelling", ["1e-05", "1E-5", "0.00001", "1.e-5"])
def test_every_spelling_of_a_number_is_the_same_cell(plan, spelling):
    (cell,) = plan("solver=toy", "n=10", "d=3", f"eps={spelling}").cells
    (same,) = plan("solver=toy", "n=10", "d=3", "eps=[1e-5]").cells
    assert cell.eps == 1e-5
    assert cell.cell_id == same.cell_id


@pytest.fixture
def several(conf, plan):
    """An experiment of two grids, the second with points of its own on a CPU."""
    path = conf / "experiment" / "mine.yaml"
    head, _, tail = EXPERIMENT.partition("grid:")
    shared = "d: [3], eps: [0.1], seed: [0], dtype: [float32]"
    first = f"gpu: {{solver: [toy, toy2], problem: [gaussian, clusters], n: [100], {shared}}}"
    second = f"gpu: {{solver: [toy], problem: [clusters], n: [3000, 200], {shared}}}, cpu: {{n: [50]}}"
    grids = f"grid: [{{{first}}}, {{{second}}}]"
    path.write_text(f"{head}{grids}\nbudget{tail.partition('budget')[2]}")
    return plan


def test_several_grids_are_planned_one_after_the_other(several):
    found = [(cell.problem, cell.n, cell.solver) for cell in several().cells]
    first = [(problem, 100, solver) for problem in ("gaussian", "clusters") for solver in ("toy", "toy2")]
    assert found == [*first, ("clusters", 200, "toy"), ("clusters", 3000, "toy")]
    assert [cell.n for cell in several(gpu=False).cells] == [100] * 4 + [50]


def test_of_several_grids_a_problem_picks_those_that_have_it(several):
    assert [(cell.problem, cell.n) for cell in several("problem=gaussian").cells] == [("gaussian", 100)] * 2
    assert [cell.n for cell in several("problem=[clusters]", "solver=toy").cells] == [100, 200, 3000]
    assert {cell.n for cell in several("n=7").cells} == {7}
    with pytest.raises(ConfigError) as error:
        several("problem=[gaussian,translated]")
    assert "problem must be one of gaussian, clusters, got 'translated'" in line_of(error)


def test_cells_that_two_grids_share_are_measured_once(several):
    cells = several("problem=clusters", "n=100").cells
    assert [cell.solver for cell in cells] == ["toy", "toy2"]


def test_eps_in_squared_spacings_follows_n_and_d(plan):
    cells = plan("solver=toy", "n=[64,1000]", "d=[2,3]", "eps=[16 spacing**2,0.3,1 spacing**2]").cells
    given = [(cell.n, cell.d, cell.eps) for cell in cells]
    assert given == [
        (64, 2, 0.3), (64, 2, 0.015625), (64, 2, 0.25), (64, 3, 0.3), (64, 3, 0.0625), (64, 3, 1.0),
        (1000, 2, 0.3), (1000, 2, 0.001), (1000, 2, 0.016), (1000, 3, 0.3), (1000, 3, 0.01), (1000, 3, 0.16),
    ]  # fmt: skip


def test_eps_in_squared_spacings_is_the_cell_of_that_number(plan):
    """2^18 points in three dimensions are 2^-6 apart; 2^20 are not a whole number: six digits."""
    for n, number in ((2**18, "0.00390625"), (2**20, "0.00155020")):
        (cell,) = plan("solver=toy", f"n={n}", "d=3", "eps=16 spacing**2").cells
        (same,) = plan("solver=toy", f"n={n}", "d=3", f"eps={number}").cells
        assert cell.eps == same.eps and cell.cell_id == same.cell_id


def test_a_problem_may_have_more_or_fewer_points_on_the_other_side(conf, plan):
    (conf / "problem" / "own.yaml").write_text("_target_: own.cloud\nm_per_n: 0.75\n")
    sizes = [(cell.n, cell.m) for cell in plan("solver=toy", "problem=own", "n=[1,10,1000]", "d=3").cells]
    assert sizes == [(1, 1), (10, 8), (1000, 750)]
    (given,) = plan("solver=toy", "problem=own", "n=10", "m=7", "d=3").cells
    assert given.m == 7


@pytest.mark.parametrize("value", ["0", "-1", "many", "true", ".inf"])
def test_points_of_the_other_side_are_a_positive_share(conf, plan, value):
    (conf / "problem" / "own.yaml").write_text(f"_target_: own.cloud\nm_per_n: {value}\n")
    with pytest.raises(ConfigError) as error:
        plan("problem=own")
    assert "m_per_n in problem/own.yaml must be a positive number" in line_of(error)


def test_an_experiment_overrides_single_keys_of_the_timing_preset(plan):
    standard, quick = plan().cells[0].timing, plan("timing=quick").cells[0].timing
    assert (standard.counters, standard.rounds, standard.max_samples) == (True, 2, 50)
    assert (quick.counters, quick.rounds, quick.max_samples) == (True, 1, 3)
    assert plan("timing=quick", "timing.rounds=3").cells[0].timing.rounds == 3


def test_a_command_line_may_change_the_kind_of_budget(plan):
    assert plan().cells[0].budget == FixedIterations(10)
    assert plan("budget.iterations=7").cells[0].budget == FixedIterations(7)
    changed = plan("budget.kind=to_residual", "budget.tol=1e-3").cells[0].budget
    assert changed == ToResidual(tol=1e-3)
    both = plan("budget=[{kind:fixed_iterations,iterations:5},{kind:to_residual,tol:0.01}]", "n=10", "d=3").cells
    assert [cell.budget for cell in both] == [FixedIterations(5)] * 2 + [ToResidual(0.01)] * 2


def test_the_target_of_a_budget_may_be_a_list(plan):
    residuals = plan("budget={kind:to_residual,tol:[1e-2,1e-3],max_seconds:9}", "solver=toy", "n=10", "d=3").cells
    assert [cell.budget for cell in residuals] == [ToResidual(1e-2, max_seconds=9.0), ToResidual(1e-3, max_seconds=9.0)]
    assert len({cell.group_id for cell in residuals}) == 2
    counts = plan("budget.iterations=[5,10]", "solver=toy", "n=10", "d=3").cells
    assert [cell.budget for cell in counts] == [FixedIterations(5), FixedIterations(10)]


def test_settings_of_one_solver_from_the_command_line(plan):
    for override in ("solver_params.toy.width=64", "+solver_params.toy.width=64"):
        cells = plan(override, "n=10", "d=3").cells
        assert [cell.solver_params for cell in cells] == [{"speed": 1, "width": 64}, {"speed": 2}]
    assert plan("problem_params.gaussian.unit_distance=true").cells[0].problem_params == {"unit_distance": True}


def test_two_names_for_one_measurement_are_refused(plan):
    with pytest.raises(ConfigError) as error:
        plan("solver_params.toy2.speed=1")
    assert "same measurement" in line_of(error)


def test_repeated_values_are_one_cell(plan):
    assert len(plan("solver=[toy,toy]", "n=[10,10]", "d=3").cells) == 1


def test_cells_travel_as_json(plan):
    for cell in plan("budget.kind=to_residual", "budget.tol=0.01").cells:
        again = Cell.from_json(cell.to_json())
        assert again == cell
        assert again.cell_id == cell.cell_id


def test_cell_id_ignores_labels_and_deadlines_and_nothing_else(plan):
    base = plan("n=10", "d=3").cells[0]
    assert plan("n=10", "d=3", "timeout_s=5").cells[0].cell_id == base.cell_id
    changes = ("seed=1", "eps=0.2", "d=4", "dtype=float64", "cost_scale=0.5", "budget.iterations=3", "timing=quick",
               "solver_params.toy.speed=9", "problem_params.gaussian.unit_distance=true", "m=11",
               "device=cpu")  # fmt: skip
    ids = {plan("n=10", "d=3", change).cells[0].cell_id for change in changes}
    assert len(ids | {base.cell_id}) == len(changes) + 1


def test_a_task_is_another_measurement_and_forward_keeps_its_identity(plan):
    forward, both = plan("n=10", "d=3").cells[0], plan("n=10", "d=3", "task=forward_backward").cells[0]
    assert (forward.task, both.task) == (Task.FORWARD, Task.FORWARD_BACKWARD)
    assert both.spec.task is Task.FORWARD_BACKWARD and Cell.from_json(both.to_json()) == both
    assert forward.group_id != both.group_id and forward.cell_id != both.cell_id
    # As records of schema version 1 have it, which knew no task.
    described = {
        "problem_target": "fsbench.problems.gaussian.gaussian", "problem_params": {}, "seed": 0, "n": 10, "m": 10,
        "d": 3, "eps": 0.1, "cost_scale": 1.0, "dtype": "float32", "device": "cuda",
        "budget": {"kind": "fixed_iterations", "iterations": 10},
    }  # fmt: skip
    assert forward.group_id == hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def test_rungs_of_a_ladder_are_of_solves(conf, plan):
    path = conf / "solver" / "toy.yaml"
    path.write_text(path.read_text() + "ladder: [{speed: 3}]\n")
    budget = "budget={kind:to_residual,tol:1e-4}"
    assert plan("solver=toy", "n=10", "d=3", budget).cells[0].ladder == ({"speed": 3},)
    assert plan("solver=toy", "n=10", "d=3", budget, "task=hvp").cells[0].ladder == ()


@pytest.mark.parametrize(
    ("text", "limit_s"), [("90", 90), ("90s", 90), ("10m", 600), ("3h", 10_800), ("none", None), ("1.5m", 90)]
)
def test_time_limits_with_units(plan, text, limit_s):
    made = plan(f"timeout_s={text}", f"budget_s={text}")
    assert made.timeout_s == made.budget_s == limit_s
    assert {cell.timeout_s for cell in made.cells} == {limit_s}


@pytest.mark.parametrize("text", ["10x", "-5", "", "0", "nan", "inf", "m", "true"])
def test_bad_time_limits(plan, text):
    with pytest.raises(ConfigError, match="timeout_s must be a positive time"):
        plan(f"timeout_s={text}")


def test_a_limit_on_the_command_line_wins_over_the_file_and_says_so(conf, plan):
    path = conf / "experiment" / "mine.yaml"
    path.write_text(path.read_text() + "timeout_s: 60\n")
    assert (plan().timeout_s, plan().notices) == (60, ())
    shorter = plan("timeout_s=5")
    assert shorter.timeout_s == 5
    assert shorter.config["timeout_s"] == 5
    assert shorter.notices == ("timeout_s=5 replaces the experiment's own 60",)


def test_a_divergence_is_of_fixed_iterations_or_to_a_residual(plan):
    for budget in (FixedIterations(3), ToResidual(1e-3)):
        kind = json.dumps(budget_to_dict(budget)).replace('"', "")
        for cell in plan("n=10", "d=3", "task=divergence", f"budget={kind}").cells:
            assert cell.spec.task is Task.DIVERGENCE and cell.budget == budget


@pytest.mark.parametrize(
    ("override", "needle"),
    [
        ("epsilom=0.1", "unknown key 'epsilom' in the command line; did you mean 'eps'?"),
        ("+epsilom=0.1", "did you mean 'eps'?"),
        ("solver=[toi]", "unknown solver 'toi'; did you mean 'toy'?"),
        ("problem=gausian", "unknown problem 'gausian'; did you mean 'gaussian'?"),
        ("experiment=mime", "unknown experiment 'mime'; did you mean 'mine'?"),
        ("timing=quik", "unknown timing 'quik'; did you mean 'quick'?"),
        ("timing.round=1", "did you mean 'rounds'?"),
        ("budget.iteration=1", "did you mean 'iterations'?"),
        ("solver_params.toyy.a=1", "did you mean 'toy'?"),
        ("problem_params=3", "problem_params=3 must be problem_params.NAME.KEY=VALUE"),
        ("solver_params=abc", "solver_params=abc must be solver_params.NAME.KEY=VALUE"),
        ("problem_params.gausian.a=1", "no such problem in this plan; did you mean 'gaussian'?"),
        ("problem_params.lidar.noise=0", "problem_params.lidar: no such problem in this plan"),
        ("problem_params.gaussian.unit_distanc=true", "did you mean 'unit_distance'?"),
        ("problem_params.gaussian.unit_distance=1", "unit_distance must be true or false, got 1"),
        ("problem_params={gaussian: 3}", "must be problem_params.gaussian.KEY=VALUE"),
        ("device=gpu", "device must be one of auto, cuda, cpu"),
        ("task=backward", "task must be one of forward, forward_backward, hvp, divergence"),
        ("task=hvp", "task=hvp needs a budget of kind to_residual"),
        ("dtype=float16", "dtype must be one of float32, float64"),
        ("eps=abc", "eps must be a positive number or a positive multiple like '16 spacing**2', got 'abc'"),
        ("eps=0", "eps must be a positive number"),
        ("eps=-0.1", "eps must be a positive number"),
        ("eps=inf", "eps must be a positive number"),
        ("eps=true", "eps must be a positive number"),
        ("eps=4 spacings", "a positive multiple like '16 spacing**2', got '4 spacings'"),
        ("eps=spacing**2", "a positive multiple like '16 spacing**2', got 'spacing**2'"),
        ("eps='2 spacing**3'", "a positive multiple like '16 spacing**2', got '2 spacing**3'"),
        ("eps='2 spacing**2 + 1'", "a positive multiple like '16 spacing**2', got '2 spacing**2 + 1'"),
        ("eps='nan spacing**2'", "a positive multiple like '16 spacing**2', got 'nan spacing**2'"),
        ("eps='1e-323 spacing**2'", "is 0 at n=100, d=3: choose another multiple"),
        ("eps=-1 spacing**2", "eps must be a positive number"),
        ("eps=a spacing**2", "got 'a spacing**2'"),
        ("eps=[]", "eps is empty"),
        ("n=0", "n must be a whole number of at least 1"),
        ("n=10.5", "n must be a whole number"),
        ("n=true", "n must be a number"),
        ("d=[3,-1]", "d must be a whole number"),
        ("seed=-1", "seed must be a whole number of at least 0"),
        ("n=1,2", "write a list: n=[a,b]"),
        ("n=[1", "cannot read 'n=[1'"),
        ("~n", "would remove a key"),
        ("hydra.run.dir=x", "--config-dir"),
        ("budget.kind=forever", "budget.kind must be one of"),
        ("budget.kind=to_residual", "needs tol"),
        ("budget.iterations=[]", "needs iterations"),
        ("budget.iterations=[5,0]", "budget.iterations must be a whole number"),
        ("budget.iterations=0", "budget.iterations must be a whole number"),
        ("budget=5", "budget must be like"),
        ("timing.min_samples=99", "min_samples=99"),
        ("fail_fast=maybe", "fail_fast must be true or false"),
        ("retries=-1", "retries must be a whole number of at least 0"),
    ],
)
def test_mistakes_are_one_line(plan, override, needle):
    with pytest.raises(ConfigError) as error:
        plan(override)
    assert needle in line_of(error)


@pytest.mark.parametrize(
    ("problem", "setting", "needle"),
    [
        ("nbody", "steps=1.5", "problem_params.nbody: steps must be a whole number from 1 to 1000, got 1.5"),
        ("nbody", "pair=both", "pair must be evolution or realisations, got 'both'"),
        ("lidar", "noise=.inf", "noise must be a number from 0 to 0.1, got '.inf'"),
        ("lidar", "noise=inf", "noise must be a number from 0 to 0.1, got inf"),
        ("heterogeneous", "volume=0.9999999", "volume must be a number from 1e-09 to 0.99"),
        ("zeldovich", "smoothing=1e5", "smoothing must be a number from 0 to 100, got 100000.0"),
        ("zeldovich", "smoothings=1", "did you mean 'smoothing'?"),
        ("clusters", "count=two", "count must be a whole number from 1 to 1000000, got 'two'"),
    ],
)
def test_settings_of_a_problem_are_checked_before_any_cell(plan, problem, setting, needle):
    with pytest.raises(ConfigError) as error:
        plan(f"problem={problem}", f"problem_params.{problem}.{setting}")
    assert needle in line_of(error)


@pytest.mark.parametrize(
    ("problem", "sizes", "needle"),
    [
        ("gaussian_1d", ["d=[1,3]"], "problem=gaussian_1d: d must be 1, got 3"),
        ("photographs", ["d=3", "n=300000"], "n must be a whole number from 1 to 273280, got 300000"),
        ("two_points", ["n=[2,3]"], "n must be 2, got 3"),
        ("translated", ["n=10", "m=9"], "m must equal n"),
        ("zeldovich", ["d=3", "n=729"], "n and m must be the same cube of an even number"),
        ("disjoint_masses", ["n=2", "eps=100"], "length must be at least sqrt(20 eps)"),
    ],
)
def test_sizes_a_problem_cannot_have_are_refused_before_any_cell(plan, problem, sizes, needle):
    with pytest.raises(ConfigError) as error:
        plan(f"problem={problem}", *sizes)
    assert needle in line_of(error)


@pytest.mark.parametrize(
    ("file", "line", "needle"),
    [
        ("experiment/mine", "epsilom: 0.1", "unknown key 'epsilom' in experiment 'mine'; did you mean 'eps'?"),
        ("solver/toy", "parms: {}", "unknown key 'parms' in solver/toy.yaml; did you mean 'params'?"),
        ("problem/own", "_target: a.b", "unknown key '_target' in problem/own.yaml; did you mean '_target_'?"),
    ],
)
def test_unknown_keys_in_files(conf, plan, file, line, needle):
    (conf / "problem" / "own.yaml").write_text("_target_: own.cloud\n")
    path = conf / f"{file}.yaml"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError) as error:
        plan("problem=own")
    assert needle in line_of(error)


@pytest.mark.parametrize(
    ("old", "new", "needle"),
    [
        ("solver: [toy, toy2]", "solvers: [toy]", "did you mean 'solver'?"),
        ("counters: true", "counter: true", "did you mean 'counters'?"),
        ("cpu:", "cqu:", "did you mean 'cpu'?"),
        ("experiment: mine", "experiment: other", "say experiment: ITS_NAME"),
        ("# @package _global_", "", "begin with '# @package _global_'"),
        ("budget:", "# budget:", "budget must be like"),
        ("problem: [gaussian], ", "", "problem is empty: give problem=[...]"),
        ("grid:", "grid: [", "cannot read"),
        ("grid:", "grid: []\nlauncher:", "must hold gpu: and cpu: lists"),
    ],
)
def test_mistakes_inside_an_experiment(conf, plan, old, new, needle):
    path = conf / "experiment" / "mine.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        plan()
    assert needle in line_of(error)


def test_a_missing_folder_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        make_plan(["experiment=mine"], [tmp_path / "nothing"])


def test_ten_thousand_cells_in_under_three_seconds(plan):
    began = time.process_time()
    sizes = f"n=[{','.join(str(100 + i) for i in range(100))}]"
    made = plan(sizes, "eps=[0.1,0.2,0.3,0.4,0.5]", "d=[1,2,3,4,5]", "seed=[0,1]")
    assert len({cell.cell_id for cell in made.cells}) == len(made.cells) == 10_000
    assert time.process_time() - began < 3.0


def test_own_files_do_not_hide_those_of_the_checkout(conf):
    (conf / "solver" / "pot.yaml").write_text("_target_: other.Pot\n")
    assert compose.load_solver("pot", [conf]).target != "other.Pot"

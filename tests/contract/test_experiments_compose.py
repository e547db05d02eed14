"""Every experiment in conf/ makes a plan on a machine with a GPU and on one without."""

from __future__ import annotations

import pytest

from fsbench import compose
from fsbench.plan import make_plan

EXPERIMENTS = sorted(compose.names("experiment"))


def test_there_are_experiments():
    assert "table2" in EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("timing", ["standard", "quick"])
def test_composes(name, gpu, timing):
    plan = make_plan([f"experiment={name}", f"timing={timing}"], gpu=gpu)
    assert plan.experiment == name
    assert plan.question.strip().endswith("?")
    assert plan.cells
    assert len({cell.cell_id for cell in plan.cells}) == len(plan.cells)
    assert {cell.device for cell in plan.cells} == {"cuda" if gpu else "cpu"}


@pytest.mark.parametrize("group", ["solver", "problem"])
def test_every_solver_and_problem_file_is_sound(group):
    load = compose.load_solver if group == "solver" else compose.load_problem
    for name in compose.names(group):
        conf = load(name)
        module = compose.ROOT.joinpath(*conf.target.split(".")[:-1])
        assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file(), conf.target

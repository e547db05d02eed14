"""Adding a solver takes one file and one yaml: done here from outside the repository, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOLVER = '''
import torch

from fsbench.api import FixedIterations, Framework, Solution


class Toy:
    """Sinkhorn in ten lines."""

    framework = Framework.TORCH

    def __init__(self, *, most):
        self.most = most

    def supports(self, spec, budget):
        pass

    def prepare(self, spec, budget):
        pass

    def solve(self, problem, budget):
        eps = problem.spec.eps
        score = -problem.spec.cost_scale * (problem.x[:, None] - problem.y).square().sum(-1) / eps
        g = torch.zeros_like(problem.b)
        iterations = budget.iterations if isinstance(budget, FixedIterations) else self.most
        for _ in range(iterations):
            f = -eps * torch.logsumexp(score + problem.b.log() + g / eps, 1)
            g = -eps * torch.logsumexp(score + (problem.a.log() + f / eps)[:, None], 0)
        return Solution(f, g, iterations, 2.0 * iterations)
'''

CONF = """
_target_: toy_solver.Toy
matmul_precision: exact
requires: [torch]
params: {most: 2000}
"""


@pytest.mark.slow
def test_one_file_and_one_yaml_add_a_solver(tmp_path: Path) -> None:
    (tmp_path / "toy_solver.py").write_text(SOLVER)
    conf = tmp_path / "conf" / "solver"
    conf.mkdir(parents=True)
    (conf / "toy.yaml").write_text(CONF)
    out = tmp_path / "out"
    overrides = ["experiment=quickstart", "solver=[toy]", "n=[50]", "eps=[0.1]", "device=cpu", "timing=quick"]
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", "run", *overrides, f"out_dir={out}", f"--config-dir={tmp_path / 'conf'}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for file in out.rglob("*.jsonl") for line in file.read_text().splitlines()]
    records = [line for line in lines if line.get("solver") == "toy"]
    assert [record["status"] for record in records] == ["ok"], records
    assert records[0]["residual_reached"] and records[0]["residual_l1"] <= records[0]["tol"]

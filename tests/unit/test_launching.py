"""Launches bound once: what reaches the compiled kernel, and when Triton is asked to compile."""

from __future__ import annotations

from collections import defaultdict

import torch

from solvers.flash_sinkhorn.sweeps import launching
from solvers.flash_sinkhorn.sweeps.launching import Launch


class Kernel:
    """Kernel and compiled kernel in one: records every launch of either kind."""

    arg_names = ("points", "n", "turn", "scale", "BLOCK")

    def __init__(self):
        self.launches = defaultdict(list)

    def __getitem__(self, grid):
        def run(*values, **options):
            self.launches["through Triton" if options else "bound"].append((grid, *values))
            return self

        return run


def test_changing_arguments_come_between_those_bound_and_the_constants(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    kernel, points, grid = Kernel(), torch.zeros(3), (2, 1, 1)
    options = {"BLOCK": 64, "num_warps": 4}
    launch = Launch(kernel, grid, (points, 7), options)
    launch(0, 0.5)
    launch(1, 0.25)
    Launch(kernel, grid, (points, 7), options)(1, 0.125)  # of the same kind: compiled already
    assert kernel.launches["through Triton"] == [(grid, points, 7, 0, 0.5)]
    at = points.data_ptr()
    assert kernel.launches["bound"] == [(grid, at, 7, 1, 0.25, 64), (grid, at, 7, 1, 0.125, 64)]

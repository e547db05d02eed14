"""What float32 coordinates add to a residual: bounds of it, what kernels make up for, and solves that need it; under
the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_rounding
from interpret_fs2_rounding import CASES, SOLVES


def judge(case, found):
    d, distance, kept, every = case[2], case[5], found["of kept pairs"], found["of all pairs"]
    # as of exponents in `test_fs2_sweep_kernels`: float32 sums of d + 3 terms, and of parts and log2 weights
    exponents = math.log(2) * 2.0**-24 * (d + 4) * (found["parts"] + 30.0)
    assert 0 < kept < every, (case, found)
    for name in ("rows", "cols"):
        assert found[name] <= kept + exponents, (case, found, exponents)
        assert found[f"{name} as rounded"] <= every + exponents, (case, found, exponents)
        if distance and not found["wide"]:  # what was lost counts at the width of an image, not at the distance
            assert kept < 0.01 * every and found[name] < 0.02 * found[f"{name} as rounded"], (case, found)


def judge_solve(tol, found):
    """Coordinates as rounded put these off by 3e-4; a tolerance of 1e-6 is below what is said to be left of that."""
    # the largest exponents of such tiles, six blurs wide, and of weights: as above
    exponents = math.log(2) * 2.0**-24 * 6 * (math.log2(math.e) * 2 * 3.0**2 + 30.0)
    assert found["true"] <= found["residual"] + found["omitted"] + exponents, found
    assert found["converged"] == (tol == 1e-4) and found["stalled"] != found["converged"], found


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_lost_coordinates_are_made_up_for_under_the_interpreter():
    (results,) = run_script("interpret_fs2_rounding.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])
    for arguments in SOLVES:
        judge_solve(arguments[0], results[str(arguments)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("case", [*CASES, (5000, 4001, 3, 32, 12.0, 3000.0, False)])
    def test_lost_coordinates_are_made_up_for(self, case):
        judge(case, interpret_fs2_rounding.case(*case, device="cuda"))

    @pytest.mark.parametrize("arguments", SOLVES)
    def test_solves_of_float64_points(self, arguments):
        judge_solve(arguments[0], interpret_fs2_rounding.solved(*arguments, device="cuda"))

"""Kernels of the balance: against torch in float64 under the interpreter and on a GPU, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_balance
from interpret_fs2_balance import BOUNDS, CASES


def judge(case, found):
    """Both end where the coarsest level's columns are off by 1e-11 or so; what that may move is rounding in the dual
    value, and in w its square root at the most. In use it ends where they are off by a hundredth of what they were:
    that leaves the square of it of the dual value, or less."""
    assert found["gained"] >= 0 and 0.1 < found["largest"] < 30 + 1e-12 and found["mean"] < 1e-12, (case, found)
    assert abs(found["gained"] - found["gained_by_torch"]) < 1e-9, (case, found)
    assert found["apart"] < 1e-6, (case, found)
    for gained in (found["in_use_gained"], found["in_use_gained_by_torch"]):
        assert abs(gained - found["gained"]) < 1e-4 * found["gained"], (case, found)
    assert 0 < found["fine_gained"] <= found["gained"] + 1e-9 and found["fine_apart"] < 1e-6, (case, found)


def judge_bounds(found):
    """Sums in float64 of numbers under a hundred; the last ones are too large as they are."""
    assert all(apart < 1e-12 for apart, _ in found), found
    assert found[-1][1] == pytest.approx(30, abs=1e-12) and found[1][1] < 29, found


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_balance.py", interpret=True)
    judge_bounds(results["bounds"])
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (5000, 4001, 0.004, 3.0, False), (3000, 5001, 0.004, 2.0, True)])
def test_agrees_with_torch_on_a_gpu(case):
    judge(case, interpret_fs2_balance.case(*case, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bounds_agree_with_torch_on_a_gpu():
    judge_bounds([interpret_fs2_balance.bounds_apart(*case, device="cuda") for case in BOUNDS])


def test_compiles_for_sm_90():
    for found in run_script("compile_fs2_balance.py", interpret=False):
        spills = 0 if found.get("SIZE") != 128 else 256  # once a Newton step, of a matrix that is rarely so large
        assert found["local_accesses"] <= spills and found["local_bytes"] == 0, found

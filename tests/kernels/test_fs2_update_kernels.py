"""Kernels of corrected half-steps: against torch in float64 under the interpreter and on a GPU; compiled for sm_90."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_updates
from interpret_fs2_updates import CASES

ROUNDING = 1e-13  # of sums in float64 of up to six hundred terms, over the largest; an ulp of potentials is 1.4e-14


def judge(case, found):
    spoiled = case[3]
    assert found["moved"] == math.isfinite(spoiled), (case, found)
    assert max(found["S"], found["u"], found["v"]) < ROUNDING, (case, found)
    assert found["S_at_w"] < ROUNDING or not math.isfinite(spoiled), (case, found)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_updates.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (20000, 30001, 32, 0.0)])
def test_agrees_with_torch_on_a_gpu(case):
    judge(case, interpret_fs2_updates.case(*case, device="cuda"))


def test_compiles_for_sm_90():
    for found in run_script("compile_fs2_updates.py", interpret=False):
        assert found["local_accesses"] == found["local_bytes"] == 0, found

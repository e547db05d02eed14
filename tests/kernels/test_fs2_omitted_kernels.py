"""Bounds of what moved potentials leave out: against torch in float64 under the interpreter, on a GPU, and compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_omitted
from interpret_fs2_omitted import CASES

ROUNDING = 1e-12  # of sums in float64 of a few thousand terms, none negative, and of exponents under sixty


def judge(case, found):
    assert found["rises"] and found["omitted"] < ROUNDING, (case, found)
    assert found["finite"] == math.isfinite(case[4]), (case, found)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_omitted.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (20000, 30001, 32, 5.0, 0.0)])
def test_agrees_with_torch_on_a_gpu(case):
    judge(case, interpret_fs2_omitted.case(*case, device="cuda"))


def test_compiles_for_sm_90():
    for found in run_script("compile_fs2_omitted.py", interpret=False):
        assert found["local_accesses"] == found["local_bytes"] == 0, found

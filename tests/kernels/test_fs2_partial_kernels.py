"""Kernels over partial sums: against torch in float64 under the interpreter and on a GPU, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_partial
from interpret_fs2_partial import CASES

ROUNDING = 1e-13  # of sums in float64 of up to a hundred numbers under one


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_partial.py", interpret=True)
    assert all(max(results[str(case)]) < ROUNDING for case in CASES), results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_torch_on_a_gpu(case):
    assert max(interpret_fs2_partial.case(*case, device="cuda")) < ROUNDING


def test_compiles_for_sm_90():
    for found in run_script("compile_fs2_partial.py", interpret=False):
        assert found["local_accesses"] == found["local_bytes"] == 0, found

"""Kernels of mixing: against torch in float64 under the interpreter and on a GPU, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_history
from interpret_fs2_history import CASES


def judge(case, found):
    """Rounding in float64 of potentials of ten or so, times the condition of the normal equations, a thousand."""
    assert found["apart"] < 1e-11 and found["moved"] > 0.1 and found["not_finite_is_not_mixed"], (case, found)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_history.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (200001, 5)])
def test_agrees_with_torch_on_a_gpu(case):
    judge(case, interpret_fs2_history.case(*case, device="cuda"))


def test_compiles_for_sm_90():
    for found in run_script("compile_fs2_history.py", interpret=False):
        assert found["local_accesses"] == found["local_bytes"] == 0, found

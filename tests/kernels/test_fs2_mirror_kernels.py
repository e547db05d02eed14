"""Kernels over lists of tile pairs: against torch under the interpreter and on a GPU, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_mirror
from interpret_fs2_mirror import CASES, COARSE_CASES


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    ((lists, coarser),) = run_script("interpret_fs2_mirror.py", interpret=True)
    assert all(lists[str(case)] for case in CASES), lists
    assert all(coarser[str(case)][0] and coarser[str(case)][1] for case in COARSE_CASES), coarser


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_agrees_with_torch_on_a_gpu():
    for case in (*CASES, (20_000, 30_000, 0.02), (100_000, 70, 0.5)):
        assert interpret_fs2_mirror.case(*case, device="cuda"), case
    for case in (*COARSE_CASES, (5000, 7000, 0.05)):
        assert interpret_fs2_mirror.coarse_case(*case, device="cuda")[0], case


def test_compiles_for_sm_90():
    results = run_script("compile_fs2_mirror.py", interpret=False)
    assert len(results) == 10
    for found in results:
        assert found["local_bytes"] == found["local_accesses"] == 0, found

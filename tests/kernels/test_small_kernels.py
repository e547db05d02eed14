"""The kernels that touch every point once compile for sm_90 and keep their values in registers."""

from __future__ import annotations

import pytest
from test_sweep_kernels import run_script

pytest.importorskip("triton")


def test_compile_for_hopper():
    found = run_script("compile_small.py", interpret=False)
    assert len(found) == 9
    for kernel in found:
        assert kernel["local_bytes"] == 0, kernel
        # One value across the call of a library function; of the survey one in the code of either cloud.
        assert kernel["local_accesses"] <= (4 if kernel["kernel"] == "survey_kernel" else 2), kernel

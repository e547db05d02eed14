"""Anderson's history in Triton against the one in torch, under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from test_sweep_kernels import run_script

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_mixing.py", interpret=True)
    assert len(results) == 3
    for case, errors in results.items():
        for name, error in errors.items():  # coefficients reach the kernel as float32
            assert error < (1e-9 if name == "numbers" else 1e-5), (case, name)

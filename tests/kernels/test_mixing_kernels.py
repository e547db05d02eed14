"""Anderson mixing in Triton against that in torch, under the interpreter."""

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
    for case, found in results.items():
        assert found["rejected"], case  # the case has an absurd step, which both must see
        for name, error in found["worst"].items():
            # Nearly singular normal equations magnify in what order sums are taken.
            assert error < (1e-9 if name in ("numbers", "state") else 1e-5), (case, name)

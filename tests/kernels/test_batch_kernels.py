"""Batches in Triton under the interpreter: the same bits as each problem alone, and true residuals."""

from __future__ import annotations

import numpy as np
import pytest
from test_sweep_kernels import run_script

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_batches_under_the_interpreter():
    (results,) = run_script("interpret_batches.py", interpret=True)
    steps, found = results["half_steps"], results["solved"]
    assert len(steps) == 3 and {case: each["worst"] for case, each in steps.items()} == dict.fromkeys(steps, 0.0)
    assert any(each["rejected"] for each in steps.values())  # an absurd step in one problem
    assert all(found["converged"]) and all(found["converged_alone"])
    assert all(residual <= tol for residual, tol in zip(found["residual"], found["tol"], strict=True))
    assert found["made_exact"] == [False, True, False]  # packed sweeps round as much as the second asks for
    # Rounding is an eighth of what is asked for at most, or exact sweeps took over, of differences: 1e-6.
    assert found["residual"] == pytest.approx(found["truth"], rel=0.125, abs=1e-6)
    assert found["residual_alone"] == pytest.approx(found["truth_alone"], rel=0.125, abs=1e-6)

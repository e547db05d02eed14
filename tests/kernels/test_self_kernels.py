"""One cloud as the rows and the columns of the same sweep, under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from test_sweep_kernels import run_script

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_a_cloud_swept_against_itself_under_the_interpreter():
    (results,) = run_script("interpret_self.py", interpret=True)
    assert len(results) == 9
    for case, found in results.items():
        # Fourteen sweeps divide the error by 3^14 at least; exponents as large as cost / eps are held in float32.
        tolerance = 2e-5 + 3e-7 * found["cost_over_eps"]
        assert found["truth"] < tolerance, (case, found)
        assert found["residual"] == pytest.approx(found["truth"], abs=tolerance), (case, found)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
@pytest.mark.slow
def test_rounding_of_a_cloud_and_its_copy_cancels_under_the_interpreter():
    """float32 rounds exponents of 2e4 to 1e-3: that must be the same in all three problems."""
    (results,) = run_script("interpret_copies.py", interpret=True)
    assert len(results) == 6
    for case, found in results.items():
        assert found["converged"] and abs(found["divergence_over_eps"]) <= 1e-6, (case, found)

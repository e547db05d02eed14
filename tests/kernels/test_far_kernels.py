"""Points without weight where fp16 operands no longer hold them, under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from test_sweep_kernels import run_script

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_their_potentials_are_the_soft_min_extension():
    (found,) = run_script("interpret_far.py", interpret=True)
    assert len(found) == 6
    for case, errors in found.items():
        # within a span: float32 sums of exponents up to 16 with as many products, half an ulp, 5e-7, for each of a few
        assert len(errors) == 6 and max(errors) < 2e-6, (case, errors)

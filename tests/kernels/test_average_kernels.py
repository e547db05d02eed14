"""Kernels that carry values: against float64 under the interpreter, and compiled for sm_90 without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from test_sweep_kernels import run_script

from solvers.flash_sinkhorn.sweeps.tiles import HOPPER_SHARED_BYTES, LARGEST_PACKED_DIMENSION, Precision

pytest.importorskip("triton")

from interpret_averages import CASES

VARIANTS = [
    "mean:exact:3:1",
    "mean:exact:3:3",
    "mean:exact:3:8",
    "mean:exact:3:128",
    "mean:exact:16:16",
    "mean:fast:16:16",
]
VARIANTS += [f"mean:{precision}:{d}:1" for precision in ("fast", "mixed", "exact") for d in (64, 512)]
VARIANTS += [f"mean:{precision}:{d}:{d}" for precision in ("fast", "mixed", "exact") for d in (64, 128, 512)]
VARIANTS += [f"own:{precision}:{d}:{d}" for precision in ("fast", "exact") for d in (16, 64, 128)]
VARIANTS += [f"moment:exact:{d}:{d}" for d in (1, 3, 16, 64, 128, 512)] + ["moment:fast:64:64"]
VARIANTS += ["still:exact:3:3", "still:exact:64:64"]


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
@pytest.mark.slow
def test_means_and_moments_agree_with_float64_under_the_interpreter():
    (results,) = run_script("interpret_averages.py", interpret=True)
    for case, errors in zip(CASES, results, strict=True):
        _, _, d, precision, *_, motions = case
        assert len(errors) == 8 + 2 * len(motions) + ("both" in motions)
        # Exact: exponents are float32 sums of up to about 100. Rounded: 10-bit mantissas of points and values.
        exact = precision is Precision.EXACT or d <= LARGEST_PACKED_DIMENSION
        tolerance = 2e-5 if exact else 2e-3
        swept = errors.pop("sums swept")
        assert max(errors.values()) < tolerance, (case, errors)
        # Half an ulp of 2^7 each: hi.hi and two products with lo onto biases, scale, column's rest, log2, row's rest.
        assert swept < (7 * 2.0**-18 if exact else 2e-3), (case, errors)


def test_value_kernels_compile_for_sm_90_without_spills():
    kernels = run_script("compile_averages.py", *VARIANTS, interpret=False)
    by_variant = {found["variant"]: found for found in kernels}
    assert len(by_variant) == len(VARIANTS)
    for found in kernels:
        kernel, _, d, k = found["variant"].split(":")
        assert found["local_accesses"] == 0 and found["local_bytes"] == 0, found
        assert (found["hgmma"] > 0) == (int(d) > 4 or (kernel == "mean" and int(k) > 8)), found
        if kernel == "own":  # one tile of points where values of their own need two
            assert found["shared_bytes"] < 0.75 * by_variant[found["variant"].replace("own", "mean")]["shared_bytes"]
        assert found["ex2"] > 0 and found["shared_bytes"] <= HOPPER_SHARED_BYTES

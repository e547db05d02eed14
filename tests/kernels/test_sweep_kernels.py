"""FlashSinkhorn's kernels: against float64 under the interpreter, and compiled for sm_90 without a GPU.

Both run in processes of their own, because TRITON_INTERPRET is read when triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from solvers.flash_sinkhorn.sweeps.tiles import Precision

pytest.importorskip("triton")

HERE = Path(__file__).parent
VARIANTS = ["exact:1", "exact:3", "exact:16", "fast:1", "fast:3", "mixed:5"]
VARIANTS += [f"{precision}:{d}" for precision in ("fast", "mixed", "exact") for d in (64, 128, 512)]
VARIANTS += [f"{precision}:{d}:small" for precision in ("fast", "mixed", "exact") for d in (64, 128, 512)]


def run_script(name: str, *arguments: str, interpret: bool) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    first = []
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
        first = [str(HERE / "quick_interpreter.py")]
    command = [sys.executable, *first, str(HERE / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_half_steps_agree_with_float64_under_the_interpreter():
    (results,) = run_script("interpret_sweeps.py", interpret=True)
    assert len(results) == 17
    for case, errors in results.items():
        # Exponents are as large as cost / eps and held in float32: half an ulp each for a few summands and half-steps.
        tolerance = 2e-6 + 3e-7 * errors["cost_over_eps"]
        assert max(errors["f"], errors["g"]) < tolerance, (case, errors)
        assert errors["residual"] < max(2e-6, tolerance), (case, errors)
        # Of a bias float32 holds coarse parts exactly, and of a rest, half at most, all but half an ulp.
        assert errors["bias"] < 2.0**-25 and errors["rest"] <= 0.5 and errors["coarse"], (case, errors)
        assert errors["whole"], (case, errors)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_powers_by_polynomial_are_as_exact_as_float32():
    (found,) = run_script("interpret_exponentials.py", interpret=True)
    ulp = 2.0**-23
    assert found["power"] < 1.5 * ulp and found["whole_exact"]  # the fit's 0.7 and roundings of its last steps
    assert found["low"] == [
        2.0**-125
    ]  # the least it gives, of points without weight too: nothing beside a sum near one
    assert max(found["sums"].values()) < ulp  # of terms below one


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Kernels of all variants, by one process: its imports take longer than a compilation."""
    return run_script("compile_sweeps.py", *VARIANTS, interpret=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sweep_compiles_for_sm_90_without_spills(variant, compiled):
    precision, d = variant.split(":")[:2]
    packed = Precision(precision).packs(int(d))
    kernels = [found for found in compiled if found["variant"] == variant]
    assert len(kernels) == (2 if precision == "mixed" and not packed else 1)
    for found in kernels:
        assert found["local_accesses"] == 0 and found["local_bytes"] == 0, found
        assert (found["hgmma"] > 0) == (packed or int(d) > 4), found
        assert found["ex2"] > 0


def test_low_d_takes_an_eighth_of_a_thread_s_64_powers_by_polynomial(compiled):
    low, high = (next(found for found in compiled if found["variant"] == variant) for variant in ("fast:3", "fast:64"))
    assert high["ex2"] - low["ex2"] == 64 // 8

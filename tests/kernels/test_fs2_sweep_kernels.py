"""Kernels of block-sparse passes: against dense float64 under the interpreter, and compiled for sm_90."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")

import interpret_fs2_sweep
from interpret_fs2_sweep import CASES, poison


def judge(case, errors):
    d, extent = case[2], case[4]
    # An exponent is a float32 sum of d + 3 terms; where it counts, none is far above the parts that a row and a column
    # bring (frames of both) and log2 of a weight, 30 here. Half an ulp each, and as much for the sum.
    tolerance = math.log(2) * 2.0**-24 * (d + 4) * (errors.pop("parts") + 30.0)
    wide = errors.pop("wide")
    for name, found in errors.items():
        assert found["rows"] > 0.3, (case, name, found)  # as many as the kept tile pairs leave something
        assert max(found["sums"], found["partial"]) < tolerance, (case, name, found, tolerance)
        assert found["values"] < 4.0 * tolerance, (case, name, found, tolerance)  # values reach four
    if extent == 3000.0:
        assert 0.0 < wide[0] < 1.0 and 0.0 < wide[1] < 1.0, (case, wide)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_passes_agree_with_dense_float64_under_the_interpreter():
    (results,) = run_script("interpret_fs2_sweep.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "case", [*CASES, (5000, 4001, 3, 32, 12.0, 1.0, False, 0.5), (3000, 5001, 4, 64, 6.0, 1.0, True, 0.7)]
)
def test_passes_agree_with_dense_float64_on_a_gpu(case, monkeypatch):
    monkeypatch.setattr(torch, "empty", torch.empty)  # restores it afterwards
    poison()
    judge(case, interpret_fs2_sweep.case(*case, device="cuda"))


# Instructions an exponential in the loop over tile pairs; eight issue slots is what the exponential unit leaves.
MOST = {"1:32": 5.5, "2:32": 7.0, "3:32": 8.0, "3:64": 7.2, "4:32": 9.5, "6:32": 12.5}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Every kernel, by one process: its imports take longer than a compilation."""
    kinds = dict.fromkeys(MOST, ("partial", "values-far"))
    kinds["3:32"] = ("partial", "sums", "maximum", "values", "partial-far")
    variants = [f"{variant}:{kind}" for variant in MOST for kind in kinds[variant]]
    return run_script("compile_fs2_sweep.py", *variants, "1", "3", "6", interpret=False)


@pytest.mark.parametrize("variant", MOST)
def test_sweep_compiles_for_sm_90(variant, compiled):
    sweeps = [found for found in compiled if found["variant"].startswith(variant)]
    assert len(sweeps) == (5 if variant == "3:32" else 2)
    for found in sweeps:
        assert found["local_accesses"] == 0 and found["local_bytes"] == 0, found
        if found["variant"].endswith(("partial", "sums")):
            assert found["loop"] / found["loop_ex2"] < MOST[variant], found
            assert found["loop_float64"] == 0, found


def test_frames_and_sums_compile_for_sm_90(compiled):
    frames = [found for found in compiled if "kernel" in found["variant"]]
    assert len(frames) == 6
    for found in frames:
        assert found["local_accesses"] <= 2 and found["local_bytes"] == 0, found  # a register across a library call

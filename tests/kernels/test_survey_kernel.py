"""The survey kernel against torch: under the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_survey.py", interpret=True)
    assert len(results) == 8
    for case, found in results.items():
        assert found["counts"], case
        assert found["summary"] < 1e-12, case
        assert found["fewer"] < 1e-12, case
        assert found["other"] < 1e-12, case
        assert found["sum"] < (1e-12 if "64" in case else 1e-6), case  # torch sums float32 points in float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("n", "d"), [(1, 1), (1000, 3), (100_003, 5), (5000, 700)])
def test_agrees_with_torch_on_a_gpu(n, d):
    from solvers.flash_sinkhorn.inputs.survey import _summarise, survey

    points, weight = torch.randn(n, d, device="cuda"), torch.rand(n, device="cuda", dtype=torch.float64) + 0.1
    if n > 1:
        weight[n // 2], points[n // 2] = 0.0, 1e6
    want, want_sum = _summarise(points.cpu(), weight.cpu())
    for found in survey(points, weight, points, weight):
        assert torch.tensor(found.summary, dtype=torch.float64).sub(want).abs().max() < 1e-9 * n
        assert (found.weighted_sum.cpu() - want_sum).abs().max() < 1e-4 * n

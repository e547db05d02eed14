"""The kernel of the screen's bounds: against torch under the interpreter, compiled for sm_90, and whole screens on a
GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.screen import screen, thin

pytest.importorskip("triton")


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_screen.py", interpret=True)
    assert len(results) == 9
    for case, found in results.items():
        assert found["pairs"] == int(case.split()[0]) and found["infinite"], case
        assert found["error"] < 1e-14, case  # float64, of the size of k |x - y|^2; float32 of k alone would be 4e-8


def test_compiles_for_sm_90():
    results = run_script("compile_fs2_screen.py", interpret=False)
    assert [found["d"] for found in results] == [1, 3, 6]
    for found in results:
        assert found["local_bytes"] == found["local_accesses"] == 0, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("n", "m", "d"), [(1, 300, 2), (100_003, 70_000, 3), (5000, 5000, 6)])
def test_trees_and_screens_on_a_gpu_are_those_of_the_cpu(n, m, d):
    on_cpu, on_gpu = (screened(n, m, d, device) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu[0], on_gpu[0], strict=True):
        assert torch.equal(one.tree.order, other.tree.order.cpu())
        torch.testing.assert_close(one.half_box, other.half_box.cpu())
    for one, other in zip(on_cpu[1], on_gpu[1], strict=True):
        pairs, others = ((mask.row_of_entries() * len(mask.col_bound) + mask.cols).cpu() for mask in (one, other))
        different = ~torch.isin(pairs, others), ~torch.isin(others, pairs)
        # in one tile of a thousand rounding may decide whether its last pair still fits into the budget
        tiles = len(one.row_bound) + len(one.col_bound)
        assert sum(int(some.sum()) for some in different) <= 1e-3 * tiles
        close = torch.isclose(one.row_bound, other.row_bound.cpu(), rtol=1e-5, atol=0)
        assert (~close).double().mean() <= 0.01


def screened(n, m, d, device):
    """Clouds, and masks of them after the screen and after thinning."""
    generator = torch.Generator().manual_seed(n)
    points = [torch.rand(size, d, generator=generator).to(device) for size in (n, m)]
    weights = [torch.rand(size, generator=generator, dtype=torch.float64).to(device) for size in (n, m)]
    x, y = tiled_clouds(*points, *weights)
    mask = screen(x, y, torch.zeros_like(x.weight), torch.zeros_like(y.weight), 0.7 * n ** (2 / d), budget=1e-3)
    cost = 1e-4 * torch.frac(0.618 * mask.row_of_entries().double() + 0.733 * mask.cols)
    return (x, y), (mask, thin(mask, cost, 1e-4 - cost, budget=2e-3))

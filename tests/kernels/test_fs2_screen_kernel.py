"""The screen's kernels: against torch under the interpreter, compiled for sm_90, and whole screens on a
GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sweep_kernels import run_script

from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.screen import screen, thin

pytest.importorskip("triton")

import interpret_fs2_screen
from interpret_fs2_screen import CASES

from solvers.flash_sinkhorn2.screen import triton_planes


def judge(case, found):
    for side in found["planes"]:
        # sums of float64 in another order; slopes solve equations of a condition of a few hundred (`RIDGE`)
        assert max(side["boxes"], side["offsets"]) < 1e-14 and side["slopes"] < 1e-12, (case, side)
    assert found["pairs"] and found["walked"], case
    low, high = found["exponents"]  # two ulps of a float32 up to 2^13 at the most
    assert low >= 0.0 and high < 2.0**-9, (case, found)
    assert found["bounds"] < 1e-10, (case, found)  # exponents of 1e4 in float64, summed
    assert found["costs"] and found["moved"], case
    ours, by_sorting = found["left_out"]
    assert abs(ours - by_sorting) <= 1 + 0.01 * by_sorting, (case, found)  # costs that are one float32
    off, agree = found["thinned"]
    assert off < 1e-12 and agree, (case, found)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_agrees_with_torch_under_the_interpreter():
    (results,) = run_script("interpret_fs2_screen.py", interpret=True)
    for case in CASES:
        judge(case, results[str(case)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (30_001, 20_000, 3, 32)])
def test_agrees_with_torch_on_a_gpu(case, monkeypatch):
    monkeypatch.setattr(triton_planes, "FIRST_DEPTH", triton_planes.FIRST_DEPTH)  # restores it afterwards
    judge(case, interpret_fs2_screen.case(*case, device="cuda"))


def test_compiles_for_sm_90():
    results = run_script("compile_fs2_screen.py", interpret=False)
    thinning = {"mark_kernel", "split_kernel", "bound_kernel", "keep_kernel", "bounded_kernel", "moved_kernel"}
    assert {found["kernel"] for found in results} == {"plane_kernel", "walk_kernel", *thinning}
    for found in results:
        assert found["local_bytes"] == found["local_accesses"] == 0, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("n", "m", "d"), [(1, 300, 2), (100_003, 70_000, 3), (5000, 5000, 6)])
def test_trees_and_screens_on_a_gpu_are_those_of_the_cpu(n, m, d, monkeypatch):
    monkeypatch.setattr(triton_planes, "FIRST_DEPTH", 0)  # from the root, as on a CPU
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
    # as good as random: costs of a list that are one float32 would be left out or kept together on a GPU only
    cost = 1e-4 * torch.frac(1e4 * torch.sin(12.9898 * mask.row_of_entries().double() + 78.233 * mask.cols)).abs()
    return (x, y), (mask, thin(mask, cost, 1e-4 - cost[mask.to_columns], budget=2e-3))

"""Divergences of clouds that are copies, translated copies or nearly so: exact, at any eps, and in few sweeps."""

from __future__ import annotations

import math

import pytest
import torch

from solvers.flash_sinkhorn import transport

pytestmark = pytest.mark.filterwarnings("ignore:solved to tol:RuntimeWarning")

GRID = 2.0**-8  # coordinates of a float32 cloud near 1e4 that is still an exact copy when moved


def cloud(n, d, seed=0):
    points = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.round(points / GRID) * GRID


def weights(n):
    w = torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    return w / w.sum()


@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")  # float32 exponents of up to 1e8
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 0.0), (torch.float32, 1e4), (torch.float64, 1e6)])
@pytest.mark.parametrize("d", [1, 3, 10, 200])
@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-2, 1.0])
def test_a_translated_copy_is_at_the_squared_distance(device, dtype, offset, d, eps):
    """To 1e-5 at any eps, d and offset at which the stored clouds are exact copies, in any order of the points."""
    x, a = cloud(64, d) + offset, weights(64)
    t = torch.zeros(d, dtype=torch.float64)
    t[0] = 0.25
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    moved = (v.to(device) for v in (x.to(dtype), (x + t).to(dtype)[order], a, a[order]))
    result = transport(*moved, eps=eps, debias=True, max_iterations=100)
    # Exponents are as large as |x|^2 / eps: rounded to float32 they move S by 1e-7 |x|^2 at most, about d 1e-7.
    exact = dtype is torch.float64 and device == "cpu"
    assert result.value.item() == pytest.approx(0.0625, rel=1e-9 if exact else max(1e-5, 1e-6 * d))


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize(("d", "eps"), [(10, 1.0), (3, 0.05)])
def test_near_copies_are_solved_in_few_sweeps_and_accurately(device, d, eps, noise):
    """Errors of the three problems cancel: far smaller than those of a start from zero, and never negative."""
    x = cloud(200, d)
    y = x + noise * math.sqrt(eps) * cloud(200, d, 1)
    y[:, 0] += 0.25
    options = {"eps": eps, "debias": True}
    expected = transport(x, y, tol=1e-9, max_iterations=5000, **options)
    found = transport(x.to(device), y.to(device), **options)
    alone = transport(x.to(device), y.to(device), eps=eps)
    assert found.converged and found.n_passes <= 60 and found.n_passes < alone.n_passes
    rounding = 1e-9 if device == "cpu" else 1e-6
    assert found.value.item() == pytest.approx(expected.value.item(), abs=eps * max(1e-3 * noise, rounding))


def test_other_clouds_are_not_held_up(device):
    """Two sweeps show that the start is no good; the result is that of any other start."""
    x, y = cloud(150, 2).to(device), (cloud(140, 2, 1).abs() * 2 + 1).to(device)
    found = transport(x, y, eps=0.05, debias=True)
    alone = transport(x, y, eps=0.05)
    assert found.ot.item() == alone.ot.item() and found.converged
    assert found.n_passes <= alone.n_passes + 2 + 2 * 16


def test_rounded_clouds_and_other_masses(device):
    x = cloud(70, 20).float().to(device)
    y = x + torch.full((20,), 0.125, device=device)
    a = (3 * weights(70)).to(device)
    for precision in ("exact", "mixed", "fast"):
        result = transport(x, y, a, a, eps=0.5, debias=True, precision=precision)
        assert result.converged and result.value.item() == pytest.approx(3 * 20 * 0.125**2, rel=1e-5)

"""Public bug reports of neighbouring tools (theme 1, numerics; theme 2, inputs) held against FlashSinkhorn's solver.

S is the debiased value OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2 from three plain solves, full cost.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fsbench.api import FixedIterations, Spec, Unsupported
from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.bench import FlashSinkhorn


def value(x, y, a=None, b=None, *, device="cpu", tol=1e-6, annealing=0.5, **options):
    """(dual value, result) of one solve; weights uniform if None."""
    a = torch.full((len(x),), 1 / len(x), dtype=torch.float64) if a is None else a.double()
    b = torch.full((len(y),), 1 / len(y), dtype=torch.float64) if b is None else b.double()
    moved = (v.to(device) for v in (x, y, a, b))
    result = solve(*moved, tol=tol, annealing=annealing, max_iterations=3000, **options)
    return (a @ result.f.cpu() + b @ result.g.cpu()).item(), result


def divergence(x, y, a=None, b=None, **options):
    xy, xx, yy = (value(p, q, u, v, **options)[0] for p, q, u, v in ((x, y, a, b), (x, x, a, a), (y, y, b, b)))
    return xy - (xx + yy) / 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("eps", [1e-6, 2.5e-3, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n01_almost_identical_clouds_have_a_positive_divergence(device, dtype, eps):
    spread = 0.25 / math.sqrt(2 * 160)  # distances of about 0.25 in all
    x = (1.0 + spread * torch.randn(50, 160, generator=generator(), dtype=torch.float64)).to(dtype)
    shift = torch.zeros(160, dtype=dtype)
    shift[0] = 0.01
    found = divergence(x, x + shift, eps=eps, device=device)
    # Stored float32 copies differ from a translate by an ulp of one; the report asks for 5 %.
    assert found == pytest.approx(1e-4, rel=0.05)


def test_n06_debiased_value_is_least_at_equal_width(device):
    """R8: N(0, 1) against N(0, s^2) on a grid; the plain value shrinks, the divergence does not."""
    nodes = torch.linspace(-14, 14, 401, dtype=torch.float64)[:, None]

    def normal(std):
        w = torch.exp(-(nodes[:, 0] ** 2) / (2 * std**2))
        return w / w.sum()

    assert value(nodes, nodes, normal(1), normal(2), eps=0.5, device=device)[0] == pytest.approx(1.777670, abs=1e-4)
    assert value(nodes, nodes, normal(1), normal(1), eps=0.5, device=device)[0] == pytest.approx(0.612178, abs=1e-4)
    stds = np.arange(0.75, 1.2, 0.05)
    plain = [value(nodes, nodes, normal(1), normal(s), eps=0.5, device=device)[0] for s in stds]
    debiased = [divergence(nodes, nodes, normal(1), normal(s), eps=0.5, device=device) for s in stds]
    assert stds[np.argmin(debiased)] == pytest.approx(1.0, abs=0.026)
    assert stds[np.argmin(plain)] == pytest.approx(math.sqrt(1 - 0.5 / 2), abs=0.051)


@pytest.mark.parametrize("precision", ["fast", "mixed", "exact"])
def test_n13_and_n41_offsets_do_not_change_the_answer_in_any_precision(device, precision):
    far = torch.randn(50, 2, generator=generator()) * 2 - 30
    moved = far + torch.tensor([0.3, 0.0])
    assert divergence(far, moved, eps=0.05, device=device, precision=precision) == pytest.approx(0.09, rel=0.01)
    high = torch.randn(512, 64, generator=generator()) + 5
    shift = torch.zeros(64)
    shift[:4] = 0.05
    found = divergence(high, high + shift, eps=0.05, device=device, precision=precision, tol=1e-5)
    assert found == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("eps", [0.01, 1.0])
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_n14_a_cloud_is_at_no_distance_from_itself(device, precision, eps):
    x = torch.randn(64, 128, generator=generator())
    assert abs(divergence(x, x.clone(), eps=eps, device=device, precision=precision)) < 1e-5


def test_n17_histograms_with_empty_bins(device):
    bins = torch.arange(300, dtype=torch.float64)[:, None]
    weight = torch.sin(torch.arange(300, dtype=torch.float64) / 20).clamp_min(0)
    weight = weight / weight.sum()
    assert (weight == 0).sum() == 127
    if (
        device == "cuda"
    ):  # float32 exponents: potentials of 1e5 eps are known to a hundredth of eps only, and it says so
        assert not value(bins, bins + 3, weight, weight, eps=0.01, device=device)[1].converged
        return
    assert divergence(bins, bins + 3, weight, weight, eps=0.01, device=device) == pytest.approx(9.0, abs=1e-2)


@pytest.mark.parametrize("eps", [1e-2, 1.0, 10.0])
def test_n20_value_lies_between_the_assignment_and_its_entropy(device, eps):
    x, y = (torch.rand(60, 784, generator=generator(seed), dtype=torch.float64) for seed in (0, 1))
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    assignment = cost[linear_sum_assignment(cost)].mean()
    tol = 1e-3 if device == "cuda" and eps < 0.1 else 1e-4  # float32 exponents of 2e4 are known to 7e-4
    found, result = value(x, y, eps=eps, device=device, tol=tol, annealing=0.9)
    assert result.converged
    slack = tol * cost.max() + 1e-5 * cost.max()  # residual times cost, float32 exponents
    assert assignment - slack <= found <= assignment + eps * math.log(60) + slack


def test_n22_matrix_of_divergences_is_symmetric_with_a_zero_diagonal(device):
    clouds = [
        math.sqrt(0.4) * torch.randn(25, 2, generator=generator(k)) + torch.tensor([k / 2, math.sin(k)])
        for k in range(4)
    ]
    matrix = np.array([[divergence(p, q, eps=0.5, device=device) for q in clouds] for p in clouds])
    off_diagonal = matrix[~np.eye(4, dtype=bool)]
    assert np.abs(np.diag(matrix)).max() < 1e-5 and off_diagonal.min() > 1e-3
    assert np.abs(matrix - matrix.T).max() < 1e-5


def test_n31_translation_and_scale(device):
    x = torch.randn(100, 3, generator=generator())
    y = x + torch.tensor([20.0, 0.0, 0.0])
    assert divergence(x, y, eps=0.01, device=device) == pytest.approx(400.0, rel=1e-4)
    assert divergence(x / 2, y / 2, eps=0.0025, device=device) == pytest.approx(100.0, rel=1e-4)


@pytest.mark.parametrize("eps", [0.1, 1e-3])
def test_n32_swapping_the_clouds_changes_nothing(device, eps):
    x, y = torch.randn(40, 2, generator=generator()), torch.randn(25, 2, generator=generator(1))
    a, b = torch.rand(40, generator=generator(2)), torch.rand(25, generator=generator(3))
    a, b = a / a.sum(), b / b.sum()
    forth, one = value(x, y, a, b, eps=eps, device=device, tol=1e-4, annealing=0.9)
    back, other = value(y, x, b, a, eps=eps, device=device, tol=1e-4, annealing=0.9)
    assert one.converged and other.converged
    assert forth == pytest.approx(back, rel=1e-4)


def test_n40_equal_masses_other_than_one_are_solved_and_unequal_ones_refused():
    points = torch.tensor([[0.0], [1.0]])
    a, b = torch.tensor([0.5, 1.5]), torch.tensor([1.2, 0.8])
    result = solve(points, points, a, b, eps=0.3, tol=1e-7)
    plan = a[:, None] * b * torch.exp((result.f[:, None] + result.g - (points - points.T).square()) / 0.3)
    linear = (plan * (points - points.T).square()).sum()
    entropy = (plan * (plan / (a[:, None] * b)).log() - plan + a[:, None] * b).sum()
    assert linear.item() == pytest.approx(0.701450, abs=1e-5)
    assert (linear + 0.3 * entropy).item() == pytest.approx(0.976785, abs=1e-5)
    with pytest.raises(ValueError, match="mass"):
        solve(points, points, a, torch.tensor([1.2, 1.8]), eps=0.3, tol=1e-6)


def test_i06_scalars_from_anywhere_but_arrays_from_one_device():
    x = torch.randn(8, 2, generator=generator())
    plain = solve(x, x, eps=0.5, n_iterations=3)
    for eps in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        assert torch.equal(solve(x, x, eps=eps, n_iterations=3).f, plain.f)
    with pytest.raises(ValueError, match=r"a must be on .*meta"):
        solve(x.to("meta"), x.to("meta"), torch.ones(8), None, eps=0.5, n_iterations=3)


def test_i14_an_unsupported_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    spec = Spec(10, 10, 3, 0.1, 1.0, "float32", "cuda")
    with pytest.raises(Unsupported, match=r"capability 8\.0"):
        FlashSinkhorn().supports(spec, FixedIterations(1))


def test_no_warning_is_raised_by_ordinary_use(device):
    x = torch.randn(30, 3, generator=generator())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value(x, x + 1, eps=0.1, device=device)

"""The adapter of the published package where there is no GPU: what it reads from the package's autograd node."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fsbench.api import FixedIterations, Problem, Spec, Task, ToResidual, Unsupported

flash_sinkhorn = pytest.importorskip("flash_sinkhorn")

from flash_sinkhorn import _autograd  # noqa: E402

from solvers.adapters import flash_sinkhorn_pypi as adapter  # noqa: E402

EPS = 0.5


class _Loss:
    """SamplesLoss past its check for a GPU: the package's own autograd function on a fixed schedule."""

    def __call__(self, a, x, b, y):
        config = _autograd._SinkhornConfig(**_fields())
        return _autograd._SinkhornCostFn.apply(x, y, a, b, (EPS,) * 3, config, None, None, None)


def _fields() -> dict:
    """The configuration that the adapter's own loss would pass on."""
    loss = adapter._loss("alternating", False, EPS, 3, None, 10, False, potentials=False)
    names = _autograd._SinkhornConfig.__dataclass_fields__
    known = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return {name: None for name in names} | known | {"backend": "alternating"}


def test_potentials_and_gradients_come_from_one_solve(monkeypatch):
    solved = []
    f, g = torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([-1.0, 5.0])

    def solve(x, y, a, b, **settings):
        solved.append(settings["n_iters"])
        return f, g

    monkeypatch.setattr(_autograd, "sinkhorn_flashstyle_alternating", solve)
    monkeypatch.setattr(_autograd._SinkhornGradFn, "apply", lambda x, y, *rest: (2 * x, 3 * y))
    x, y = torch.randn(3, 2), torch.randn(2, 2)
    problem = Problem(x, y, torch.full((3,), 1 / 3), torch.full((2,), 0.5), Spec(3, 2, 2, EPS, 1.0, "float32", "cpu"))

    def padded(a, x, b, y):
        return _Loss()(torch.cat([a, a.new_zeros(1)]), torch.cat([x, x.new_zeros(1, 2)]), b, y)

    got_f, got_g, grad_x, grad_y = adapter._with_gradients(padded, problem)
    assert solved == [3]
    assert torch.equal(got_f, f[:3]) and torch.equal(got_g, g)
    assert torch.equal(grad_x, 2 * x) and torch.equal(grad_y, 3 * y)
    assert not x.requires_grad and not y.requires_grad


def test_a_divergence_has_the_potentials_of_its_three_problems(monkeypatch):
    """The loss combines OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2, as the package's `SamplesLoss(debias=True)` does."""
    rng = torch.Generator().manual_seed(0)
    known = {}

    def solve(x, y, a, b, **settings):
        f, g = torch.randn(len(x), generator=rng), torch.randn(len(y), generator=rng)
        return known.setdefault((len(x), len(y)), (f, g))

    def debiased(a, x, b, y):
        loss = _Loss()
        return loss(a, x, b, y) - 0.5 * loss(a, x, a, x) - 0.5 * loss(b, y, b, y)

    monkeypatch.setattr(_autograd, "sinkhorn_flashstyle_alternating", solve)
    x, y, a, b = torch.randn(3, 2), torch.randn(2, 2), torch.full((3,), 1 / 3), torch.full((2,), 0.5)
    spec = Spec(3, 2, 2, EPS, 1.0, "float32", "cpu", Task.DIVERGENCE)
    problem = Problem(x, y, a, b, spec)
    found = adapter._divergence(debiased, problem, 2.0, 10, [])
    pairs = (found.f, found.g), *found.self_potentials
    for got, size in zip(pairs, ((3, 2), (3, 3), (2, 2)), strict=True):
        assert all(torch.equal(p, 2 * want) for p, want in zip(got, known[size], strict=True))
    duals = [w @ f + v @ g for (f, g), (w, v) in zip(pairs, ((a, b), (a, a), (b, b)), strict=True)]
    torch.testing.assert_close(found.value, duals[0] - duals[1] / 2 - duals[2] / 2)
    assert found.n_passes == 60.0 and not found.value.requires_grad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert adapter._divergence(debiased, problem, 2.0, None, caught).converged
        warnings.warn("no convergence to threshold in 10 iterations", stacklevel=1)
    short = adapter._divergence(debiased, problem, 2.0, None, caught)
    assert (short.n_iterations, short.n_passes, short.converged) == (None, None, False)


@pytest.mark.parametrize("task", list(Task))
def test_it_takes_cuda_only_whatever_the_task(task):
    solver = adapter.FlashSinkhornPypi(allow_tf32=False)
    with pytest.raises(Unsupported, match="CUDA"):
        solver.supports(Spec(3, 2, 2, EPS, 1.0, "float32", "cpu", task), ToResidual(1e-3))


@pytest.mark.parametrize("allow_tf32", [True, False])
def test_with_tf32_the_harness_is_told_which_points_were_solved(monkeypatch, allow_tf32):
    """Those that the package's loss centres and rounds before it solves; made once no clock runs."""
    generator = torch.Generator().manual_seed(0)
    x, y = (5 + torch.randn(n, 4, generator=generator) for n in (30, 20))
    a, b = torch.full((30,), 1 / 30), torch.full((20,), 1 / 20)
    monkeypatch.setattr(adapter, "_potentials", lambda loss, problem: (torch.zeros(30), torch.zeros(20)))
    problem = Problem(x, y, a, b, Spec(30, 20, 4, EPS, 1.0, "float32", "cpu"))
    solution = adapter.FlashSinkhornPypi(allow_tf32=allow_tf32).solve(problem, FixedIterations(10))
    if not allow_tf32:
        assert solution.solved is None
        return
    centre = 0.5 * (a @ x + b @ y)
    for found, given in zip(solution.solved(), (x, y), strict=True):
        assert not (found.view(torch.int32) & 0x1FFF).any()  # ten bits of mantissa
        # Half an ulp of TF32; and of float32, below 16, for two means, their sum and the difference.
        assert ((found - (given - centre)).abs() <= 2.0**-11 * found.abs() + 4 * 2.0**-21).all()


@pytest.fixture
def multiscale():
    from solvers.adapters.flash_sinkhorn_pypi_multiscale import FlashSinkhornPypiMultiscale

    return FlashSinkhornPypiMultiscale()


@pytest.mark.parametrize("cost_scale", [1.0, 0.5])
@pytest.mark.parametrize("tol", [5e-3, 1e-4])
def test_multiscale_solves_rounded_clouds_to_the_budgets_residual(multiscale, monkeypatch, cost_scale, tol):
    """The package's own rounding; its solver needs a GPU, so one that returns known potentials stands for it."""
    from solvers.adapters import flash_sinkhorn_pypi_multiscale as module

    seen = []

    def solve(x, y, a, b, eps, tol):
        seen.append((x, y, eps, tol))
        warnings.warn("above the measured warning thresholds", RuntimeWarning, stacklevel=2)
        return x.sum(1), y.sum(1), SimpleNamespace(accepted=tol > 1e-3, fine_updates=7)

    monkeypatch.setattr(module, "solve_multiscale", solve)
    x, y, a, b = 5 + torch.randn(3, 3), 5 + torch.randn(2, 3), torch.full((3,), 1 / 3), torch.full((2,), 0.5)
    problem = Problem(x, y, a, b, Spec(3, 2, 3, EPS, cost_scale, "float32", "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = multiscale.solve(problem, ToResidual(tol))
    ((solved_x, solved_y, eps, asked),) = seen
    assert eps == EPS / cost_scale and asked == tol
    assert all(got is want for got, want in zip(solution.solved, (solved_x, solved_y), strict=True))
    centre = 0.5 * (a @ x + b @ y)
    for rounded, points in ((solved_x, x), (solved_y, y)):
        assert not (rounded.view(torch.int32) & 0x1FFF).any()  # ten bits of mantissa
        # Half an ulp of TF32, and float32's own of the uncentred points.
        assert ((rounded - (points - centre)).abs() <= 2.0**-11 * rounded.abs() + 2.0**-20).all()
    torch.testing.assert_close(solution.f, cost_scale * solved_x.sum(1))
    torch.testing.assert_close(solution.g, cost_scale * solved_y.sum(1))
    assert (solution.n_iterations, solution.n_passes, solution.converged) == (7, None, tol == 5e-3)


def test_multiscale_prepares_on_clouds_of_the_right_spacing(multiscale, monkeypatch):
    """Four spacings to the blur, whatever the unit of length."""
    seen = []
    monkeypatch.setattr(multiscale, "solve", lambda problem, budget: seen.append(problem))
    for eps in (1e-4, 100.0):
        multiscale.prepare(Spec(1000, 500, 3, eps, 1.0, "float32", "cpu"), ToResidual(5e-3))
        side = float(seen[-1].x.max() - seen[-1].x.min())
        assert seen[-1].x.shape == (1000, 3) and seen[-1].y.shape == (500, 3)
        assert side / 10 == pytest.approx(eps**0.5 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("change", "budget", "reason"),
    [
        ({"device": "cpu"}, ToResidual(1e-2), "CUDA"),
        ({"dtype": "float64"}, ToResidual(1e-2), "float32"),
        ({"d": 2}, ToResidual(1e-2), "d=3"),
        ({"task": Task.FORWARD_BACKWARD}, ToResidual(1e-2), "without gradients"),
        ({}, FixedIterations(10), "cannot be fixed"),
        ({}, ToResidual(2.0), "at most 1"),
    ],
)
def test_multiscale_says_what_it_cannot_do(multiscale, change, budget, reason):
    spec = Spec(3, 2, 3, EPS, 1.0, "float32", "cuda")
    multiscale.supports(spec, ToResidual(1e-2))
    with pytest.raises(Unsupported, match=reason):
        multiscale.supports(replace(spec, **change), budget)

"""The adapter of the published package where there is no GPU: what it reads from the package's autograd node."""

from __future__ import annotations

import pytest
import torch

from fsbench.api import Problem, Spec, Task

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
    found = adapter._divergence(debiased, Problem(x, y, a, b, spec), 2.0, 10)
    pairs = (found.f, found.g), *found.self_potentials
    for got, size in zip(pairs, ((3, 2), (3, 3), (2, 2)), strict=True):
        assert all(torch.equal(p, 2 * want) for p, want in zip(got, known[size], strict=True))
    duals = [w @ f + v @ g for (f, g), (w, v) in zip(pairs, ((a, b), (a, a), (b, b)), strict=True)]
    torch.testing.assert_close(found.value, duals[0] - duals[1] / 2 - duals[2] / 2)
    assert found.n_passes == 60.0 and not found.value.requires_grad


@pytest.mark.parametrize("task", list(Task))
def test_it_takes_cuda_only_whatever_the_task(task):
    from fsbench.api import ToResidual, Unsupported

    solver = adapter.FlashSinkhornPypi(allow_tf32=False)
    with pytest.raises(Unsupported, match="CUDA"):
        solver.supports(Spec(3, 2, 2, EPS, 1.0, "float32", "cpu", task), ToResidual(1e-3))

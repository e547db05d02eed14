"""Batches of fixed iterations: together they give what one after another does; on a GPU the same bits in one replay."""

from __future__ import annotations

import pytest
import torch

from solvers.flash_sinkhorn import SamplesLoss, transport
from solvers.flash_sinkhorn.inputs.batches import ALIKE, checked_batch
from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.losses import batches
from solvers.flash_sinkhorn.losses.functions import apart
from solvers.flash_sinkhorn.losses.joined import joined, with_values
from solvers.flash_sinkhorn.losses.transport import attached
from solvers.flash_sinkhorn.sweeps import replay
from solvers.flash_sinkhorn.sweeps.launching import Launch

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
RELAXED = [{}, {"rho": 0.5}, {"rho_x": 0.5}, {"rho_x": 0.4, "rho_y": 2.0}]
ROUNDING = 1e-11  # float64: products with a reciprocal mass for quotients, and a centre rounded once more or less


def problems(count, n, m, d, seed=0, dtype=torch.float32):
    """x, y, a, b; all spans are 10, so that units are the same alone and together."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, size, d, generator=generator, dtype=dtype).clamp(-5, 5) for size in (n, m))
    x[:, 0, 0], x[:, 1, 0], y[:, 0, 0], y[:, 1, 0] = 5.0, -5.0, 5.0, -5.0
    a, b = (torch.rand(count, size, generator=generator, dtype=dtype) + 0.1 for size in (n, m))
    return x, y, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)


def looped(x, y, a, b, **options):
    return [transport(*each, **options) for each in zip(x, y, a, b, strict=True)]


def transports(*clouds, find=batches.find_batch, **options):
    found, terms = apart(lambda *inputs: joined(find(*inputs, **options), clouds[0].shape[:1]), *clouds)
    return with_values(found, *attached(terms, *clouds, found[0].problem))


def together(*clouds, **options):
    return transports(*clouds, find=lambda *inputs, **options: [batches.find_together(*inputs, **options)], **options)


def derivatives(results, clouds):
    """Values, their gradients in all clouds, and a second derivative."""
    values = torch.stack([result.value for result in results])
    first = torch.autograd.grad(values.square().sum(), clouds, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), clouds)
    return values, *first, *second


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("relaxed", RELAXED)
def test_together_is_one_after_another(relaxed, debias):
    clouds = problems(3, 21, 17, 2, dtype=torch.float64)
    clouds[2][1, 4], clouds[0][1, 4] = 0.0, 1e9  # far away and without weight
    clouds[2][1] /= clouds[2][1].sum()
    clouds[0].mul_(0.3), clouds[1].mul_(0.3)
    mine, theirs = ([v.clone().requires_grad_() for v in clouds] for _ in range(2))
    options = {"eps": 0.7, "cost_scale": 0.5, "debias": debias, **relaxed}
    found = together(*mine, n_iterations=40, **options)
    want = looped(*theirs, n_iterations=40, **options)
    for got, each in zip(found, want, strict=True):
        assert (got.n_passes, got.residual, got.converged, got.tol) == (each.n_passes, None, None, None)
        assert got.problem == each.problem
        for name in ("ot", "f", "g", *(("f_self", "g_self", "divergence") if debias else ())):
            torch.testing.assert_close(getattr(got, name), getattr(each, name), rtol=ROUNDING, atol=ROUNDING)
        assert got.plan.row_sums().sum() > 0.1
    values = torch.stack([result.value for result in found])
    others = torch.stack([result.value for result in want])
    for got, expected in zip(
        torch.autograd.grad(values @ values, mine), torch.autograd.grad(others @ others, theirs), strict=True
    ):
        assert expected.any() and (got - expected).abs().max() < 1e-9 * expected.abs().max()


def test_second_derivatives_together():
    clouds = problems(3, 12, 9, 2, dtype=torch.float64)
    mine, theirs = ([v.clone().requires_grad_() for v in clouds] for _ in range(2))
    options = {"eps": 5.0, "debias": True, "hessian_tol": 1e-12}
    got = derivatives(together(*mine, n_iterations=60, **options), mine)
    want = derivatives(looped(*theirs, n_iterations=60, **options), theirs)
    for ours, alone in zip(got, want, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-8, atol=1e-8)


def test_only_what_is_needed_is_differentiated():
    x, y, a, b = problems(2, 8, 7, 3)
    y.requires_grad_()
    first, _ = together(x, y, a, b, n_iterations=10, eps=1.0, debias=True)
    (gradient,) = torch.autograd.grad(first.value, y)
    assert gradient[0].abs().max() > 0 and not gradient[1].any()


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x contains NaN", lambda x, y, a, b: x[1].fill_(torch.nan)),
        ("b contains NaN", lambda x, y, a, b: b[2].fill_(torch.inf)),
        ("a has negative weights", lambda x, y, a, b: a[2, 3].fill_(-1.0)),
        ("b sums to zero", lambda x, y, a, b: b[1].zero_()),
        ("same mass", lambda x, y, a, b: a[0].mul_(2.0)),
    ],
)
def test_each_problem_is_checked(name, spoil):
    clouds = problems(3, 6, 5, 2)
    spoil(*clouds)
    with pytest.raises(ValueError, match=name):
        checked_batch(*clouds, eps=1.0, cost_scale=1.0)


def test_units_are_alike_unless_that_costs_digits():
    x, y, a, b = problems(4, 9, 8, 3)
    size = torch.tensor([1.0, 1.0 / ALIKE, 0.5 / ALIKE, 0.0])[:, None, None]
    batch = checked_batch(size * x, size * y, a, b, eps=1.0, cost_scale=1.0)
    own = [checked_inputs(*each, eps=1.0, cost_scale=1.0).unit for each in zip(size * x, size * y, a, b, strict=True)]
    assert batch.units == (own[0], own[0], own[2], own[0])  # points in one place suit any unit
    assert own[1] == own[0] / ALIKE and own[2] == own[1] / 2


def test_what_is_solved_one_after_another(monkeypatch):
    """Fixed iterations on the CPU, seconds that are each problem's own, and a single problem."""
    monkeypatch.setattr(batches, "find_together", None)
    x, y, _, _ = problems(2, 6, 5, 2)
    for options, count in (({"n_iterations": 3}, 2), ({"max_seconds": 60.0}, 2), ({"tol": 1e-2}, 1)):
        loss = SamplesLoss(blur=1.0, **options)
        assert loss(x[:count], y[:count]).tolist() == [loss(x[k], y[k]).item() for k in range(count)]


def on_gpu(*sizes, **options):
    return [v.cuda().requires_grad_() for v in problems(*sizes, **options)]


def called(loss, x, y, a, b):
    """Values and gradients."""
    values = loss(a, x, b, y)
    return values.detach(), *torch.autograd.grad(values.sum(), (x, y, a, b))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"reach": 1.0}, {"reach_x": 1.0}, {"debias": False}, {"precision": "fast"}])
@pytest.mark.parametrize("d", [3, 64])
def test_same_bits_as_the_loop_at_every_call(d, options):
    """At the first call launched, at the second recorded, then replayed with other clouds."""
    replay._recordings.clear()
    loss = SamplesLoss(blur=0.5 * d**0.5, n_iterations=5, **options)
    for seed in range(4):
        clouds = on_gpu(11, 300, 211, d, seed=seed)
        together = called(loss, *clouds)
        singles = [[v.detach()[k].clone().requires_grad_() for v in clouds] for k in range(11)]
        alone = [called(loss, *each) for each in singles]
        for got, want in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.isfinite(got).all()
            assert torch.equal(got, torch.stack(want)), (seed, (got - torch.stack(want)).abs().max())


@gpu
@pytest.mark.gpu
def test_a_batch_is_a_few_replays_and_no_launch_by_launch_work(monkeypatch):
    """Debiased: iterations and values of three problems, and their gradients, whatever the batch's size."""
    replay._recordings.clear()
    loss = SamplesLoss(blur=1.0, n_iterations=5)
    counts = {"replays": 0, "launches": 0}
    replaying, launching = torch.cuda.CUDAGraph.replay, Launch.__call__

    def replayed(graph):
        counts["replays"] += 1
        return replaying(graph)

    def launched(launch, *changing):
        counts["launches"] += 1
        return launching(launch, *changing)

    for count in (1, 16, 64):
        clouds = on_gpu(count, 100, 90, 8)
        for _ in range(3):
            called(loss, *clouds)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.CUDAGraph, "replay", replayed)
            patch.setattr(Launch, "__call__", launched)
            counts |= {"replays": 0, "launches": 0}
            called(loss, *clouds)
        assert counts == {"replays": 9, "launches": 3}, count  # a survey for the pairs and for either cloud


@gpu
@pytest.mark.gpu
def test_large_batches_are_replays_of_one_recording():
    replay._recordings.clear()
    loss = SamplesLoss(blur=1.0, n_iterations=2, debias=False)
    x, y, a, b = (v.detach() for v in on_gpu(2 * replay.MOST_PROBLEMS, 40, 30, 3))
    for _ in range(2):
        values = loss(a, x, b, y)
    assert len(replay._recordings) == 2  # of iterations and of values
    assert values[-1] == loss(a[-1], x[-1], b[-1], y[-1])


@gpu
@pytest.mark.gpu
def test_a_recording_has_memory_for_as_many_problems_as_run_at_once():
    """Beyond inputs and results, 56 problems take no more than 8 do, but for the allocator's whole segments."""
    segment, n, d = 20 << 20, 2048, 64
    few, many = replay.BRANCHES, 7 * replay.BRANCHES
    taken = {}
    for count in (few, many):
        replay._recordings.clear()
        clouds = on_gpu(count, n, n, d)
        loss = SamplesLoss(blur=8.0, n_iterations=2, debias=False)
        called(loss, *clouds)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        called(loss, *clouds)
        torch.cuda.empty_cache()
        taken[count] = torch.cuda.memory_reserved() - before
    points, vectors = 2 * n * d * 4, 2 * n * 8
    inputs = 3 * points + 5 * vectors + 3 * d * 8  # of iterations, values and gradients, the latter two with f and g
    results = 2 * (points + 2 * vectors)  # of the branches, and stacked
    assert len(replay._recordings) == 3
    assert taken[many] - taken[few] <= (many - few) * (inputs + results) + 4 * segment

"""Recorded iterations of small problems: on a GPU, a replay gives the bits that launching one by one gives."""

from __future__ import annotations

import threading

import pytest
import torch

from solvers.flash_sinkhorn import gradient, solve
from solvers.flash_sinkhorn.sweeps import replay

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def problem(n, m, d, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (size * torch.randn(count, d, generator=generator) for count in (n, m))
    a, b = (torch.rand(count, generator=generator) + 0.1 for count in (n, m))
    return tuple(v.cuda() for v in (x, y, a / a.sum(), b / b.sum()))


def launched(monkeypatch, function, *clouds, **options):
    """Without recordings."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_are_small", lambda *tensors: False)
        return function(*clouds, **options)


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay._recordings.clear()


def test_clouds_on_the_cpu_are_never_recorded():
    solve(torch.randn(5, 2), torch.randn(4, 2), eps=1.0, n_iterations=2)
    assert not replay._recordings


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("d", [3, 64])
@pytest.mark.parametrize("options", [{}, {"updates": "symmetric"}, {"rho_x": 0.5}, {"annealing": 0.5}])
def test_same_bits_as_launches(monkeypatch, d, precision, options):
    options = {"eps": 0.3, "n_iterations": 4, "precision": precision, **options}
    for seed in range(4):
        clouds = problem(300, 211, d, seed)
        want, got = launched(monkeypatch, solve, *clouds, **options), solve(*clouds, **options)
        assert torch.equal(got.f, want.f) and torch.equal(got.g, want.g)
        assert (got.n_iterations, got.n_passes) == (want.n_iterations, want.n_passes)
        assert torch.isfinite(got.f).all()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("d", [3, 64, 200])
def test_gradients_have_the_same_bits(monkeypatch, d, precision):
    for seed in range(4):
        clouds = problem(300, 211, d, seed)
        options = {"eps": 0.5 * d, "precision": precision}
        result = solve(*clouds, n_iterations=3, **options)
        want = launched(monkeypatch, gradient, *clouds, result.f, result.g, **options)
        got = gradient(*clouds, result.f, result.g, **options)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
        assert all(torch.isfinite(each).all() and each.abs().max() > 0 for each in got)


@gpu
@pytest.mark.gpu
def test_numbers_that_come_from_the_host_follow_the_clouds(monkeypatch):
    """Spans, weights' sums and eps that differ from call to call."""
    for seed, (size, mass, eps) in enumerate([(1, 1, 0.3), (1, 1, 0.3), (40, 1, 0.3), (1, 7, 0.3), (1, 1, 2.0)] * 3):
        x, y, a, b = problem(200, 200, 16, seed, size)
        clouds = (x, y, mass * a, mass * b)
        want = launched(monkeypatch, solve, *clouds, eps=eps, n_iterations=3)
        got = solve(*clouds, eps=eps, n_iterations=3)
        assert torch.equal(got.f, want.f) and torch.equal(got.g, want.g)


@gpu
@pytest.mark.gpu
def test_results_outlive_the_next_replay():
    results = [solve(*problem(100, 90, 5, seed), eps=1.0, n_iterations=2) for seed in (0, 0, 0, 1, 0)]
    assert torch.equal(results[2].f, results[0].f) and torch.equal(results[4].f, results[0].f)
    assert not torch.equal(results[3].f, results[0].f)


@gpu
@pytest.mark.gpu
def test_streams_and_threads_do_not_share_what_a_replay_writes():
    clouds = [problem(400, 400, 8, seed) for seed in range(4)]
    want = [solve(*each, eps=0.5, n_iterations=5).f for each in clouds]
    failures = []

    def work(each, expected, stream):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                if not torch.equal(solve(*each, eps=0.5, n_iterations=5).f, expected):
                    failures.append(stream)

    shared = torch.cuda.Stream()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), shared, shared]
    threads = [threading.Thread(target=work, args=each) for each in zip(clouds, want, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@gpu
@pytest.mark.gpu
def test_few_recordings_are_kept():
    for n in range(10, 10 + 2 * replay.KEPT):
        for _ in range(2):
            solve(*problem(n, n, 3, n), eps=1.0, n_iterations=1)
    assert len(replay._recordings) == replay.KEPT


@gpu
@pytest.mark.gpu
def test_wrong_values_are_refused_before_a_replay():
    x, y, a, b = problem(50, 50, 4, 0)
    for _ in range(3):
        solve(x, y, a, b, eps=1.0, n_iterations=2)
    with pytest.raises(ValueError, match="x contains NaN"):
        solve(torch.full_like(x, torch.nan), y, a, b, eps=1.0, n_iterations=2)

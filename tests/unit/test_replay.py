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
        patch.setattr(replay, "small_together", lambda *tensors: 0)
        return function(*clouds, **options)


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay._recordings.clear()


def test_clouds_on_the_cpu_are_never_recorded():
    solve(torch.randn(5, 2), torch.randn(4, 2), eps=1.0, n_iterations=2)
    assert not replay._recordings


def test_as_many_problems_as_are_small_are_one_recording(monkeypatch):
    """Pieces of equal size, so that one recording serves all but perhaps the last."""
    pieces = []

    def recorded(kind, numbers, compute, tensors):
        pieces.append(numbers)
        return replay._one_by_one(compute, numbers, tensors)

    monkeypatch.setattr(replay, "_replayed", recorded)
    x, y = torch.arange(10.0)[:, None], torch.arange(10.0)[:, None, None]
    for at_once, sizes in ((10, [10]), (128, [10]), (6, [5, 5]), (4, [4, 4, 2]), (1, [1] * 10), (0, [])):
        pieces.clear()
        monkeypatch.setattr(replay, "small_together", lambda *tensors, at_once=at_once: at_once)
        numbers = range(10)
        total, square = replay.replayed("kind", numbers, lambda k, x, y: (k + x + y, x * x), x, y)
        assert [len(piece) for piece in pieces] == sizes and sum(pieces, ()) == tuple(numbers)[: sum(sizes)]
        assert torch.equal(total, 3 * y) and torch.equal(square, x * x)


@pytest.mark.parametrize(
    ("size", "at_once"), [(10, 128), (1 << 12, 64), (1 << 15, 1), ((1 << 15) + 1, 0), (1 << 11, 128)]
)
def test_how_many_problems_aresmall_together(size, at_once):
    class Points:
        device = torch.device("cuda")
        shape = (200, size, 1)
        nbytes = 200 * size * 4

        def __len__(self):
            return 200

    assert replay.small_together(Points(), Points()) == at_once
    Points.nbytes = 200 * (replay.LARGEST_BYTES // 6)  # of either cloud
    assert replay.small_together(Points(), Points()) == min(at_once, 3)


class Stream:
    """That only tells what waits for what, and where work is done."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *error):
        pass


def test_branches_fork_from_the_recording_stream_and_join_it(monkeypatch):
    log = []
    main, *branches = (Stream(name, log) for name in ("main", "one", "two", "three"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(replay, "_stacked", lambda found: log.append("stack") or found)
    forks = ["one waits for main", "two waits for main", "three waits for main"]
    joins = ["main waits for one", "main waits for two", "main waits for three", "stack"]
    replay._side_by_side(lambda k, x: log.append(k), range(5), (torch.zeros(5),), main, branches)
    assert log == [*forks, "on one", 0, "on two", 1, "on three", 2, "on one", 3, "on two", 4, *joins]
    log.clear()
    replay._side_by_side(lambda k, x: log.append(k), range(1), (torch.zeros(1),), main, branches)
    assert log == ["one waits for main", "on one", 0, "main waits for one", "stack"]


def test_the_second_call_of_a_kind_is_recorded_and_kinds_differ_by_every_number(monkeypatch):
    log = []

    class Recording:
        def __init__(self, compute, numbers, tensors):
            log.append("record")
            self.compute, self.numbers = compute, numbers
            self.first = replay._one_by_one(compute, numbers, tensors)

        def replay(self, tensors):
            log.append("replay")
            return replay._one_by_one(self.compute, self.numbers, tensors)

    class Current:
        cuda_stream = 0

    monkeypatch.setattr(replay, "_Recording", Recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current)
    monkeypatch.setattr(replay, "small_together", lambda *tensors: 128)
    x = torch.ones(3, 2)
    for kind, numbers, expected in (
        ("a", (1, 2, 3), []), ("a", (1, 2, 3), ["record"]), ("a", (1, 2, 4), []), ("a", (1, 2, 3), ["replay"]),
        ("b", (1, 2, 3), []), ("a", (1, 2, 4), ["record"]), ("a", (1, 2, 4), ["replay"]),
    ):  # fmt: skip
        log.clear()
        (got,) = replay.replayed(kind, numbers, lambda k, x: (k * x,), x)
        assert log == expected and torch.equal(got, torch.tensor(numbers)[:, None] * x)


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

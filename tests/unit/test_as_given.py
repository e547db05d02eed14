"""Fixed iterations on clouds as given, checked afterwards: what the first call of a kind gives, later ones give too."""

from __future__ import annotations

import pytest
import torch

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.iteration import as_given
from solvers.flash_sinkhorn.sweeps import replay


def problem(seed=0, *, size=1.0, n=60, m=50, d=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, y = (size * torch.randn(count, d, generator=generator, dtype=torch.float64) for count in (n, m))
    a, b = (torch.rand(count, generator=generator, dtype=torch.float64) + 0.1 for count in (n, m))
    return tuple(v.to(dtype) for v in (x, y, a / a.sum(), b / b.sum()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A CPU takes part as if its problems were small, without recordings."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    as_given._units.clear()
    replay._recordings.clear()
    if request.param == "cpu":
        monkeypatch.setattr(as_given, "is_small", lambda x, y: True)
    return request.param


def agree(clouds, device, **options):
    """Whether a call gives what one of a process without memory gives, and whether it was of the clouds as given."""
    clouds = tuple(None if v is None else v.to(device) for v in clouds)
    known = dict(as_given._units)
    as_given._units.clear()
    want = solve(*clouds, **options)
    as_given._units.clear()
    as_given._units.update(known)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("solvers.flash_sinkhorn.iteration.solver.checked_inputs", counted(asked))
        got = solve(*clouds, **options)
    for ours, theirs in ((got.f, want.f), (got.g, want.g)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert (got.n_iterations, got.n_passes, got.eps) == (want.n_iterations, want.n_passes, want.eps)
    return not asked


def counted(calls):
    from solvers.flash_sinkhorn.inputs.checks import checked_inputs

    def counting(*arguments, **options):
        calls.append(arguments)
        return checked_inputs(*arguments, **options)

    return counting


OPTIONS = [{}, {"updates": "symmetric"}, {"rho": 0.5}, {"rho_y": 2.0}, {"cost_scale": 0.5}]


@pytest.mark.parametrize("options", [*OPTIONS, {"dtype": torch.float64}, {"dtype": torch.float16}])
def test_from_the_second_call_on_clouds_are_taken_as_given(device, options):
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    found = [agree(problem(seed, dtype=dtype), device, eps=0.3, n_iterations=4, **options) for seed in range(4)]
    assert found == [False, True, True, True]


def test_uniform_weights_need_not_be_given(device):
    found = []
    for seed in range(4):
        x, y, a, _ = problem(seed)
        found.append((agree((x, y, None, None), device, eps=0.3, n_iterations=3),
                      agree((x, y, a, None), device, eps=0.3, n_iterations=3)))  # fmt: skip
    assert found == [(False, False), (True, True), (True, True), (True, True)]


def test_another_span_is_stored_in_its_own_unit(device):
    found = [agree(problem(size=size), device, eps=0.3 * size, n_iterations=3) for size in (1.0, 1.0, 1.0)]
    wide, narrow = problem(size=40.0), problem(size=1.0)
    found += [agree(clouds, device, eps=0.3, n_iterations=3) for clouds in (wide, wide, narrow, narrow)]
    assert found == [False, True, True, False, True, False, True]


def test_masses_are_those_of_the_call(device):
    for mass in (1.0, 1.0, 7.0, 0.01):
        x, y, a, b = problem()
        agree((x, y, mass * a, mass * b), device, eps=0.3, n_iterations=3)


def test_points_without_weight_are_left_to_the_checks(device):
    clouds = problem()
    far = tuple(v.clone() for v in clouds)
    far[0][7], far[2][7] = 1e4, 0.0
    far[2].div_(far[2].sum())
    with_weights = [agree(clouds, device, eps=0.3, n_iterations=3) for _ in range(2)]
    without = [agree(far, device, eps=0.3, n_iterations=3) for _ in range(2)]
    assert (with_weights, without) == ([False, True], [False, False])
    assert agree(clouds, device, eps=0.3, n_iterations=3) is False  # nothing is expected after those


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y, a, b: x[3].fill_(torch.nan), "x contains NaN"),
        (lambda x, y, a, b: y[3].fill_(torch.inf), "y contains NaN or infinite"),
        (lambda x, y, a, b: a[3].fill_(-0.1), "a has negative weights"),
        (lambda x, y, a, b: b.mul_(2.0), "same mass"),
        (lambda x, y, a, b: b.zero_(), "b sums to zero"),
    ],
)
def test_wrong_values_are_refused_by_every_call(device, spoil, message):
    good = tuple(v.to(device) for v in problem())
    for _ in range(3):
        solve(*good, eps=0.3, n_iterations=2)
        bad = tuple(v.clone() for v in good)
        spoil(*bad)
        with pytest.raises(ValueError, match=message):
            solve(*bad, eps=0.3, n_iterations=2)
    with pytest.raises(ValueError, match="b must have shape"):
        solve(*good[:3], good[3][:-1], eps=0.3, n_iterations=2)


def test_a_tolerance_or_annealing_expects_nothing(device):
    x, y, a, b = (v.to(device) for v in problem())
    solve(x, y, a, b, eps=0.3, tol=1e-3)
    solve(x, y, a, b, eps=0.3, n_iterations=3, annealing=0.5)
    assert not as_given._units


def test_few_kinds_are_kept(device):
    for count in range(1, as_given.KEPT + 3):
        solve(*(v.to(device) for v in problem(n=5, m=4)), eps=0.3, n_iterations=count)
    assert len(as_given._units) == 2

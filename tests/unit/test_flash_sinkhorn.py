"""`solvers.flash_sinkhorn.solve` on its own: what it refuses, what it accepts, and that `converged` is the truth.

References are plain float64 from the definitions. Every test runs on the CPU path, and on CUDA where there is one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fsbench.api import Problem, Spec
from solvers.flash_sinkhorn import Precision, bench, solve
from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.sweeps.tiles import column_splits, fitted_tile, small_tile, sweep_tile


def normal(n, d, seed=0, dtype=torch.float32):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(n, seed=0):
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def plan(x, y, a, b, result):
    """P in float64 from potentials, by direct differences."""
    x, y, f, g = (v.double().cpu() for v in (x, y, result.f, result.g))
    cost = result.cost_scale * (x[:, None] - y[None]).square().sum(-1)
    return a.double().cpu()[:, None] * b.double().cpu() * torch.exp((f[:, None] + g - cost) / result.eps)


def residual(p, a, b):
    return max((p.sum(1) - a.double()).abs().sum().item(), (p.sum(0) - b.double()).abs().sum().item())


def dual(a, b, result):
    return (a.double() @ result.f.cpu() + b.double() @ result.g.cpu()).item()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", {"x": torch.full((5, 2), math.nan)}),
        ("y", {"y": torch.tensor([[0.0, math.inf]])}),
        ("x", {"x": torch.zeros(5)}),
        ("x", {"x": torch.zeros(0, 2)}),
        ("x", {"x": torch.zeros(5, 2, dtype=torch.int64)}),
        ("same d", {"y": torch.zeros(4, 3)}),
        ("a", {"a": torch.tensor([0.5, 0.5, 0.5, -0.25, -0.25])}),
        ("a", {"a": torch.zeros(5)}),
        ("a", {"a": torch.ones(4)}),
        ("b", {"b": torch.tensor([1.0, math.nan, 0.0, 0.0])}),
        ("mass", {"a": torch.ones(5), "b": torch.ones(4)}),
        ("eps", {"eps": 0.0}),
        ("eps", {"eps": math.nan}),
        ("eps", {"eps": -1.0}),
        ("cost_scale", {"cost_scale": 0.0}),
        ("n_iterations", {"n_iterations": 0}),
        ("n_iterations", {"n_iterations": 3, "tol": 0.1}),
        ("tol", {"n_iterations": None, "tol": 0.0}),
        ("annealing", {"annealing": 1.0}),
        ("annealing", {"annealing": 0.9999999}),
        ("eps", {"eps": "0.1"}),
        ("eps", {"eps": None}),
        ("eps", {"eps": 1e-300}),
        ("eps", {"eps": 10**400}),
        ("eps", {"x": torch.full((5, 2), 1e160, dtype=torch.float64)}),
        ("eps", {"x": torch.full((5, 2), 1e30)}),
        ("x", {"x": torch.zeros(5, 2).to_sparse()}),
        ("n_iterations", {"n_iterations": 2.5}),
        ("n_iterations", {"n_iterations": True}),
        ("tol", {"n_iterations": None, "tol": "x"}),
        ("max_iterations", {"max_iterations": 0}),
        ("max_seconds", {"max_seconds": math.nan}),
        ("updates", {"updates": "both"}),
        ("precision", {"precision": "double"}),
    ],
)
def test_bad_input_is_refused_by_name(name, change):
    arguments = {"x": torch.zeros(5, 2), "y": torch.ones(4, 2), "a": None, "b": None, "eps": 0.1, "n_iterations": 3}
    arguments |= change
    x, y, a, b = (arguments.pop(key) for key in "xyab")
    with pytest.raises(ValueError, match=name):
        solve(x, y, a, b, **arguments)


@pytest.mark.parametrize("updates", ["alternating", "symmetric"])
@pytest.mark.parametrize(("d", "eps"), [(1, 0.05), (3, 0.2), (6, 0.5), (40, 10.0)])
def test_converged_is_the_residual_of_what_is_returned(device, updates, d, eps):
    x, y, a, b = normal(101, d), normal(63, d, 1) * 0.8 + 0.1, weights(101), weights(63, 1)
    arguments = [v.to(device) for v in (x, y, a, b)]
    result = solve(*arguments, eps=eps, tol=1e-3, updates=updates)
    assert result.converged
    truth = residual(plan(x, y, a, b, result), a, b)
    # Row sums are float32 sums of exponentials whose exponents are as large as cost / eps.
    assert abs(truth - result.residual) < 2e-5
    assert [check.residual for check in result.trace][-1] == result.residual
    # Rounding can move a residual by an ulp; beyond that plain alternating updates never raise it.
    if updates == "alternating":
        plain = solve(*arguments, eps=eps, tol=1e-3, updates=updates, acceleration=False)
        residuals = [check.residual for check in plain.trace]
        assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(residuals))


def test_not_converged_is_said_with_the_true_residual(device):
    """N02: clusters whose masses do not match; plain updates are still far away after many iterations."""
    x = torch.cat([torch.linspace(0, 0.3, 30), torch.linspace(5, 5.3, 20)])[:, None]
    y = torch.cat([torch.linspace(0, 0.3, 20), torch.linspace(5, 5.3, 30)])[:, None]
    uniform = torch.full((50,), 0.02)
    for iterations in (5, 300):
        limits = {"max_iterations": iterations, "acceleration": False}
        result = solve(x.to(device), y.to(device), eps=0.01, tol=1e-3, **limits)
        assert result.converged is False and result.n_iterations == iterations
        truth = residual(plan(x, y, uniform, uniform, result), uniform, uniform)
        assert result.residual == pytest.approx(truth, rel=1e-2) and truth > 0.1


def test_annealing_solves_what_plain_updates_do_not(device):
    """N02 again: the value by annealed updates against the float64 figure of the report."""
    x = torch.cat([torch.linspace(0, 0.3, 30), torch.linspace(5, 5.3, 20)])[:, None].to(device)
    y = torch.cat([torch.linspace(0, 0.3, 20), torch.linspace(5, 5.3, 30)])[:, None].to(device)
    uniform = torch.full((50,), 0.02)
    result = solve(x, y, eps=0.01, tol=1e-3, annealing=0.99, max_iterations=3000)
    assert result.converged
    assert dual(uniform, uniform, result) == pytest.approx(4.613682, abs=2e-3 * 25)  # residual times largest cost


@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4, 1e6, 1e8])
def test_any_ratio_of_cost_to_eps_stays_finite(device, ratio):
    """N33: translated copy, squared diameter over eps up to 1e8; log-domain throughout."""
    x = torch.rand(32, 3, generator=torch.Generator().manual_seed(0))
    y = x + torch.tensor([0.25, 0.0, 0.0])
    eps = 3.0 / ratio
    result = solve(x.to(device), y.to(device), eps=eps, n_iterations=50, annealing=0.7)
    assert torch.isfinite(result.f).all() and torch.isfinite(result.g).all()
    uniform = torch.full((32,), 1 / 32)
    if ratio >= 1e4:  # the plan is the translation: value |t|^2 + eps ln n; annealing leaves a few percent of eps
        assert dual(uniform, uniform, result) == pytest.approx(0.0625 + eps * math.log(32), rel=1e-3)


@pytest.mark.parametrize("d", [1, 2, 4, 5, 15, 16, 17, 33, 64, 65, 127, 129, 257, 700, 1025])
def test_every_dimension_works(device, d):
    """I12: translated copy in every d; the value is |t|^2 plus the self-problem's."""
    x = normal(33, d) / math.sqrt(d)
    shift = torch.zeros(d)
    shift[0] = 0.1
    y = x + shift
    uniform = torch.full((33,), 1 / 33)
    values = [
        dual(uniform, uniform, solve(p.to(device), q.to(device), eps=0.5, tol=1e-5))
        for p, q in ((x, y), (x, x), (y, y))
    ]
    assert values[0] - (values[1] + values[2]) / 2 == pytest.approx(0.01, abs=3e-5)  # residual times cost, float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 8, 26, 200])
def test_any_float_type_is_the_same_problem(device, dtype, n):
    """I01, I03: low-precision inputs give what their rounded values give, at every size."""
    x, y = normal(n, 8).to(dtype), normal(20, 8, 1).to(dtype)
    result = solve(x.to(device), y.to(device), eps=2.0, n_iterations=10)
    reference = solve(x.double(), y.double(), eps=2.0, n_iterations=10)
    assert result.f.dtype == torch.float64
    # exponents reach 40 in float32: half an ulp is 2e-6, in units of eps, and 20 half-steps add up
    assert (result.f.cpu() - reference.f).abs().max() < 2.0 * 20 * 2e-6


def test_strided_inputs_are_read_right(device):
    """I04: views of every kind equal their contiguous copies."""
    base = normal(60, 12).to(device)
    a = weights(40).to(device)
    wide = torch.stack([a, a + 1], 1)
    views = [base[:20, ::2], base.T[:, :20].T[:, :6], base[::3, :6], base[5:25, 3:9], base[:1, :6].expand(20, 6)]
    y = normal(40, 6, 1).to(device)
    for view in views:
        expected = solve(view.contiguous(), y, None, a, eps=1.0, n_iterations=5)
        got = solve(view, y, None, wide[:, 0], eps=1.0, n_iterations=5)
        assert torch.equal(got.f, expected.f) and torch.equal(got.g, expected.g)


@pytest.mark.parametrize("where", [0.0, 1e6, 1e30])
def test_points_without_weight_have_no_effect(device, where):
    """R12, N29."""
    x, y, a, b = normal(10, 3), normal(8, 3, 1), weights(10), weights(8, 1)
    padded_x = torch.cat([x, torch.full((6, 3), where)])
    padded_a = torch.cat([a, torch.zeros(6, dtype=torch.float64)])
    plain = solve(x.to(device), y.to(device), a.to(device), b.to(device), eps=0.3, tol=1e-4)
    padded = solve(padded_x.to(device), y.to(device), padded_a.to(device), b.to(device), eps=0.3, tol=1e-4)
    assert padded.converged and plain.n_iterations == padded.n_iterations
    assert dual(padded_a, b, padded) == pytest.approx(dual(a, b, plain), rel=1e-5)


def test_same_result_every_time_and_inputs_untouched(device):
    x, y = normal(300, 20).to(device), normal(280, 20, 1).to(device)
    kept = x.clone()
    first, second = (solve(x, y, eps=1.0, n_iterations=8) for _ in range(2))
    assert torch.equal(first.f, second.f) and torch.equal(first.g, second.g) and torch.equal(x, kept)


def test_fast_with_a_tolerance_ends_in_exact_sweeps(device):
    x, y, a, b = normal(200, 64), normal(150, 64, 1), weights(200), weights(150, 1)
    result = solve(*(v.to(device) for v in (x, y, a, b)), eps=20.0, tol=1e-4, precision="fast")
    truth = residual(plan(x, y, a, b, result), a, b)
    assert result.converged and truth < 1.1e-4
    assert device == "cpu" or result.precision is Precision.EXACT


@pytest.mark.parametrize("precision", ["fast", "mixed"])
@pytest.mark.parametrize("d", [1, 3, 5])
def test_in_low_d_nothing_is_rounded_and_no_exact_sweeps_follow(device, precision, d):
    x, y, a, b = normal(200, d) + 100.0, normal(150, d, 1) + 100.0, weights(200), weights(150, 1)
    result = solve(*(v.to(device) for v in (x, y, a, b)), eps=0.2, tol=1e-4, precision=precision)
    assert result.converged and result.precision == precision
    assert {check.precision for check in result.trace} == {precision}
    assert residual(plan(x, y, a, b, result), a, b) < 1.1e-4


def test_time_limit_stops_the_solve(device):
    x, y = normal(2000, 3).to(device), (normal(2000, 3, 1) + 3).to(device)
    result = solve(x, y, eps=1e-4, tol=1e-9, max_seconds=0.3)
    assert result.converged is False and result.trace[-1].seconds < 5.0


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("d", [3, 64, 128, 512])
def test_clouds_get_small_tiles_where_large_ones_would_leave_multiprocessors_idle(precision, d):
    small, large = small_tile(precision, d), sweep_tile(precision, d)
    tiles = {n: fitted_tile(precision, d, n, n, multiprocessors=132) for n in (1024, 2048, 50176)}
    assert tiles[50176] == large
    # 16 x 4 large tiles of 128 x 256 pairs, two of which are the least a program takes, are 32 programs.
    assert tiles[2048] == (small if large.cols == 256 else large)
    assert tiles[1024] == (large if large.rows == 8 else small)
    assert small.rows * small.cols < large.rows * large.cols or large.rows == 8


@pytest.mark.parametrize(
    ("blocks", "tiles", "slots"), [(79, 157, 528), (391, 782, 528), (1, 1, 528), (4000, 8000, 528)]
)
def test_column_splits_fill_the_gpu_and_leave_no_split_empty(blocks, tiles, slots):
    splits = column_splits(blocks, tiles, slots)
    per_split = math.ceil(tiles / splits)
    assert (splits - 1) * per_split < tiles <= splits * per_split
    waves = math.ceil(blocks * splits / slots)
    best = blocks * tiles / slots
    assert splits == 32 or waves * per_split <= max(1.25 * best, tiles)


@pytest.mark.parametrize("d", [3, 8])
def test_a_far_outlier_with_weight_stays_finite_and_is_not_called_converged_wrongly(device, d):
    """Exponents of the outlier are beyond float32's resolution; whatever is said of the result must be true."""
    x, y, a, b = normal(50, d), normal(40, d, 1), weights(50), weights(40, 1)
    x[7] += 1e5
    result = solve(*(v.to(device) for v in (x, y, a, b)), eps=0.5, tol=1e-3, max_iterations=200)
    assert torch.isfinite(result.f).all() and torch.isfinite(result.g).all()
    if result.converged:
        assert residual(plan(x, y, a, b, result), a, b) < 2e-3


def test_a_new_n_compiles_nothing(monkeypatch):
    """P05: after n in {1, 16, 17} at one d, other n launch kernels of kinds already seen."""
    triton_sweeps = pytest.importorskip("solvers.flash_sinkhorn.sweeps.triton_sweeps")
    launching = pytest.importorskip("solvers.flash_sinkhorn.sweeps.launching")
    seen = set()

    def run(n):
        inputs = checked_inputs(normal(n, 8), normal(2 * n + 1, 8), None, None, eps=0.1, cost_scale=1.0)
        sweeps = triton_sweeps.TritonSweeps(inputs, cost_scale=1.0, precision=Precision.EXACT)
        sweeps.set_epsilon(0.1, 1.0)
        sweeps.half_step(sweeps.x, sweeps.y)
        sweeps.half_step(sweeps.y, sweeps.x)
        sweeps.symmetric_step()

    monkeypatch.setattr(launching.Launch, "__call__", lambda self, *changing: seen.add(self.kind))
    for n in (1, 16, 17):
        run(n)
    first = set(seen)
    assert len({kind[0] for kind in first}) == 4  # prepare, rescale, sweep, settle
    for n in (*range(1000, 1032), 4096, 10_000):
        run(n)
    assert seen == first


@pytest.mark.parametrize("mass", [0.25, 5.0])
def test_equal_masses_other_than_one(device, mass):
    """The returned potentials are for the weights as given; the residual is over the mass."""
    x, y, a, b = normal(30, 3), normal(20, 3, 1), mass * weights(30), mass * weights(20, 1)
    result = solve(*(v.to(device) for v in (x, y, a, b)), eps=0.5, tol=1e-4)
    truth = residual(plan(x, y, a, b, result), a, b)
    assert result.converged and truth / mass == pytest.approx(result.residual, abs=2e-6)


@pytest.mark.parametrize("d", [3, 6, 40])
@pytest.mark.parametrize("precision", Precision)
def test_the_harness_is_told_which_points_were_solved(precision, d):
    """To 10-bit mantissas about their centre; in low d, and where exact, those given."""
    x, y = normal(30, d) + 100.0, normal(20, d, 1) + 100.0
    spec = Spec(30, 20, d, 0.1, 1.0, "float32", "cuda")
    make = bench._solved(Problem(x, y, None, None, spec), precision)
    assert (make is None) == (precision is Precision.EXACT or d <= 5)
    assert bench._solved(Problem(x, y, None, None, replace(spec, device="cpu")), precision) is None
    if make is None:
        return
    inputs = checked_inputs(x, y, None, None, eps=0.1, cost_scale=1.0)
    for found, given, rounds in zip(make(), (x, y), (precision is Precision.FAST, True), strict=True):
        centred, off = given - inputs.centre, (found - given).abs()
        assert (off <= 2.0**-11 * centred.abs() * (1 + 1e-6) + 2.0**-25 * inputs.unit).all()
        assert (off.max() > 1e-4) == rounds
        if rounds:
            assert torch.equal(inputs.rounded(found), found)

"""Batches to a tolerance: each problem ends on its own residual, together as one after another."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from test_batches import gpu, looped, problems, transports

from solvers.flash_sinkhorn import NotConverged, SamplesLoss, transport
from solvers.flash_sinkhorn.inputs.batches import checked_batch, problem
from solvers.flash_sinkhorn.iteration import batch_loop
from solvers.flash_sinkhorn.iteration.acceleration import TorchAnderson
from solvers.flash_sinkhorn.iteration.batch_loop import BatchLoop
from solvers.flash_sinkhorn.iteration.batched_mixing import BatchedAnderson
from solvers.flash_sinkhorn.iteration.batches import iterate_pairs, iterate_selves
from solvers.flash_sinkhorn.iteration.loop import Limits, Method, Updates
from solvers.flash_sinkhorn.iteration.mixing import MEMORY
from solvers.flash_sinkhorn.iteration.progress import FEWEST, Progress
from solvers.flash_sinkhorn.iteration.self_transport import self_iterated, solve_self
from solvers.flash_sinkhorn.losses import batches
from solvers.flash_sinkhorn.sweeps.blocked_batches import BlockedBatch
from solvers.flash_sinkhorn.sweeps.blocked_sweeps import BlockedSweeps
from solvers.flash_sinkhorn.sweeps.launching import Launch
from solvers.flash_sinkhorn.sweeps.tiles import Precision

METHOD = Method(1.0, None, None, Updates.ALTERNATING, acceleration=True)
EXACT = Precision.EXACT
SOLVED = 1e-10  # residual to which potentials are solved where values and gradients are compared
# Gradients are off by the residual times the distances between points that share mass, ten at most, for a unit of mass;
# the clouds' are of size 0.1, and the residual may be magnified by a problem's condition, as measured below ten.
CLOSE = {"rtol": 0.0, "atol": 100 * SOLVED}


def spread_out(count, n, m, d, seed=0, dtype=torch.float64):
    """Ever harder problems of one span, one with a far point without weight."""
    x, y, a, b = problems(count, n, m, d, seed=seed, dtype=dtype)
    for k in range(count):
        y[k, 2:] *= 1.0 - 0.8 * k / count
    a[1, 4], x[1, 4] = 0.0, 1e9
    return x, y, a / a.sum(1, keepdim=True), b


def called(results, clouds):
    values = torch.stack([result.value for result in results])
    return values, torch.autograd.grad(values.sum(), clouds)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("options", [{}, {"rho": 3.0}, {"rho_x": 2.0}])
@pytest.mark.parametrize("d", [2, 6])
def test_values_and_gradients_are_those_of_one_after_another(options, debias, d):
    clouds = spread_out(5, 33, 21, d)
    if "rho" in options:  # masses may differ
        clouds[2][2] *= 1.5
    mine, theirs = ([v.clone().requires_grad_() for v in clouds] for _ in range(2))
    options = {"eps": 1.0, "cost_scale": 0.5, "tol": SOLVED, "debias": debias, **options}
    found, want = transports(*mine, **options), looped(*theirs, **options)
    for got, each in zip(found, want, strict=True):
        assert got.converged and got.residual <= got.tol == SOLVED and got.problem == each.problem
        assert abs(got.n_passes - each.n_passes) <= 0.2 * each.n_passes
    (values, gradients), (others, expected) = called(found, mine), called(want, theirs)
    torch.testing.assert_close(values, others, rtol=1e-12, atol=0)  # of second order in the residual
    for got, each in zip(gradients, expected, strict=True):
        assert each.any()
        torch.testing.assert_close(got, each, **CLOSE)


def test_each_problem_ends_on_its_own_residual():
    x, y, a, b = spread_out(6, 120, 130, 2)
    batch = checked_batch(x, y, a, b, eps=0.5, cost_scale=1.0)
    tol = np.array([1e-2, 1e-8, 1e-3, 1e-8, 1e-5, 1e-4])
    loop = iterate_pairs(problem(1.0, *batch.tensors), METHOD, EXACT, 0.5, tol, 1000)
    f, g = loop.potentials()
    cost = (x[:, :, None] - y[:, None]).square().sum(-1)
    plan = batch.a[:, :, None] * batch.b[:, None] * torch.exp((f[:, :, None] + g[:, None] - cost) / 0.5)
    rows, cols = (plan.sum(2) - batch.a).abs().sum(1), (plan.sum(1) - batch.b).abs().sum(1)
    # float64: both sums of exponents of up to 1e3, whose rounding is 1e-13 each
    np.testing.assert_allclose(cols, loop.residual, rtol=1e-3, atol=1e-12)
    assert rows.max() < 1e-12 and loop.converged.all() and (loop.residual <= tol).all()
    assert (loop.residual > 1e-3 * tol).all()  # and not on another's
    assert len(set(loop.n_iterations.tolist())) > 3


def test_as_many_sweeps_as_the_slowest_problem_and_no_more(monkeypatch):
    """Not as many as all of them; and only of the problems that still run, so that the fast ones' cost nothing."""
    x, y, a, b = spread_out(8, 60, 50, 2)
    sweeps = []
    plain = BlockedBatch.sweep

    def counted(self, rows, cols):
        sweeps.append(len(rows.weight))
        return plain(self, rows, cols)

    monkeypatch.setattr(BlockedBatch, "sweep", counted)
    found = transports(x, y, a, b, eps=2.0, tol=1e-8)
    passes = [result.n_passes for result in found]
    assert len(sweeps) < sum(passes) / 2  # with sweeps over samples
    assert sweeps[0] == 8 and sweeps[-1] == 1 and sum(sweeps) < 1.5 * sum(passes)


@pytest.mark.parametrize("share", [2.0, 1e-9])
def test_it_is_no_matter_when_the_others_go_on_alone(monkeypatch, share):
    clouds = spread_out(5, 60, 50, 3)
    want = transports(*clouds, eps=0.5, tol=1e-6, debias=True)
    monkeypatch.setitem(batch_loop.DONE_SHARE, "cpu", share)
    for got, each in zip(transports(*clouds, eps=0.5, tol=1e-6, debias=True), want, strict=True):
        assert got.n_passes == each.n_passes
        assert got.residual == pytest.approx(each.residual, rel=1e-3)
        assert got.value.item() == pytest.approx(each.value.item(), rel=1e-9)


def test_the_same_bits_every_time_and_in_any_order():
    x, y, a, b = spread_out(7, 40, 300, 3, dtype=torch.float32)
    loss = SamplesLoss(blur=0.5)
    values = loss(a, x, b, y)
    order = [3, 0, 6, 2, 5, 1, 4]
    assert torch.equal(loss(a, x, b, y), values)
    assert torch.equal(loss(a[order], x[order], b[order], y[order]), values[order])


def test_one_hard_problem_among_easy_ones():
    """It alone is not converged, its residual is true, and the others are as if it were not there."""
    x, y, a, b = problems(4, 50, 40, 2, dtype=torch.float64)
    x[2] = 5.0 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(25, 1) + 1e-3 * x[2]
    y[2] = 5.0 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(20, 1) + 1e-3 * y[2]  # unequal shares of two places
    options = {"eps": 5.0, "tol": 1e-9, "max_iterations": 30}
    with pytest.warns(NotConverged, match="raise max_iterations") as told:
        found = transports(x, y, a, b, **options)
    assert len(told) == 1 and [result.converged for result in found] == [True, True, False, True]
    hard = found[2]
    miss = (hard.plan.col_sums() - b[2] * (a[2].sum() + b[2].sum()) / 2 / b[2].sum()).abs().sum().item()
    assert miss == pytest.approx(hard.residual, rel=1e-6) and hard.residual > 1e-9
    rest = [0, 1, 3]
    without = transports(*(v[rest] for v in (x, y, a, b)), **options)
    for got, each in zip((found[k] for k in rest), without, strict=True):
        assert got.ot.item() == pytest.approx(each.ot.item(), rel=1e-12) and got.n_passes == each.n_passes


def test_limits_hold_for_each_problem():
    x, y, a, b = spread_out(5, 200, 180, 2)
    batch = checked_batch(x, y, a, b, eps=0.01, cost_scale=1.0)
    for most in (1, 2, 3, 17, 41):
        loop = iterate_pairs(problem(1.0, *batch.tensors), METHOD, EXACT, 0.01, np.full(5, 1e-12), most)
        assert (loop.n_iterations == most).all() and not loop.converged.any() and not loop.stalled.any()


def test_rounding_ends_a_problem_and_not_the_others():
    x, y, _, _ = problems(2, 64, 64, 2)
    x[1], y[1] = 0.0, 0.0  # one place, and weights of powers of two: nothing is rounded
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = transports(x, y, None, None, eps=0.1, tol=3e-8)
    assert [result.converged for result in found] == [False, True]
    assert len(told) == 1 and "float32 lets it fall no further" in str(told[0].message)
    assert found[0].n_passes < 2000 and found[1].n_passes == 2 and found[1].residual == 0.0


@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")
def test_default_tolerances_are_each_problems_own():
    x, y, a, b = problems(2, 30, 30, 3)
    x[0], y[0] = 1e-2 * x[0], 1e-2 * y[0]
    options = {"eps": 5e-3, "max_iterations": 3}
    with pytest.warns(RuntimeWarning, match="solved to tol"):
        found = transports(x, y, a, b, **options)
    with pytest.warns(RuntimeWarning, match="solved to tol"):
        want = looped(x, y, a, b, **options)
    for got, each in zip(found, want, strict=True):
        assert got.tol == pytest.approx(each.tol, rel=1e-6)
    assert found[0].tol == 1e-4 < found[1].tol


def test_clouds_of_all_sizes_in_one_batch():
    """Each size is stored in a unit of its own, and starts from eps of its own."""
    x, y, a, b = problems(4, 40, 30, 2, dtype=torch.float64)
    size = torch.tensor([1.0, 1e-4, 1e-8, 1.0], dtype=torch.float64)[:, None, None]
    found = transports(size * x, size * y, a, b, eps=1.0, tol=SOLVED)
    want = looped(size * x, size * y, a, b, eps=1.0, tol=SOLVED)
    for got, each in zip(found, want, strict=True):
        assert got.converged and got.ot.item() == pytest.approx(each.ot.item(), rel=1e-9)


def test_copies_in_a_batch_are_solved_from_their_self_problems():
    x, _, a, _ = problems(3, 50, 50, 3, dtype=torch.float64)
    y = x + 0.25
    y[1] = x[1].flip(0) * 0.5 + 1.0
    found = transports(x, y, a, a, eps=0.01, debias=True)
    own = transports(x, x, a, a, eps=0.01, debias=True)
    for k in (0, 2):
        assert found[k].value.item() == pytest.approx(3 / 16, rel=1e-9)
        assert found[k].n_passes <= own[k].n_passes + 20 < found[1].n_passes


@pytest.mark.parametrize("d", [2, 7])
def test_self_problems_end_on_their_own_residuals(d):
    x, _, a, _ = spread_out(4, 50, 40, d)
    tol = np.array([1e-2, 1e-9, 1e-5, 1e-7])
    batch = checked_batch(x, x, a, a, eps=0.3, cost_scale=1.0)
    loop = iterate_selves(problem(1.0, *batch.tensors), METHOD, EXACT, 0.3, tol, 500)
    f, update = batch.extended(*loop.potentials(), eps=0.3, cost_scale=1.0)
    for k in range(4):
        alone = solve_self(x[k], a[k], eps=0.3, tol=tol[k])
        assert loop.converged[k] and loop.residual[k] == pytest.approx(alone.residual, rel=1e-6, abs=1e-14)
        assert loop.n_passes[k] == alone.n_passes
        # 1e9 away a cost is 1e18, as exact as float64 holds it
        torch.testing.assert_close(f[k], alone.f, rtol=1e-15, atol=1e-9)
        torch.testing.assert_close(update[k], alone.update, rtol=1e-15, atol=1e-9)


def test_self_problems_have_no_side_to_round_alone():
    x, _, a, _ = spread_out(2, 50, 40, 7)
    batch = checked_batch(x, x, a, a, eps=0.3, cost_scale=1.0)
    mixed = Precision.MIXED
    for solve in (
        lambda: solve_self(x[0], a[0], eps=0.3, tol=1e-3, precision=mixed),
        lambda: self_iterated(batch, 3, 0.3, 1.0, None, mixed),
        lambda: iterate_selves(problem(1.0, *batch.tensors), METHOD, mixed, 0.3, np.array([1e-3, 1e-3]), 500),
    ):
        with pytest.raises(ValueError, match="precision of a cloud against itself must be fast or exact"):
            solve()


@pytest.mark.parametrize("damping", [(1.0, 1.0), (0.8, 0.95)])
def test_mixing_of_a_batch_is_that_of_each_problem(damping):
    """An absurd step in one problem is rejected there, and there only."""
    x, y, a, b = spread_out(3, 30, 25, 2)
    batch = checked_batch(x, y, a, b, eps=1.0, cost_scale=1.0)
    together = BlockedBatch(problem(1.0, *batch.tensors), cost_scale=1.0)
    alone = [BlockedSweeps(problem(1.0, *own), cost_scale=1.0) for own in zip(*batch.tensors, strict=True)]
    for sweeps in (together, *alone):
        sweeps.set_epsilon(1.0, 1.0)
        sweeps.x.damping, sweeps.y.damping = damping
    mixer = BatchedAnderson(together, mass=batch.b.sum(1))
    others = [TorchAnderson(sweeps, mass=sweeps.y.weight.sum().item()) for sweeps in alone]
    rejected, spoilt = [], 3
    for k in range(MEMORY + 6):
        plain = np.array([False, False, k == MEMORY + 5])
        for sweeps, mixing, unmixed in zip((together, *alone), (mixer, *others), (plain, *plain), strict=True):
            sweeps.half_step(sweeps.x, sweeps.y)
            sweeps.half_step(sweeps.y, sweeps.x)
            mixing.record()
            mixing.extrapolate(plain=unmixed)
        for row, (sweeps, other) in enumerate(zip(alone, others, strict=True)):
            assert mixer.count[row] == other.count and mixer.extrapolated[row] == other.extrapolated
            assert mixer.regularisation[row] == pytest.approx(other.regularisation)
            # Nearly singular normal equations magnify in what order sums are taken.
            torch.testing.assert_close(together.y.potential[row], sweeps.y.potential, rtol=1e-6, atol=1e-6)
            together.y.potential[row] = sweeps.y.potential
        if k == spoilt:
            assert others[1].extrapolated
            absurd = 400 * torch.rand(25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            together.y.potential[1] += absurd
            alone[1].take_potential(alone[1].y, alone[1].y.potential + absurd)
        together.take_potential(together.y, together.y.potential.clone())
        rejected += [(k, row) for row in range(3) if others[row].count < 0]
    assert (spoilt + 1, 1) in rejected and (spoilt + 1, 0) not in rejected


def test_progress_of_a_batch_is_that_of_each_problem():
    generator = np.random.default_rng(0)
    residuals = np.exp(np.cumsum(generator.normal(-0.02, 0.2, (300, 6)), 0))
    rounding = np.array([1e-3, 1.0, 1e-1, 1e-2, 3.0, 10.0])
    together = Progress(lambda: rounding)
    alone = [Progress(lambda k=k: rounding[k]) for k in range(6)]
    found = np.array([together.has_stalled(k, values) for k, values in enumerate(residuals, 1)])
    want = [[p.has_stalled(k, float(v)) for p, v in zip(alone, values, strict=True)]
            for k, values in enumerate(residuals, 1)]  # fmt: skip
    np.testing.assert_array_equal(found, want)
    assert found[:FEWEST].sum() == 0 < found.sum() and not Progress(lambda: 1.0).has_stalled(50, math.nan)


def test_problems_in_another_loop_are_the_same_problems():
    """`of` and `put`, with counts and potentials."""
    x, y, a, b = spread_out(4, 20, 15, 2)
    inputs = problem(1.0, *checked_batch(x, y, a, b, eps=1.0, cost_scale=1.0).tensors)
    loop, whole = BatchLoop(inputs, METHOD, EXACT), BatchLoop(inputs, METHOD, EXACT)
    for each in (loop, whole):
        each.set_epsilon(1.0)
        each.iterate_to(1e-2, Limits(100, None))
    some = np.array([3, 1])
    part = loop.of(some, EXACT)
    part.iterate_to(1e-9, Limits(200, None))
    loop.put(some, part)
    assert (loop.residual[some] <= 1e-9).all() and (loop.n_iterations[some] > whole.n_iterations[some]).all()
    rest = np.array([0, 2])
    assert (loop.residual[rest] == whole.residual[rest]).all()
    for got, before in zip(loop.potentials(), whole.potentials(), strict=True):
        assert torch.equal(got[rest], before[rest]) and not torch.equal(got[some], before[some])


def test_a_batch_sweep_is_each_problems_sweep():
    """Over several blocks of rows and of columns, guarded and not."""
    x, y, a, b = problems(3, 530, 2100, 2)
    batch = checked_batch(x, y, a, b, eps=0.5, cost_scale=1.0)
    for d in (2, 5):
        points = [torch.cat([v, v.flip(-1), v[..., :1]], -1)[..., :d] for v in (batch.x, batch.y)]
        batch = checked_batch(*points, a, b, eps=0.5, cost_scale=1.0)
        inputs = problem(1.0, *batch.tensors)
        together = BlockedBatch(inputs, cost_scale=1.0)
        together.set_epsilon(0.5, 1.0)
        alone = [BlockedSweeps(dataclasses.replace(inputs, x=u, y=v, a=p, b=q, centre=c), cost_scale=1.0)
                 for u, v, p, q, c in zip(*batch.tensors, strict=True)]  # fmt: skip
        for sweeps in alone:
            sweeps.set_epsilon(0.5, 1.0)
        for _ in range(2):
            for sweeps in (together, *alone):
                sweeps.half_step(sweeps.x, sweeps.y)
                sweeps.half_step(sweeps.y, sweeps.x)
            for k, sweeps in enumerate(alone):
                for mine, theirs in ((together.x, sweeps.x), (together.y, sweeps.y)):
                    # exponents of up to 1e3 in float32
                    torch.testing.assert_close(mine.potential[k], theirs.potential, rtol=0, atol=2e-3)
                    assert mine.residual[k, 0].item() == pytest.approx(theirs.residual.item(), rel=1e-3)
        roundings = together.roundings()
        assert roundings.tolist() == pytest.approx([sweeps.rounding() for sweeps in alone], rel=1e-4)


def test_second_derivatives_are_those_of_one_after_another():
    clouds = spread_out(3, 14, 11, 2)
    clouds = [v[:, 5:] for v in clouds]
    mine, theirs = ([v.clone().requires_grad_() for v in (clouds[0], clouds[1])] for _ in range(2))
    options = {"eps": 5.0, "tol": 1e-12, "hessian_tol": 1e-12}
    weights = [v / v.sum(1, keepdim=True) for v in clouds[2:]]
    seconds = []
    for solve, points in ((transports, mine), (looped, theirs)):
        values = torch.stack([result.ot for result in solve(*points, *weights, **options)])
        first = torch.autograd.grad(values.sum(), points, create_graph=True)
        seconds.append(torch.autograd.grad(sum(each.square().sum() for each in first), points))
    for got, each in zip(*seconds, strict=True):
        assert each.any()
        torch.testing.assert_close(got, each, rtol=1e-7, atol=1e-7)


def test_a_batch_of_more_than_a_grid_holds_is_several(monkeypatch):
    clouds = spread_out(5, 20, 15, 2)
    want = transports(*clouds, eps=1.0)
    monkeypatch.setattr(batches, "MOST_PROBLEMS", 2)
    for got, each in zip(transports(*clouds, eps=1.0), want, strict=True):
        assert got.ot.item() == pytest.approx(each.ot.item(), rel=1e-6)


def test_a_single_problem_is_transport():
    x, y, a, b = spread_out(2, 20, 15, 2)
    (found,) = transports(x[:1], y[:1], a[:1], b[:1], eps=1.0)
    assert found.ot.item() == transport(x[0], y[0], a[0], b[0], eps=1.0).ot.item()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["exact", "mixed", "fast"])
@pytest.mark.parametrize("d", [3, 5, 64])
def test_on_a_gpu_values_and_gradients_are_those_of_one_after_another(d, precision):
    """Gradients are off by the residual times distances, of ten at most, times a problem's condition, measured below
    ten on the CPU."""
    tol = 1e-4
    clouds = [v.cuda() for v in spread_out(11, 300, 211, d, dtype=torch.float32)]
    mine, theirs = ([v.clone().requires_grad_() for v in clouds] for _ in range(2))
    options = {"eps": float(d), "tol": tol, "debias": True, "precision": precision}
    found, want = transports(*mine, **options), looped(*theirs, **options)
    for got, each in zip(found, want, strict=True):
        assert got.converged and got.residual <= tol and each.converged
        miss = (got.plan.row_sums() - got.inputs[2] / got.inputs[2].sum()).abs().sum().item()
        assert miss < 2 * tol
    (values, gradients), (others, expected) = called(found, mine), called(want, theirs)
    torch.testing.assert_close(values, others, rtol=1e-3, atol=d * tol)
    for got, each in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, each, rtol=0.0, atol=100 * tol)


@gpu
@pytest.mark.gpu
def test_on_a_gpu_launches_and_looks_do_not_grow_with_the_batch(monkeypatch):
    """Copies of one problem, so that all end at once."""
    x, y, a, b = (v[:1].cuda() for v in spread_out(2, 300, 211, 3, dtype=torch.float32))
    counts = {}
    launching = Launch.__call__

    def launched(launch, *changing):
        counts[size] += 1
        return launching(launch, *changing)

    monkeypatch.setattr(Launch, "__call__", launched)
    for size in (2, 64):
        counts[size] = 0
        transports(*(v.expand(size, *v.shape[1:]) for v in (x, y, a, b)), eps=0.5, tol=1e-3)
    assert counts[64] <= 1.25 * counts[2]  # tiles, and so rounding, depend on the batch: iterations may too

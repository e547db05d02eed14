"""Tolerances that rounding cannot meet end iterations; slow convergence does not. References are plain float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_acceleration import HARD, residual, unbalanced_pair, uniform

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.iteration.loop import Loop, Method, Updates
from solvers.flash_sinkhorn.iteration.progress import FEWEST, Progress
from solvers.flash_sinkhorn.sweeps.blocked_sweeps import BlockedSweeps
from solvers.flash_sinkhorn.sweeps.sweeps import ROUNDINGS
from solvers.flash_sinkhorn.sweeps.tiles import Precision

PROBLEMS = HARD | {"N02": (*unbalanced_pair(), 0.01)}
MIXED, PLAIN = {"acceleration": True}, {"acceleration": False}


def first_stall(residuals, rounding):
    progress = Progress(lambda: rounding)
    return next((k for k, value in enumerate(residuals, 1) if progress.has_stalled(k, value)), None)


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_rounding_bounds_the_error_of_a_measured_residual(d, eps):
    """32 clusters to others, exponents up to 1e6, float32 on the CPU against float64."""
    generator = torch.Generator().manual_seed(d)
    centres = torch.rand(2, 32, d, generator=generator, dtype=torch.float64)
    x, y = (each[torch.arange(200) % 32] + 0.02 * torch.randn(200, d, generator=generator) for each in centres)
    x, y = x.float(), y.float()
    loop = Loop(
        checked_inputs(x, y, None, None, eps=eps, cost_scale=1.0),
        Method(1.0, None, None, Updates.ALTERNATING, True),
        Precision.EXACT,
    )
    result = solve(x, y, eps=eps, tol=1e-9, max_iterations=60)
    loop.sweeps.x.potential[:200], loop.sweeps.y.potential[:200] = (v / eps / math.log(2) for v in (result.f, result.g))
    loop.set_epsilon(eps)
    true = residual(x, y, uniform(x), uniform(y), result)
    assert abs(result.residual - true) <= 0.5 * loop.sweeps.rounding()


@pytest.mark.parametrize("rate", [0.3, 0.9, 0.98])
def test_a_constant_rate_is_no_stall_even_below_rounding(rate):
    assert first_stall((rate**k for k in range(1000)), rounding=1.0) is None


def test_nor_is_the_slowest_convergence_of_sinkhorn():
    assert first_stall((1 / k for k in range(1, 20_000)), rounding=1.0) is None


@pytest.mark.parametrize("plateau", [0.01, math.nan])
def test_a_plateau_above_rounding_is_no_stall_and_costs_few_looks(plateau):
    looks = []
    progress = Progress(lambda: looks.append(1) or 1e-3)
    assert not any(progress.has_stalled(k, plateau) for k in range(1, 10_000))
    assert len(looks) <= math.log2(10_000 / FEWEST) + 1


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.995])
def test_a_noisy_floor_is_seen_in_about_twice_the_iterations_to_it(rate):
    noise = 1 + 0.1 * torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    floor = 1e-6
    reached = math.ceil(math.log(floor) / math.log(rate))
    stalled = first_stall((max(rate**k, floor) * factor for k, factor in enumerate(noise.tolist())), rounding=floor)
    assert stalled is not None and reached < stalled <= 2 * (reached + FEWEST)


@pytest.mark.parametrize(("name", "method"), [*((name, MIXED) for name in PROBLEMS), ("cube to normal", PLAIN)])
def test_float32_ends_where_rounding_lets_it_go_no_further(device, name, method):
    x, y, eps = PROBLEMS[name]
    x, y = x.float(), y.float()
    result = solve(x.to(device), y.to(device), eps=eps, tol=1e-12, **method)
    assert result.stalled and result.converged is False
    reached = [check.iteration for check in result.trace if check.eps == eps and check.residual <= 2 * result.residual]
    assert result.n_iterations <= 10 * reached[0] + 2 * FEWEST  # mixed residuals creep down for long
    # Half an ulp of a bias log2(e) C / eps, ln 2 times that of its exponential; potentials are at most the largest C.
    largest = torch.cdist(x.double(), y.double()).square().max().item()
    assert residual(x, y, uniform(x), uniform(y), result) < ROUNDINGS * 2.0**-24 * largest / eps


@pytest.mark.parametrize(("name", "method"), [*((name, MIXED) for name in PROBLEMS), ("cube to normal", PLAIN)])
def test_float64_goes_on_to_what_float32_cannot_meet(name, method):
    x, y, eps = PROBLEMS[name]
    result = solve(x.double(), y.double(), eps=eps, tol=1e-9, **method)
    assert result.converged and not result.stalled


@pytest.mark.parametrize("name", HARD)
def test_a_plateau_at_tiny_eps_is_no_stall(name):
    """Plain updates from zero: mass finds its way slowly while hardly a residual falls."""
    x, y, eps = HARD[name]
    result = solve(x, y, eps=eps / 50, tol=1e-9, acceleration=False, max_iterations=1000)
    residuals = [check.residual for check in result.trace]
    assert residuals[500] > 0.8 * residuals[250] > 1e-3
    assert result.n_iterations == 1000 and not result.stalled


def test_points_without_weight_do_not_count_as_rounding(device):
    """Far out their biases are huge; a floor that they set would end iterations early."""
    x, y, eps = HARD["cube to normal"]
    padded = torch.cat([x, torch.full((1, 3), 1e3, dtype=torch.float64)])
    padded_a = torch.cat([uniform(x), torch.zeros(1, dtype=torch.float64)])
    roundings = []
    for points, a in ((x, uniform(x)), (padded, padded_a)):
        inputs = checked_inputs(*(v.to(device) for v in (points, y, a, uniform(y))), eps=eps, cost_scale=1.0)
        loop = Loop(inputs, Method(1.0, None, None, Updates.ALTERNATING, False), Precision.EXACT)
        loop.set_epsilon(eps)
        loop.iterate()
        roundings.append(loop.sweeps.rounding())
    half_ulp = 2.0**-53 if device == "cpu" else 2.0**-24
    largest = torch.cdist(x, y).square().max().item()
    assert roundings[1] == pytest.approx(roundings[0], rel=1e-3)
    assert 0.01 * half_ulp * largest / eps < roundings[0] < half_ulp * largest / eps


class Coarse(BlockedSweeps):
    """In float32, where exact sweeps are in float64."""

    improvable = True


@pytest.mark.parametrize("tol", [1e-9, 1e-3])
def test_exact_sweeps_take_over_where_others_round_too_much(monkeypatch, tol):
    """Not where rounding is far below what is asked for."""

    def make_sweeps(loop):
        inputs, scale = loop.inputs, loop.method.cost_scale
        if loop.precision is Precision.EXACT:
            return BlockedSweeps(inputs, cost_scale=scale)
        return Coarse(dataclasses.replace(inputs, x=inputs.x.float(), y=inputs.y.float()), cost_scale=scale)

    monkeypatch.setattr(Loop, "_make_sweeps", make_sweeps)
    x, y, eps = PROBLEMS["cube to normal"]
    result = solve(x, y, eps=eps, tol=tol, precision="fast")
    assert result.converged and not result.stalled
    assert residual(x, y, uniform(x), uniform(y), result) <= 1.01 * tol
    expected = Precision.EXACT if tol == 1e-9 else Precision.FAST
    assert result.precision is expected and result.trace[-1].precision is expected
    assert result.trace[0].precision is Precision.FAST

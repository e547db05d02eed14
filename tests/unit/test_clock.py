"""The clock: what is inside the timed part, and what is not."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsbench import clock
from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec
from fsbench.clock import time_solve
from fsbench.frameworks import Backend, backend

SPEC = Spec(2, 2, 1, 0.1, 1.0, "float32", "cpu")
BUDGET = FixedIterations(1)


class Sleeper:
    framework = Framework.TORCH

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def supports(self, spec: Spec, budget: Budget) -> None: ...

    def prepare(self, spec: Spec, budget: Budget) -> None: ...

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        time.sleep(self.seconds)
        return Solution(problem.a, problem.b, 1, 2.0)


def _problem(on: Backend, spec: Spec = SPEC) -> Problem:
    points, weights = np.zeros((2, 1), "float32"), np.full(2, 0.5, "float32")
    return Problem(on.array(points), on.array(points), on.array(weights), on.array(weights), spec)


def test_cache_eviction_is_outside_the_timed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: a flush of 100 ms around a solve of 20 ms must not show."""
    evicted: list[str] = []
    monkeypatch.setattr(clock, "evict_l2", lambda device: (evicted.append(device), time.sleep(0.1)))
    on = backend(Framework.TORCH, "cpu", "float32")
    timed = time_solve(Sleeper(0.02), _problem(on), BUDGET, on)
    assert evicted == ["cpu"]
    assert 0.02 <= timed.seconds < 0.06
    assert timed.device_seconds is None


def test_waiting_for_the_device_is_inside_the_timed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """P09: work that is queued and returns at once is timed to its end."""
    on = backend(Framework.TORCH, "cpu", "float32")
    problem = _problem(on)
    queued = {"until": 0.0}

    class Queues(Sleeper):
        def solve(self, problem: Problem, budget: Budget) -> Solution:
            queued["until"] = time.perf_counter() + 0.2
            return Solution(problem.a, problem.b, 1, 2.0)

    monkeypatch.setattr(on, "wait", lambda _: time.sleep(max(0.0, queued["until"] - time.perf_counter())))
    assert time_solve(Queues(0.0), problem, BUDGET, on).seconds >= 0.19


def test_jax_s_asynchronous_dispatch_is_waited_for() -> None:
    """P09 for real: the call returns long before its arrays are there."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    multiply = jax.jit(lambda m: jax.lax.fori_loop(0, 60, lambda _, v: jnp.tanh(v @ m), m))
    matrix = jnp.ones((600, 600)) / 600
    multiply(matrix).block_until_ready()
    returned = []

    class Asynchronous(Sleeper):
        framework = Framework.JAX

        def solve(self, problem: Problem, budget: Budget) -> Solution:
            begin = time.perf_counter()
            f = multiply(matrix)
            returned.append(time.perf_counter() - begin)
            return Solution(f, problem.b, 1, 2.0)

    begin = time.perf_counter()
    multiply(matrix).block_until_ready()
    whole = time.perf_counter() - begin
    on = backend(Framework.JAX, "cpu", "float32")
    timed = time_solve(Asynchronous(0.0), _problem(on), BUDGET, on)
    assert returned[0] < 0.5 * timed.seconds  # it did return early
    assert timed.seconds > 0.3 * whole  # and yet was timed to its end, whatever else the machine does


def test_garbage_collection_waits_until_after_the_solve() -> None:
    on = backend(Framework.TORCH, "cpu", "float32")
    seen = []

    class Looks(Sleeper):
        def solve(self, problem: Problem, budget: Budget) -> Solution:
            seen.append(gc.isenabled())
            if self.seconds:
                raise RuntimeError("broken")
            return Solution(problem.a, problem.b, 1, 2.0)

    time_solve(Looks(0.0), _problem(on), BUDGET, on)
    with pytest.raises(RuntimeError, match="broken"):
        time_solve(Looks(1.0), _problem(on), BUDGET, on)
    assert seen == [False, False] and gc.isenabled()


@pytest.mark.gpu
def test_queued_gpu_work_is_timed_by_both_clocks_on_a_cold_cache() -> None:
    """P09 and P12 on a device: a kernel that spins for a known number of cycles."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    class Spins(Sleeper):
        def solve(self, problem: Problem, budget: Budget) -> Solution:
            torch.cuda._sleep(int(self.seconds * 1e9))
            return Solution(problem.a, problem.b, 1, 2.0)

    on: Any = backend(Framework.TORCH, "cuda", "float32")
    problem = _problem(on, replace(SPEC, device="cuda"))
    long, short = (time_solve(Spins(s), problem, BUDGET, on) for s in (1.0, 1e-5))
    assert long.device_seconds is not None and short.device_seconds is not None
    assert long.seconds == pytest.approx(long.device_seconds, rel=0.02) and long.seconds > 0.3
    assert short.seconds < 1e-3 and short.device_seconds < 2e-4

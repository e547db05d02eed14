"""One clock for every framework: host seconds around `solve` plus device synchronisation. CUDA events besides."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsbench.api import Budget, Framework, Problem, Solution, Solver
from fsbench.frameworks import Backend


@dataclass(frozen=True)
class Timed:
    """One solve and how long it took; `device_seconds` by events on the current stream, torch on CUDA only."""

    solution: Solution
    seconds: float
    device_seconds: float | None


def time_solve(solver: Solver, problem: Problem, budget: Budget, backend: Backend) -> Timed:
    """Solve once on a cold L2 cache; the eviction lies outside the timed part."""
    evict_l2(problem.spec.device)
    events = _events(solver, problem)
    with _no_garbage_collection():
        backend.wait((problem.x, problem.y))
        begin = time.perf_counter()
        if events:
            events[0].record()
        solution = solver.solve(problem, budget)
        if events:
            events[1].record()
        backend.wait(solution.outputs)
        seconds = time.perf_counter() - begin
    return Timed(solution, seconds, events[0].elapsed_time(events[1]) * 1e-3 if events else None)


def evict_l2(device: str) -> None:
    """Overwrite twice the device's L2 cache and wait. Nothing to do on the CPU, whose caches a solve outgrows."""
    if device != "cuda":
        return
    import torch  # also for JAX: the cache is the device's, not the framework's

    torch.zeros(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()


def _events(solver: Solver, problem: Problem) -> tuple[Any, Any] | None:
    if problem.spec.device != "cuda" or solver.framework != Framework.TORCH:
        return None
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

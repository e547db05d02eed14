"""Blocks of work in threads: what comes back, what the user's own threads keep, and that torch divides nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from solvers import flash_sinkhorn, flash_sinkhorn2
from solvers.flash_sinkhorn.sweeps.threads import each_block, undivided

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_blocks():
    def work(block: int) -> int:
        time.sleep(0.01 if block % 2 else 0.0)
        return 10 * block

    assert each_block(work, range(7)) == [10 * block for block in range(7)]
    assert each_block(work, []) == []


def test_operations_of_blocks_are_not_divided_and_blocks_within_blocks_do_not_wait():
    numbers = each_block(lambda _: (torch.get_num_threads(), each_block(lambda b: b, range(3))), range(8))
    assert numbers == [(1, [0, 1, 2])] * 8


@pytest.mark.parametrize("threads", [3, 4])
def test_the_users_threads_keep_their_number(threads):
    torch.set_num_threads(threads)
    each_block(lambda _: time.sleep(0.01), range(8))
    of_new_thread: list[int] = []
    new = threading.Thread(target=lambda: of_new_thread.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert torch.get_num_threads() == threads and of_new_thread == [threads]


def test_solves_go_on_when_the_main_thread_has_ended_and_in_hooks_at_exit():
    script = """
import atexit, threading, time, torch
from solvers.flash_sinkhorn import solve
torch.set_num_threads(2)
x, y = torch.rand(2500, 3), torch.rand(2500, 3)
def solved():
    return solve(x, y, eps=0.05, n_iterations=4).f
first = solved()
def outlive():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print(torch.equal(solved(), first), flush=True)
threading.Thread(target=outlive).start()
atexit.register(lambda: print(torch.equal(solved(), first), flush=True))
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["True", "True"]


def test_the_number_comes_back_from_undivided_whatever_ends_it():
    with pytest.raises(ZeroDivisionError), undivided(CPU), undivided(CPU):
        of_new_thread: list[int] = []
        new = threading.Thread(target=lambda: of_new_thread.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert torch.get_num_threads() == 1 and of_new_thread == [2]
        at_once = threading.Barrier(2, timeout=60)
        each_block(lambda _: at_once.wait(), range(2))  # breaks unless two threads are there
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    assert each_block(lambda _: torch.get_num_threads(), range(2)) == [1, 1]


def test_the_first_exception_comes_through_and_ends_it():
    begun: list[int] = []

    def work(block: int) -> None:
        begun.append(block)
        time.sleep(0.01)
        if block == 1:
            raise ZeroDivisionError("of block 1")

    with pytest.raises(ZeroDivisionError, match="of block 1"):
        each_block(work, range(100))
    assert len(begun) < 100
    assert each_block(lambda b: b, range(3)) == [0, 1, 2]


def test_gradients_and_inference_are_as_where_it_is_called():
    def modes(_: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert each_block(modes, range(3)) == [(True, False)] * 3
    with torch.no_grad():
        assert each_block(modes, range(3)) == [(False, False)] * 3
    with torch.inference_mode():
        assert each_block(modes, range(3)) == [(False, True)] * 3


def dense(x: torch.Tensor, y: torch.Tensor) -> flash_sinkhorn.Result:
    return flash_sinkhorn.solve(x, y, eps=0.1, n_iterations=3)


def kept(x: torch.Tensor, y: torch.Tensor) -> flash_sinkhorn2.Result:
    return flash_sinkhorn2.solve(x, y, eps=0.01, tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("solve", "d"), [(dense, 3), (dense, 19), (kept, 2)])
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads(solve, d, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(1201, d, generator=generator, dtype=dtype), torch.rand(2100, d, generator=generator, dtype=dtype)
    found = []
    for threads in (2, 2, 3, 1):
        torch.set_num_threads(threads)
        found.append(solve(x, y))
    for other in found[1:]:
        assert torch.equal(other.f, found[0].f) and torch.equal(other.g, found[0].g)


INTERRUPTED = """
import signal, threading, time, torch
from solvers.flash_sinkhorn.sweeps.threads import each_block
torch.set_num_threads(2)
begun = []
def work(block):
    begun.append(block)
    if block == 2:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.02)
try:
    each_block(work, range(200))
except KeyboardInterrupt:
    assert len(begun) < 200, "interrupted after all"
    assert each_block(lambda b: b, range(3)) == [0, 1, 2]
    print("interrupted")
"""

FORKED = """
import os, torch
from solvers.flash_sinkhorn.sweeps.threads import each_block
torch.set_num_threads(2)
each_block(lambda b: b, range(4))
child = os.fork()
found = each_block(lambda b: b, range(4))
if not child:
    os._exit(found != [0, 1, 2, 3])
assert os.waitpid(child, 0)[1] == 0
print("forked")
"""

# OpenMP's threads, once it has divided a single operation, stay: those of the process that Python does not know.
UNDIVIDED = """
import os, sys, threading, time, torch
from solvers.flash_sinkhorn import solve, transport
from solvers.flash_sinkhorn2 import solve as solve_kept
torch.set_num_threads(2)
def of_others():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
generator = torch.Generator().manual_seed(0)
n, d = int(sys.argv[1]), int(sys.argv[2])
x, y = torch.rand(n, d, generator=generator), torch.rand(n + 1, d, generator=generator)
before = of_others()
if d <= 6:
    solve_kept(x, y, eps=0.01 * d, tol=1e-2)
solve(x, y, eps=0.1 * d, tol=1e-2)
transport(x, y, eps=0.1 * d, n_iterations=2).plan.apply(y)
deadline = time.monotonic() + 10  # a thread that has been joined takes a moment to go
while of_others() > before and time.monotonic() < deadline:
    time.sleep(0.01)
undivided = of_others() == before
torch.rand(1 << 20).mul_(2)
assert of_others() > before, "divided operations are not seen"
print("undivided" if undivided else "divided")
"""

PEAK = """
import resource, sys, torch
from solvers.flash_sinkhorn import transport
torch.set_num_threads(2)
def run(n):
    x, y = torch.rand(n, int(sys.argv[1])), torch.rand(n, int(sys.argv[1]))
    transport(x, y, eps=1.0, n_iterations=1).plan.apply(y)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, large = run(10), run(8000)
print((large - small) // 1024)
"""


def _printed(code: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]  # Python 3.12 warns of any fork beside threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_interrupt_comes_through():
    assert _printed(INTERRUPTED) == "interrupted"


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_a_forked_process_has_threads_of_its_own():
    assert _printed(FORKED) == "forked"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("n", "d"), [(1500, 3), (500, 40)])
def test_torch_divides_no_operation_of_a_solve(n, d):
    """Each divided operation waits for the slowest thread: hundreds of them a solve stand still on a busy machine.

    Sizes at which those on n x d numbers are small enough not to be divided, and those on n x m pairs are not.
    """
    assert _printed(UNDIVIDED, str(n), str(d)) == "undivided"


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize("d", [3, 40])
def test_memory_is_that_of_blocks(d):
    """Two blocks of 4 MiB a thread in the sweeps of the potentials, and again in those of the plan, are 32 MiB; all
    pairs would be 244 MiB."""
    assert int(_printed(PEAK, str(d))) < 64

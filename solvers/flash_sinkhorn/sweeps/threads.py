"""Blocks of work on the CPU, each computed by one thread.

torch divides every operation among threads and waits for the last of them: on a machine that does other work too, for
one that is not running, some milliseconds an operation. Threads of our own wait once, at the end of all blocks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import Thread, local
from typing import TypeVar

import torch

LEAST_DIVIDED = 1 << 15  # elements from which on torch divides sums and differences; products, from a few on
MOST_THREADS = 16  # more would wait for the interpreter

_here = local()  # threads: of `each_block`, inside `undivided`

Block = TypeVar("Block")
Result = TypeVar("Result")


def each_block(work: Callable[[Block], Result], blocks: Iterable[Block]) -> list[Result]:
    """work(block) of every block, in the order of the blocks, in as many threads as torch would use, 16 at most.

    Operations of `work` are not divided any further. Once it raises, no more blocks are begun.
    """
    inside: int = getattr(_here, "threads", 0)
    threads, blocks = inside or torch.get_num_threads(), list(blocks)
    if threads == 1 or (inside and len(blocks) == 1):
        return [work(block) for block in blocks]
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    left, results = iter(range(len(blocks))), dict[int, Result]()

    def take_blocks() -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                for index in left:
                    results[index] = work(blocks[index])
        finally:
            deque(left, maxlen=0)

    wanted = min(threads, len(blocks)) - bool(inside)
    helpers = _submitted(_pool(threads), take_blocks, wanted)
    try:
        if inside or len(helpers) < wanted:
            take_blocks()
        for helper in helpers:
            helper.result()
    finally:
        deque(left, maxlen=0)
    return [results[index] for index in range(len(blocks))]


@contextmanager
def undivided(device: torch.device) -> Iterator[None]:
    """Operations of this thread on a CPU are not divided either, inside. `each_block` has as many threads as before,
    this one among them: nobody has to be woken for a single block. Nothing changes for work on a GPU."""
    threads = torch.get_num_threads()
    if threads == 1 or device.type != "cpu":
        yield
        return
    try:
        _divide_no_operation(threads)
        _here.threads = threads
        yield
    finally:
        _here.threads = 0
        torch.set_num_threads(threads)


def _submitted(pool: ThreadPoolExecutor, work: Callable[[], None], times: int) -> list[Future[None]]:
    """None once the main thread has ended, and with it the pool: Python lets other threads run on, but begin none."""
    futures: list[Future[None]] = []
    with suppress(RuntimeError):
        for _ in range(times):
            futures.append(pool.submit(work))
    return futures


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(threads, MOST_THREADS), initializer=_divide_no_operation, initargs=(threads,))


def _divide_no_operation(default: int) -> None:
    torch.get_num_threads()  # a thread takes the default when it is first asked, and after that keeps what it is set to
    torch.set_num_threads(1)  # of this thread, and the default from now on: a second thread puts that back
    restoring = Thread(target=torch.set_num_threads, args=(default,))
    try:
        restoring.start()
    except RuntimeError:  # the program ends: there will be no threads that want the default
        return
    restoring.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process has none of its parent's threads

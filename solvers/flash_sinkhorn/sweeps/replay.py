"""Work on small clouds as one CUDA graph, a batch's problems side by side: launched kernel by kernel each would wait
for the host and leave most of the GPU idle."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

import torch

LARGEST_PAIRS = 1 << 30  # beyond, what the host does takes no time beside the sweeps
LARGEST_BYTES = 1 << 26  # of inputs that a recording keeps a copy of
MOST_PROBLEMS = 128  # of one recording: recording takes the host a few milliseconds each
BRANCHES = 8  # of a recording that run at once; each has memory for one problem
KEPT = 16  # recordings, the least recently used goes: three problems' iterations, values and gradients, and a few more

Tensors = tuple[torch.Tensor, ...]


def replayed(
    kind: Hashable, numbers: Sequence[Hashable], compute: Callable[..., Tensors], *tensors: torch.Tensor
) -> Tensors:
    """compute(number, *tensors) of each of B problems, its results stacked: [B, ...] each.

    tensors: [B, ...]; the first two have n and m points, [B, n, ...] and [B, m, ...]. The second call of a kind on
    small problems is recorded, later ones replay that with their own values: the same kernels on the same numbers, so
    the same bits. As many problems as are small together are one recording; a larger batch is several, or as many
    replays of one. kind and numbers [B]: all that a result depends on besides the tensors, so every number that reaches
    kernels from the host, of all problems and of each. compute must not wait for the device, and returns new tensors.
    """
    count = len(tensors[0])
    at_once = small_together(*tensors)
    if at_once == 0:
        return _one_by_one(compute, numbers, tensors)
    if count <= at_once:
        return _replayed(kind, tuple(numbers), compute, tensors)
    size = -(-count // -(-count // at_once))
    pieces = [slice(start, start + size) for start in range(0, count, size)]
    found = [_replayed(kind, tuple(numbers[p]), compute, tuple(tensor[p] for tensor in tensors)) for p in pieces]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _replayed(
    kind: Hashable, numbers: tuple[Hashable, ...], compute: Callable[..., Tensors], tensors: Tensors
) -> Tensors:
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).cuda_stream  # recordings of two streams must not share their copies
    key = kind, numbers, device, stream, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    with _lock:
        seen, recording = key in _recordings, _recordings.pop(key, None)
        if not seen:
            found = _one_by_one(compute, numbers, tensors)
        elif recording is None:
            recording = _Recording(compute, numbers, tensors)
            found = recording.first
        else:
            found = recording.replay(tensors)
        _recordings[key] = recording
        if len(_recordings) > KEPT:
            _recordings.popitem(last=False)
        return found


class _Recording:
    """What compute does to copies of the tensors. first: its results for those it was made with."""

    def __init__(self, compute: Callable[..., Tensors], numbers: tuple[Hashable, ...], tensors: Tensors):
        self._tensors = tuple(tensor.clone() for tensor in tensors)
        # Compiles what is missing: nothing may while recording.
        self.first = _one_by_one(compute, numbers, self._tensors)
        self._graph = torch.cuda.CUDAGraph()
        self._device = tensors[0].device
        stream, *branches = _streams(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._results = _side_by_side(compute, numbers, self._tensors, stream, branches)
            finally:
                self._graph.capture_end()

    def replay(self, tensors: Tensors) -> Tensors:
        for own, given in zip(self._tensors, tensors, strict=True):
            own.copy_(given)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return tuple(result.clone() for result in self._results)  # the next replay overwrites its own


_recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()  # None: seen once
_lock = threading.Lock()


def small_together(x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> int:
    """How many of these problems are one recording; none where the GPU has enough to do with one."""
    if x.device.type != "cuda":
        return 0
    pairs = x.shape[1] * y.shape[1]
    bytes_each = sum(tensor.nbytes for tensor in (x, y, *others)) // len(x)
    return min(MOST_PROBLEMS, LARGEST_PAIRS // pairs, LARGEST_BYTES // bytes_each)


def _one_by_one(compute: Callable[..., Tensors], numbers: Sequence[Hashable], tensors: Tensors) -> Tensors:
    return _stacked([compute(number, *own) for number, *own in zip(numbers, *tensors, strict=True)])


def _side_by_side(
    compute: Callable[..., Tensors],
    numbers: Sequence[Hashable],
    tensors: Tensors,
    stream: torch.cuda.Stream,
    branches: Sequence[torch.cuda.Stream],
) -> Tensors:
    """Problem k on branch k modulo their number, between a fork from the stream and the join with it.

    A branch takes memory again that it has freed, and what crosses over to the stream is held until nothing more is
    launched on any branch: so no memory is written while another branch reads it.
    """
    branches = branches[: len(numbers)]
    found = []
    for branch in branches:
        branch.wait_stream(stream)
    for k, (number, *own) in enumerate(zip(numbers, *tensors, strict=True)):
        with torch.cuda.stream(branches[k % len(branches)]):
            found.append(compute(number, *own))
    for branch in branches:
        stream.wait_stream(branch)
    return _stacked(found)


def _stacked(found: list[Tensors]) -> Tensors:
    if len(found) == 1:
        return tuple(result[None] for result in found[0])
    return tuple(torch.stack(results) for results in zip(*found, strict=True))


@lru_cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """One to record on and the branches; the same ones each time, for torch hands out a few in turn."""
    return tuple(torch.cuda.Stream(device) for _ in range(1 + BRANCHES))

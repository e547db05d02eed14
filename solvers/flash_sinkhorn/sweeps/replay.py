"""Work on small clouds as one CUDA graph: launched kernel by kernel it would wait for the host."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

LARGEST_PAIRS = 1 << 30  # beyond, what the host does takes no time beside the sweeps
LARGEST_BYTES = 1 << 26  # of inputs that a recording keeps a copy of
KEPT = 8  # recordings, the least recently used goes

Tensors = tuple[torch.Tensor, ...]


def replayed(kind: Hashable, compute: Callable[..., Tensors], *tensors: torch.Tensor) -> Tensors:
    """compute(*tensors), of which the first two are clouds [n, d], [m, d].

    The second call of a kind on small clouds is recorded, later ones replay that with their own values: the same
    kernels on the same numbers, so the same bits. kind: all that the result depends on besides the tensors, so every
    number that reaches kernels from the host. compute must not wait for the device, and returns new tensors.
    """
    if not _are_small(*tensors):
        return compute(*tensors)
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).cuda_stream  # recordings of two streams must not share their copies
    key = kind, device, stream, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    with _lock:
        seen, recording = key in _recordings, _recordings.pop(key, None)
        if not seen:
            found = compute(*tensors)
        elif recording is None:
            recording = _Recording(compute, tensors)
            found = recording.first
        else:
            found = recording.replay(tensors)
        _recordings[key] = recording
        if len(_recordings) > KEPT:
            _recordings.popitem(last=False)
        return found


class _Recording:
    """What compute does to copies of the tensors. first: its results for those it was made with."""

    def __init__(self, compute: Callable[..., Tensors], tensors: Tensors):
        self._tensors = tuple(tensor.clone() for tensor in tensors)
        self.first = compute(*self._tensors)  # compiles what is missing: nothing may while recording
        self._graph = torch.cuda.CUDAGraph()
        self._device = tensors[0].device
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._results = compute(*self._tensors)
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


def _are_small(x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> bool:
    return (
        x.device.type == "cuda"
        and x.shape[0] * y.shape[0] <= LARGEST_PAIRS
        and sum(tensor.nbytes for tensor in (x, y, *others)) <= LARGEST_BYTES
    )

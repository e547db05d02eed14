"""Fixed iterations of a small problem as one CUDA graph: launched one by one they would wait for the host."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch

from .checks import Inputs
from .loop import Loop, Method
from .tiles import Precision

LARGEST_PAIRS = 1 << 30  # beyond, what the host does takes no time beside the sweeps
LARGEST_BYTES = 1 << 26  # of points that a recording keeps a copy of
KEPT = 8  # recordings, the least recently used goes

Potentials = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Schedule:
    """All that a recording holds besides the values of the points and weights. levels: eps of every iteration."""

    levels: tuple[float, ...]
    method: Method
    precision: Precision


def potentials_after(schedule: Schedule, inputs: Inputs) -> Potentials:
    """f [n], g [m], float64, after one iteration from zero at each level.

    The second small problem of a kind is recorded, later ones replay that with their own values: the same kernels on
    the same numbers, so the same bits. Numbers that come from the host, as `inputs.unit` does, are part of the kind.
    """
    if not _is_small(inputs):
        return _iterate(schedule, inputs)
    shift = schedule.levels[-1] * math.log(inputs.mass) / 2  # the mass is not recorded: rounding moves it every time
    with _lock:
        f, g = _from_recording(schedule, replace(inputs, mass=1.0))
        return f - shift, g - shift  # new tensors: a replay overwrites what the last one left


def _from_recording(schedule: Schedule, inputs: Inputs) -> Potentials:
    key = _kind(schedule, inputs)
    seen, recording = key in _recordings, _recordings.pop(key, None)
    if not seen:
        found = _iterate(schedule, inputs)
    elif recording is None:
        recording = _Recording(schedule, inputs)
        found = recording.first
    else:
        found = recording.replay(inputs)
    _recordings[key] = recording
    if len(_recordings) > KEPT:
        _recordings.popitem(last=False)
    return found


class _Recording:
    """The iterations of a schedule on copies of the inputs. first: the potentials of the inputs it was made with."""

    def __init__(self, schedule: Schedule, inputs: Inputs):
        tensors = {name: getattr(inputs, name).clone() for name in ("x", "y", "a", "b", "centre")}
        self._inputs = replace(inputs, **tensors)
        self.first = _iterate(schedule, self._inputs)  # compiles what is missing: nothing may while recording
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(inputs.x.device)
        stream.wait_stream(torch.cuda.current_stream(inputs.x.device))
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._potentials = _iterate(schedule, self._inputs)
            finally:
                self._graph.capture_end()

    def replay(self, inputs: Inputs) -> Potentials:
        """Overwritten by the next replay."""
        mine = self._inputs
        for own, given in ((mine.x, inputs.x), (mine.y, inputs.y), (mine.a, inputs.a), (mine.b, inputs.b),
                           (mine.centre, inputs.centre)):  # fmt: skip
            own.copy_(given)
        with torch.cuda.device(mine.x.device):
            self._graph.replay()
        return self._potentials


_recordings: OrderedDict[tuple[object, ...], _Recording | None] = OrderedDict()  # None: seen once
_lock = threading.Lock()


def _iterate(schedule: Schedule, inputs: Inputs) -> Potentials:
    loop = Loop(inputs, schedule.method, schedule.precision)
    for eps in schedule.levels:
        if eps != loop.eps:
            loop.set_epsilon(eps)
        loop.iterate()
    return loop.potentials()


def _is_small(inputs: Inputs) -> bool:
    x, y = inputs.x, inputs.y
    return (
        x.device.type == "cuda"
        and x.shape[0] * y.shape[0] <= LARGEST_PAIRS
        and (x.numel() + y.numel()) * x.element_size() <= LARGEST_BYTES
    )


def _kind(schedule: Schedule, inputs: Inputs) -> tuple[object, ...]:
    """Recordings of different streams must not share their copies of the inputs."""
    x, y = inputs.x, inputs.y
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return schedule, x.shape, y.shape[0], x.dtype, x.device, stream, inputs.unit

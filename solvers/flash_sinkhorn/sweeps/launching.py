"""Launches of Triton kernels at little more than the driver's cost."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel with its grid, first arguments and options; calling it with the rest launches on the arguments' device,
    any number of times.

    Triton's own path looks at every argument of every launch, which takes longer than a small sweep. Here that is done
    once, and once a process for all launches that would use the same compiled kernel. So what is given with a call may
    be floats and integers that the kernel does not specialise, nothing else. The tensors are kept alive.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._arguments, self._options = kernel, grid, arguments, options
        self._device: torch.device = arguments[0].device
        self.kind = launch_kind(kernel, arguments, options)
        self._run: Any = None
        self._pointers: tuple[Any, ...] = ()
        self._constants: tuple[Any, ...] = ()

    def __call__(self, *changing: float) -> None:
        with _on(self._device):
            if self._run is None:
                compiled = _compiled.get(self.kind)
                if compiled is None:  # always, under the interpreter
                    _compiled[self.kind] = self._kernel[self._grid](*self._arguments, *changing, **self._options)
                    return
                self._bind(compiled)
            self._run(*self._pointers, *changing, *self._constants)

    def _bind(self, compiled: Any) -> None:
        self._pointers = tuple(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in self._arguments)
        self._constants = tuple(value for name, value in self._options.items() if name in self._kernel.arg_names)
        self._run = compiled[self._grid]


def launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch once."""
    Launch(kernel, grid, arguments, options)()


def launch_kind(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """All that Triton compiles for: options, types, alignment, and integers that are one or multiples of 16."""
    general = _general_arguments(kernel)
    kinds = (_kind(argument, index in general) for index, argument in enumerate(arguments))
    return (kernel, arguments[0].device, *options.values(), *kinds)


@lru_cache
def _general_arguments(kernel: Any) -> frozenset[int]:
    """Positions of the arguments for whose values the kernel is not specialised; the interpreter knows of none."""
    names = getattr(kernel, "do_not_specialize", ())
    return frozenset(index for index, name in enumerate(kernel.arg_names) if name in names)


def _kind(argument: Any, general: bool) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument >= 1 << 31, not general and (argument == 1, argument % 16 == 0)
    return type(argument)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make that the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)

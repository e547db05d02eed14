"""What measuring needs of a solver's framework: conversion, synchronisation, allocator statistics."""

from __future__ import annotations

import gc
from typing import Any, Protocol

import numpy as np

from fsbench.api import Framework


class Backend(Protocol):
    """One framework on one device ("cpu" or "cuda")."""

    def array(self, values: np.ndarray) -> Any:
        """`values` as this framework's array on the device, same dtype."""

    def host(self, array: Any) -> np.ndarray:
        """A copy of `array` in host memory."""

    def wait(self, outputs: Any) -> None:
        """Return when the device is done with `outputs`."""

    def empty_cache(self) -> None:
        """Give memory that nothing uses back to the device and the system."""

    def reset_peak(self) -> None:
        """Start a new peak of allocated memory, where the framework can."""

    def peak_alloc_bytes(self) -> int | None:
        """Largest allocation on the device since `reset_peak`, inputs included; None where it is not known."""

    def idle_bytes(self) -> int:
        """Device memory that the allocator holds and nothing uses."""


class TorchBackend:
    def __init__(self, device: str, dtype: str) -> None:
        import torch

        self._torch, self._device, self._cuda = torch, device, device == "cuda"

    def array(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(np.array(values)).to(self._device)

    def host(self, array: Any) -> np.ndarray:
        return array.detach().cpu().numpy().copy()

    def wait(self, outputs: Any) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def empty_cache(self) -> None:
        gc.collect()
        if self._cuda:
            self._torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        if self._cuda:
            self._torch.cuda.reset_peak_memory_stats()

    def peak_alloc_bytes(self) -> int | None:
        return self._torch.cuda.max_memory_allocated() if self._cuda else None

    def idle_bytes(self) -> int:
        return self._torch.cuda.memory_reserved() - self._torch.cuda.memory_allocated() if self._cuda else 0


class JaxBackend:
    """JAX cannot reset its peak nor shrink its pool: a peak is known only if this cell raised the process's own."""

    def __init__(self, device: str, dtype: str) -> None:
        import jax

        jax.config.update("jax_enable_x64", dtype == "float64")
        self._jax, self._device = jax, jax.devices(device)[0]
        self._peak_before = self._statistic("peak_bytes_in_use")

    def array(self, values: np.ndarray) -> Any:
        return self._jax.device_put(np.array(values), self._device)

    def host(self, array: Any) -> np.ndarray:
        return np.array(array)

    def wait(self, outputs: Any) -> None:
        self._jax.block_until_ready(outputs)

    def empty_cache(self) -> None:
        gc.collect()
        if self._device.platform != "cpu":
            import torch  # evicting the L2 cache and scoring go through torch here as well

            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        pass

    def peak_alloc_bytes(self) -> int | None:
        peak = self._statistic("peak_bytes_in_use")
        return peak if peak > self._peak_before else None

    def idle_bytes(self) -> int:
        return max(0, self._statistic("pool_bytes") - self._statistic("bytes_in_use"))

    def _statistic(self, name: str) -> int:
        return int((self._device.memory_stats() or {}).get(name, 0))


def backend(framework: Framework, device: str, dtype: str) -> Backend:
    """The backend of `framework` on `device` for cells of `dtype`."""
    return TorchBackend(device, dtype) if Framework(framework) == Framework.TORCH else JaxBackend(device, dtype)

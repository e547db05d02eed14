"""Peak memory of a stretch of work, and the machine's state: NVML for the device, the resident set for the host."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

SAMPLE_INTERVAL_S = 0.005
SHORTEST_LOAD_S = 0.2  # the kernel counts processor time in steps of a hundredth of a second
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


class PeakMemory:
    """Context manager: the highest device and host memory while inside, above what was in use on entering.

    peak_device_bytes is what NVML saw on the whole device (None without a GPU), so it counts what a library allocates
    past its framework; `idle_bytes` is what the framework's pool holds unused on entering. peak_host_bytes is of this
    process. A thread samples every 5 ms; where the kernel lets the
    resident set's own high-water mark be reset, that exact mark is used as well.
    """

    peak_device_bytes: int | None = None
    peak_host_bytes: int = 0

    def __init__(self, device: str, *, idle_bytes: int = 0) -> None:
        self._device, self._idle_bytes = device, idle_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        _give_back_freed_blocks(at_once=True)
        self._exact = _reset_high_water_mark()
        self._host_level = self._host_top = _resident_bytes()
        self._device_level = self._device_top = device_bytes_in_use(self._device)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()  # short work can end between two samples, but pools still hold its memory
        if self._exact:
            self._host_top = max(self._host_top, _high_water_mark())
        _give_back_freed_blocks(at_once=False)
        self.peak_host_bytes = self._host_top - self._host_level
        if self._device_top is not None and self._device_level is not None:
            self.peak_device_bytes = self._device_top - (self._device_level - self._idle_bytes)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self._host_top = max(self._host_top, _resident_bytes())
        if self._device_top is not None:
            self._device_top = max(self._device_top, device_bytes_in_use(self._device) or 0)


def _give_back_freed_blocks(at_once: bool) -> None:
    """Whether freed blocks of 128 KiB and more return to the system at once, or may be kept for reuse (glibc only).

    Kept ones would be handed to the watched work without the resident set growing. Reuse with the largest threshold
    is where glibc's own adaptive rule settles, so what is timed later finds what it would have found.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, (128 << 10) if at_once else (32 << 20))
        libc.mallopt(_M_TRIM_THRESHOLD, (128 << 10) if at_once else (64 << 20))
        libc.malloc_trim(0)


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): resets VmHWM alone
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def device_bytes_in_use(device: str) -> int | None:
    """Memory in use on the whole GPU by NVML, or None without one."""
    handle = _nvml_handle() if device == "cuda" else None
    return None if handle is None else int(_nvml().nvmlDeviceGetMemoryInfo(handle).used)


def gpu_state(device: str) -> dict[str, Any]:
    """The record's columns for clocks, temperature, power, throttling and foreign processes, as of now."""
    handle = _nvml_handle() if device == "cuda" else None
    if handle is None:
        return {}
    nvml = _nvml()
    readings: dict[str, Callable[[], Any]] = {
        "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "throttle_reasons": lambda: throttle_names(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "foreign_processes": lambda: count_foreign(
            [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        ),
    }
    return {name: _reading(read) for name, read in readings.items()}


class HostLoad:
    """Context manager, entered any number of times: how many CPUs other processes keep busy while inside."""

    def __init__(self) -> None:
        self._others_s = self._wall_s = 0.0

    def __enter__(self) -> None:
        self._begin = _processor_clocks()

    def __exit__(self, *exc: object) -> None:
        wall_s, busy_s, own_s = (end - begin for begin, end in zip(self._begin, _processor_clocks(), strict=True))
        self._wall_s += wall_s
        self._others_s += busy_s - own_s

    @property
    def cpus(self) -> float | None:
        """Of the whole machine, outside a container too; None where less was seen than the counters resolve."""
        return max(0.0, self._others_s / self._wall_s) if self._wall_s >= SHORTEST_LOAD_S else None


def _processor_clocks() -> tuple[float, float, float]:
    """Seconds: of the wall, of all processors at work, of this process."""
    at = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # guests are part of user
    return time.perf_counter(), sum(getattr(at, name, 0.0) for name in names), time.process_time()


def energy_j(device: str) -> float | None:
    """Energy the GPU has used since its driver was loaded, in joules; None where it does not count."""
    handle = _nvml_handle() if device == "cuda" else None
    return None if handle is None else _reading(lambda: _nvml().nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)


def throttle_names(mask: int) -> str:
    """NVML's bit mask of clock limits as names; "none" if nothing holds the clocks back."""
    names = {
        0x1: "idle", 0x2: "application_clocks", 0x4: "power_cap", 0x8: "hardware_slowdown", 0x10: "sync_boost",
        0x20: "thermal", 0x40: "hardware_thermal", 0x80: "power_brake", 0x100: "display_clocks",
    }  # fmt: skip
    return ",".join(name for bit, name in names.items() if mask & bit) or "none"


def count_foreign(pids: list[int]) -> int | None:
    """How many of `pids` are neither this run's parent nor its workers. None if they are of another namespace."""
    own = psutil.Process()
    if own.pid not in pids:
        return None  # inside a container NVML gives the host's numbers
    parent = own.parent() or own
    family = {own.pid, parent.pid, *(child.pid for child in parent.children(recursive=True))}
    return len(set(pids) - family)


def _reading(read: Callable[[], Any]) -> Any:
    """A reading, or None where this GPU or driver does not offer it."""
    try:
        return read()
    except _nvml().NVMLError:
        return None


@cache
def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


@cache
def _nvml_handle() -> Any:
    """NVML's handle of the GPU that the framework sees as device 0, found by UUID; None if NVML is not there."""
    import pynvml
    import torch

    try:
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        return _nvml().nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None

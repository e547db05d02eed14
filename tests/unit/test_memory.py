"""Peak memory and GPU state, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsbench import memory
from fsbench.memory import PeakMemory

MEBIBYTE = 1 << 20


# In a process of its own, as cells are measured: threads that other tests leave behind allocate whenever they like.
PEAKS = """
import json, sys, time
import numpy as np
from fsbench import memory
sizes, exact = json.loads(sys.argv[1])
if not exact:
    memory._reset_high_water_mark = lambda: False
peaks, on_device = [], []
for size in sizes:
    with memory.PeakMemory("cpu") as peak:
        block = np.ones(size // 8)
        time.sleep(0.03)  # several sampling intervals
        del block
    peaks.append(peak.peak_host_bytes)
    on_device.append(peak.peak_device_bytes)
held = np.ones(sizes[0] // 8)
with memory.PeakMemory("cpu") as peak:
    held += 1
print(json.dumps([peaks, on_device, peak.peak_host_bytes]))
"""


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("sizes", [(240, 120, 24), (24, 120, 240)])
def test_each_peak_is_its_own(sizes: tuple[int, ...], exact: bool) -> None:
    """M08: a peak must not depend on what ran before, in either order, with the kernel's mark or by sampling.

    Nor on what is held already: the last peak is of work on a block that was there before.
    """
    sizes = tuple(size * MEBIBYTE for size in sizes)
    command = [sys.executable, "-c", PEAKS, json.dumps([sizes, exact])]
    peaks, on_device, in_place = json.loads(subprocess.check_output(command, text=True))
    assert peaks == pytest.approx(list(sizes), rel=0.05)
    assert on_device == [None] * len(sizes)
    assert in_place < 4 * MEBIBYTE


def test_device_peak_is_above_the_level_on_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    level = {"bytes": 1000}
    monkeypatch.setattr(memory, "device_bytes_in_use", lambda device: level["bytes"])
    with PeakMemory("cuda", idle_bytes=100) as peak:
        level["bytes"] = 5000
        time.sleep(0.05)
        level["bytes"] = 1200
    assert peak.peak_device_bytes == 4100  # 100 of the first 1000 were the pool's own spare
    with PeakMemory("cuda") as short:
        level["bytes"] = 9200  # ends before the first sample, but pools keep what they took
    assert short.peak_device_bytes == 8000


def test_the_watch_stops_when_the_work_fails() -> None:
    with pytest.raises(RuntimeError, match="broken"), PeakMemory("cpu") as peak:
        raise RuntimeError("broken")
    assert not peak._thread.is_alive()


def test_throttle_names() -> None:
    assert memory.throttle_names(0) == "none"
    assert memory.throttle_names(0x4 | 0x20) == "power_cap,thermal"


def test_foreign_processes_are_those_outside_the_run() -> None:
    own, parent = os.getpid(), psutil.Process().ppid()
    assert memory.count_foreign([own, parent]) == 0
    assert memory.count_foreign([own, 2**22 + 1, 2**22 + 2]) == 2
    assert memory.count_foreign([2**22 + 1]) is None  # another namespace's numbers say nothing


def test_gpu_state_leaves_out_what_the_driver_does_not_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def not_supported(*_: Any) -> float:
        raise NVMLError("Not Supported")

    fake = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=lambda handle, kind: 41,
        nvmlDeviceGetPowerUsage=not_supported,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=os.getpid())],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 2500,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=123),
    )  # fmt: skip
    monkeypatch.setattr(memory, "_nvml", lambda: fake)
    monkeypatch.setattr(memory, "_nvml_handle", lambda: object())
    assert memory.gpu_state("cuda") == {
        "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "temperature_c": 41.0, "power_w": None,
        "throttle_reasons": "power_cap", "foreign_processes": 0,
    }  # fmt: skip
    assert memory.energy_j("cuda") == 2.5
    assert memory.device_bytes_in_use("cuda") == 123


def test_host_load_is_of_others_over_all_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches, 1 s and 3 s; all processors worked 2.5 s and 3.5 s, of which this process 1 s and 3 s."""
    clocks = iter([(0.0, 10.0, 5.0), (1.0, 12.5, 6.0), (9.0, 20.0, 7.0), (12.0, 23.5, 10.0)])
    monkeypatch.setattr(memory, "_processor_clocks", lambda: next(clocks))
    load = memory.HostLoad()
    assert load.cpus is None
    for expected in (1.5, 2.0 / 4.0):
        with load:
            pass
        assert load.cpus == pytest.approx(expected)


def test_host_load_sees_another_process_at_work() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        load = memory.HostLoad()
        with load:
            time.sleep(1.0)
        busy.kill()
    assert load.cpus is not None and load.cpus > 0.3  # a whole CPU, or its share of one that others use as well


def test_nothing_is_read_on_the_cpu() -> None:
    assert memory.gpu_state("cpu") == {}
    assert memory.energy_j("cpu") is None and memory.device_bytes_in_use("cpu") is None

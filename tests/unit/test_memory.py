"""Peak memory and GPU state, without a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from fsbench import memory
from fsbench.memory import PeakMemory

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("sizes", [(240, 120, 24), (24, 120, 240)])
def test_each_peak_is_its_own(sizes: tuple[int, ...], exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """M08: a peak must not depend on what ran before, in either order, with the kernel's mark or by sampling."""
    if not exact:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    gc.collect()  # as workers do: what other tests left behind must not go while a peak is measured
    for size in sizes:
        with PeakMemory("cpu") as peak:
            block = np.ones(size * MEBIBYTE // 8)
            time.sleep(0.03)  # several sampling intervals
            del block
        assert peak.peak_host_bytes == pytest.approx(size * MEBIBYTE, rel=0.05)
        assert peak.peak_device_bytes is None


def test_what_was_there_before_does_not_count() -> None:
    held = np.ones(64 * MEBIBYTE // 8)
    with PeakMemory("cpu") as peak:
        held += 1
    assert peak.peak_host_bytes < 4 * MEBIBYTE


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

"""What Nsight Compute watches: `python -m fsbench.counters_child CELL` warms a cell, then solves once between marks."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from fsbench.api import Cell
from fsbench.cell import Measurement
from fsbench.cell_inputs import load_target
from fsbench.counters import STAGES


def main() -> None:
    """Profile one warm solve, and print where the time went. Any failure is the process's exit code and traceback."""
    cell = Cell.from_json(sys.argv[1])
    clock = [time.perf_counter()]
    load_target(cell.solver_target)
    clock.append(time.perf_counter())
    # Three warm solves in all: a solver may launch its first, record its second and replay later ones.
    few = replace(cell.timing, warmup_calls=2, warmup_seconds=0.0, slope=False)
    measurement = Measurement(replace(cell, timing=few))
    measurement.start()
    measurement.solve()  # refills the caches that `start` emptied
    from torch.cuda import profiler  # not earlier: the solver's module comes first, as in fsbench.cell

    clock.append(time.perf_counter())
    profiler.start()  # marks the whole process, JAX's and KeOps' kernels too
    measurement.solve()
    profiler.stop()
    clock.append(time.perf_counter())
    names = ("imports", "set-up and warm-up", "profiled solve")
    took = [f"{name} {end - begin:.1f} s" for name, begin, end in zip(names, clock, clock[1:], strict=False)]
    print(STAGES + ", ".join(took), flush=True)


if __name__ == "__main__":
    main()

"""What Nsight Compute watches: `python -m fsbench.counters_child CELL` warms a cell, then solves once between marks."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsbench.api import Cell
from fsbench.cell import Measurement


def main() -> None:
    """Profile one warm solve. Any failure is the process's exit code and traceback."""
    cell = Cell.from_json(sys.argv[1])
    few = replace(cell.timing, warmup_calls=2, warmup_seconds=0.0, slope=False)
    measurement = Measurement(replace(cell, timing=few))
    measurement.start()
    measurement.solve()  # refills the caches that `start` emptied
    from torch.cuda import profiler  # not earlier: the solver's module comes first, as in fsbench.cell

    profiler.start()  # marks the whole process, JAX's and KeOps' kernels too
    measurement.solve()
    profiler.stop()


if __name__ == "__main__":
    main()

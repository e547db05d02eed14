"""What Nsight Compute watches: reads a cell as JSON from standard input, warms it, then one solve between the marks."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from fsbench.api import Cell
from fsbench.cell import Measurement


def main() -> None:
    """Profile one warm solve. Any failure is the process's exit code and traceback."""
    cell = Cell.from_json(sys.stdin.read())
    few = replace(cell.timing, warmup_calls=2, warmup_seconds=0.0, slope=False)
    measurement = Measurement(replace(cell, timing=few))
    measurement.start()
    measurement.solve()  # refills the caches that `start` emptied
    profiler = torch.cuda.cudart()  # marks the whole process, JAX's and KeOps' kernels too
    torch.cuda.check_error(profiler.cudaProfilerStart())
    measurement.solve()
    torch.cuda.check_error(profiler.cudaProfilerStop())


if __name__ == "__main__":
    main()

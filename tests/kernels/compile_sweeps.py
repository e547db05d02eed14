"""Compile the sweep kernel of every tile in use for sm_90 and print one JSON line a variant: resources and SASS."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn.sweeps.sweep_kernels import sweep_kernel
from solvers.flash_sinkhorn.sweeps.tiles import (
    LARGEST_DIRECT_DIMENSION,
    Precision,
    Tile,
    padded_dimension,
    small_tile,
    sweep_tile,
)

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def compile_sweep(precision: Precision, d: int, rows_are_x: bool, tile: Tile | None = None):
    tile, packed = tile or sweep_tile(precision, d), precision.packs(d)
    direct = d <= LARGEST_DIRECT_DIMENSION and not packed
    operand = "*fp32" if direct else "*fp16"
    signature = dict.fromkeys(("rows_hi", "rows_lo", "cols_hi", "cols_lo"), operand)
    signature |= dict.fromkeys(("stride_row", "stride_row_d", "stride_col", "stride_col_d"), "i32")
    signature |= dict.fromkeys(("row_coarse", "row_bias", "col_coarse", "col_bias"), "*fp32")
    signature |= dict.fromkeys(("own_col_bias", "partial_log2_sums"), "*fp32")
    signature |= dict.fromkeys(("row_statistics", "col_statistics", "block_statistics", "potential"), "*fp64")
    signature |= dict.fromkeys(("half_square", "weight", "log2_weight", "used"), "*fp64")
    signature["arrivals"] = "*i32"
    signature |= dict.fromkeys(("scale", "scale_rest", "step", "relaxation", "undamped"), "fp32")
    signature |= dict.fromkeys(("n_padded", "n_tiles", "tiles_per_split"), "i32")
    pairs = not direct and not packed
    x_split, y_split = pairs and precision.splits_x, pairs and precision.splits_y
    constants = {
        "D": padded_dimension(d, packed=packed), "BM": tile.rows, "BN": tile.cols, "BD": tile.coordinates,
        "DIRECT": direct,
        "ROWS_SPLIT": x_split if rows_are_x else y_split, "COLS_SPLIT": y_split if rows_are_x else x_split,
        "STAGES": tile.stages, "SETTLE": True, "BATCHED": False,
    }  # fmt: skip
    constants |= dict.fromkeys(("stride_row", "stride_col") if direct else ("stride_row_d", "stride_col_d"), 1)
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in sweep_kernel.arg_names}
    aligned = {
        (k,): [["tt.divisibility", 16]]
        for k, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride") or name == "n_padded"
    }
    source = ASTSource(fn=sweep_kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def inspect(cubin: bytes) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "stack_bytes": stack,
        "local_bytes": local,
        "local_accesses": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "hgmma": sass.count("HGMMA"),
        "ex2": sass.count("MUFU.EX2"),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, d, *size = argument.split(":")
        tile = (small_tile if size == ["small"] else sweep_tile)(Precision(name), int(d))
        for rows_are_x in (True, False):
            kernel = compile_sweep(Precision(name), int(d), rows_are_x, tile)
            print(json.dumps({"variant": argument, "rows_are_x": rows_are_x, **inspect(kernel.asm["cubin"])}))
            if Precision(name) is not Precision.MIXED or Precision(name).packs(int(d)):
                break  # both directions are the same kernel

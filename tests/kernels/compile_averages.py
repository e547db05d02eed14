"""Compile the kernels that carry values for sm_90 and print one JSON line a variant: resources and SASS.

Arguments kernel:precision:d:k, kernel "mean", "own" (of the opposite points; k is d), "moment" (both clouds moving) or
"still" (neither).
"""

from __future__ import annotations

import json
import sys

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn.plan.average_kernels import mean_kernel
from solvers.flash_sinkhorn.plan.average_tiles import ValueTile, moment_tile, value_tile
from solvers.flash_sinkhorn.plan.moment_kernel import moment_kernel
from solvers.flash_sinkhorn.sweeps.tiles import LARGEST_DIRECT_DIMENSION, Precision, padded_dimension

INTEGERS = {"settled", "n_padded", "stride_moment", "n_tiles", "tiles_per_split"}
FLOATS = {"scale"}


def compile_variant(
    kernel, precision: Precision, d: int, k: int, tile: ValueTile, *, own: bool = False, moving: bool = True
):
    direct = d <= LARGEST_DIRECT_DIMENSION
    split = precision.splits_y and not direct
    constants = {
        "D": padded_dimension(d), "BM": tile.pairs.rows, "BN": tile.pairs.cols, "BD": tile.pairs.coordinates,
        "DIRECT": direct, "ROWS_SPLIT": precision.splits_x and not direct, "COLS_SPLIT": split,
        "STAGES": tile.pairs.stages, "K": tile.stored_columns(k), "BK": tile.columns,
        "VALUES_SPLIT": tile.dot and precision is not Precision.FAST, "DOT": tile.dot,
        "OWN": own, "ROWS_MOVE": moving, "COLS_MOVE": moving, "WITH_POINTS": True,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constants |= dict.fromkeys(("stride_row", "stride_col") if direct else ("stride_row_d", "stride_col_d"), 1)
    constants["stride_column" if tile.dot else "stride_value"] = 1
    operands = {"rows_hi", "rows_lo", "cols_hi", "cols_lo", "v_hi", "v_lo", "w_hi", "w_lo"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in operands:
            signature[name] = "*fp32" if direct else "*fp16"
        elif name.startswith("values_"):
            signature[name] = "*fp16" if tile.dot else "*fp32"
        elif name.startswith("stride") or name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = "fp32" if name in FLOATS else "*fp32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("n_padded", "stride_row", "stride_col", "stride_row_d", "stride_col_d")
        or (name in ("stride_value", "stride_column", "stride_moment") and (tile.dot or name != "stride_moment"))
    }  # fmt: skip
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.pairs.warps, "num_stages": tile.pairs.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, precision, d, k = argument.split(":")
        if name in ("mean", "own"):
            kernel, tile = mean_kernel, value_tile(Precision(precision), int(d), int(k))
        else:
            kernel, tile = moment_kernel, moment_tile(int(d))
        compiled = compile_variant(
            kernel, Precision(precision), int(d), int(k), tile, own=name == "own", moving=name != "still"
        )
        found = {"variant": argument, "shared_bytes": compiled.metadata.shared, **inspect(compiled.asm["cubin"])}
        print(json.dumps(found), flush=True)

"""Compile the kernels of block-sparse passes for sm_90 and print one JSON line each: resources and SASS.

Arguments d:tile:kind, kind "partial", "sums", "maximum", "values", each also with "-far".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import triton
from compile_sweeps import TOOLS, inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.sweep.frame_kernel import frame_kernel
from solvers.flash_sinkhorn2.sweep.kernels import combine_kernel, sweep_kernel
from solvers.flash_sinkhorn2.sweep.triton_sweep import LARGEST_VALUES, launch_options

INTEGERS = {"n", "tiles", "n_rows", "n_cols", "row_tiles", "col_tiles", "pairs_per_item", "n_items"}
DOUBLES = {"centre", "potential", "log2_weight", "offset", "shifted", "frame", "scale", "out"}
DOUBLES |= {f"{side}_{name}" for side in ("row", "col") for name in ("potential", "frame")}
POINTERS = {"lists": "*i32", "starts": "*i64", "item_starts": "*i64", "item_tiles": "*i64"}
POINTERS |= dict.fromkeys(DOUBLES, "*fp64")  # all others: *fp32


def compiled(kernel, constants, options):
    signature = {}
    for name in kernel.arg_names:
        kind = "i32" if name in INTEGERS or name.startswith("stride") else POINTERS.get(name, "*fp32")
        signature[name] = "constexpr" if name in constants else kind
    aligned = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compiled_sweep(d: int, tile: int, kind: str):
    far = kind.endswith("-far")
    kind = kind.removesuffix("-far")
    values = LARGEST_VALUES if kind == "values" else 0
    constants = {
        "D": d, "T": tile, "VALUES": values, "PARTIAL": kind == "partial", "MAXIMUM": kind == "maximum",
        "FACTOR": not far and kind != "maximum", "FAR": far,
    }  # fmt: skip
    return compiled(sweep_kernel, constants, launch_options(d, tile, values=values, far=far))


def inner_loop(cubin: bytes) -> list[str]:
    """Instructions of the loop with the fewest per exponential: over a chunk's tile pairs, rests as factors."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    labels: dict[str, int] = {}
    code: list[str] = []
    found: list[list[str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", code[-1])
            if branch and branch[1] in labels:
                body = code[labels[branch[1]] :]
                if exponentials(body):
                    found.append(body)
    return min(found, key=lambda body: len(body) / exponentials(body), default=[])


def exponentials(code: list[str]) -> int:
    return sum("MUFU.EX2" in instruction for instruction in code)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if ":" not in argument:
            frames = {"TILES": 8, "T": 32, "D": int(argument), "SHIFT": True}
            sums = {"T": 32, "VALUES": 0, "MAXIMUM": False, "ANCHORED": True}
            for kernel, constants in ((frame_kernel, frames), (combine_kernel, sums)):
                found = inspect(compiled(kernel, constants, {"num_warps": 4}).asm["cubin"])
                print(json.dumps({"variant": f"{kernel.__name__}:{argument}", **found}), flush=True)
            continue
        d, tile, kind = argument.split(":")
        cubin = compiled_sweep(int(d), int(tile), kind).asm["cubin"]
        loop = inner_loop(cubin)
        found = {
            "variant": argument,
            **inspect(cubin),
            "loop": len(loop),
            "loop_ex2": exponentials(loop),
            "loop_float64": sum(name.startswith(("DFMA", "DADD", "DMUL")) for name in loop),
        }
        print(json.dumps(found), flush=True)

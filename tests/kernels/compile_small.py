"""Compile the kernels that touch every point once for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn.inputs.triton_survey import COORDINATES, ROWS, survey_kernel
from solvers.flash_sinkhorn.iteration.mixing import MEMORY
from solvers.flash_sinkhorn.iteration.triton_mixing import POINTS, mix_kernel, record_kernel
from solvers.flash_sinkhorn.sweeps.cloud_kernels import prepare_kernel, rescale_kernel
from solvers.flash_sinkhorn.sweeps.sweep_kernels import settle_kernel

INTEGERS = {"n", "m", "n_padded", "n_splits", "blocks_x", "stride_point", "stride_stored"}
INTEGERS |= {"x_stride", "y_stride", "x_stride_problem", "y_stride_problem"}
FLOATS = {"scale", "scale_rest", "step", "ratio", "relaxation", "undamped", "inverse_unit"}
FLOATS |= {"x_eps_over_rho", "y_eps_over_rho"}
POINTERS = {"arrivals": "*i32"} | dict.fromkeys(("points", "coarse_bias", "row_bias", "col_bias"), "*fp32")
POINTERS |= dict.fromkeys(("partial_log2_sums", "x", "y"), "*fp32")
POINTERS |= dict.fromkeys(("hi", "lo"), "*fp16")  # all others: *fp64

VARIANTS = [
    (survey_kernel, {"x_stride_coordinate": 1, "y_stride_coordinate": 1, "D": 3, "BM": ROWS, "BD": 4}),
    (survey_kernel, {"x_stride_coordinate": 1, "y_stride_coordinate": 1, "D": 1000, "BM": ROWS, "BD": COORDINATES}),
    (prepare_kernel, {"stride_coordinate": 1, "stride_stored_coordinate": 1, "D": 60, "D_STORED": 64, "BM": 32,
                      "BD": 64, "SPLIT": True, "WHOLE": True, "DIRECT": False, "PACKED": False, "BATCHED": False}),
    (prepare_kernel, {"stride_coordinate": 1, "stride_stored_coordinate": 1, "D": 3, "D_STORED": 16, "BM": 32,
                      "BD": 16, "SPLIT": True, "WHOLE": False, "DIRECT": False, "PACKED": True, "BATCHED": False}),
    (rescale_kernel, {"ROWS": 256, "BATCHED": False}),
    (settle_kernel, {"BM": 8, "BATCHED": False}),
    (settle_kernel, {"BM": 128, "BATCHED": False}),
    (record_kernel, {"POINTS": POINTS, "MEMORY": MEMORY, "FREE_CONSTANT": True, "BATCHED": False}),
    (mix_kernel, {"POINTS": POINTS, "MEMORY": MEMORY, "BATCHED": False}),
]  # fmt: skip


def compiled(kernel, constants):
    signature = {}
    for name in kernel.arg_names:
        kind = "i32" if name in INTEGERS else "fp32" if name in FLOATS else POINTERS.get(name, "*fp64")
        signature[name] = "constexpr" if name in constants else kind
    aligned = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    for kernel, constants in VARIANTS:
        print(json.dumps({"kernel": kernel.__name__, **inspect(compiled(kernel, constants).asm["cubin"])}))

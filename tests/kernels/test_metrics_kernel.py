"""The all-pairs scoring kernel: against plain float64 under the interpreter, and compiled for sm_90 without a GPU.

Both run in processes of their own, because TRITON_INTERPRET is read when triton is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

INTERPRET = r"""
import json
import numpy as np, torch
from fsbench import metrics_kernel as mk

mk.BLOCK_ROWS, mk.BLOCK_COLUMNS, mk.COLUMNS_A_PROGRAM = 16, 8, 64  # many even at interpreter sizes
errors = {}
for n, m, d, dtype, eps, offset in [
    (1, 1, 1, "f8", 0.5, 0.0), (63, 101, 1, "f4", 0.1, 0.0), (65, 33, 3, "f4", 0.05, 1e4),
    (31, 70, 5, "f8", 1e-4, 0.0), (37, 67, 64, "f4", 0.5, 0.0),
]:
    rng = np.random.default_rng(n)
    x, y = (rng.normal(size=(k, d)).astype(dtype) + np.asarray(offset, dtype) for k in (n, m))
    a, b = (rng.dirichlet(np.ones(k)) for k in (n, m))
    cost = ((x.astype("f8")[:, None] - y.astype("f8")[None]) ** 2).sum(-1)
    f = cost.mean(1) / 2 + 0.1 * eps * rng.normal(size=n)
    f -= (f[:, None] - cost / 2).max() if eps < 1e-3 else 0.0  # exponents up to a few hundred, down to -inf
    g = (cost - f[:, None]).min(0) + 0.1 * eps * rng.normal(size=m)
    plan = np.exp((f[:, None] + g[None] - cost) / eps)
    row, col = mk.plan_sums(*(torch.from_numpy(v) for v in (x, y, f / eps, g / eps, a, b)), 1 / eps)
    for name, got, want in (("row", row.numpy(), plan @ b), ("col", col.numpy(), a @ plan)):
        errors[f"{name} {n} {m} {d} {dtype}"] = float(np.abs(got - want).max() / want.max())
print(json.dumps(errors))
"""

ZEROS = r"""
import json
import numpy as np, torch, triton.language as tl
from fsbench import metrics_kernel as mk

mk.BLOCK_ROWS, mk.BLOCK_COLUMNS, mk.COLUMNS_A_PROGRAM = 16, 8, 32
found = {}
share_that_counts = mk._share_that_counts
for d in (1, 2, 3, 8):
    rng = np.random.default_rng(d)
    x, y = (rng.uniform(size=(k, d)) for k in (100, 90))
    eps, a, b = 2e-5, np.full(100, 0.01), np.full(90, 1 / 90)
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    f = cost.min(1) - 500 * eps * rng.uniform(size=100) ** 8  # boxes have potentials that differ, too
    g = (cost - f[:, None]).min(0)
    exponents = (f[:, None] + g[None] - cost) / eps
    arrays = [torch.from_numpy(v) for v in (x, y, f / eps, g / eps, a, b)]
    plan = np.exp(exponents)
    both = []
    for share in (0.0, 1.0):  # looking at boxes, and not
        mk._share_that_counts = lambda *of: share
        row, col = (v.numpy() for v in mk.plan_sums(*arrays, 1 / eps))
        both.append(max(float(np.abs(row - plan @ b).max() / (plan @ b).max()),
                        float(np.abs(col - a @ plan).max() / (a @ plan).max())))
    mk._share_that_counts = share_that_counts
    order_x, order_y = (v.numpy() for v in mk._orders(arrays[0], arrays[1]))
    rows = mk._boxes(torch.from_numpy(x[order_x].T.copy()), torch.from_numpy(f[order_x] / eps), 16).numpy()
    cols = mk._boxes(torch.from_numpy(y[order_y].T.copy()), torch.from_numpy(g[order_y] / eps), 8).numpy()
    k = min(d, 6)
    gap = np.maximum(cols[:k, None] - rows[k:-1, :, None], rows[:k, :, None] - cols[k:-1, None]).clip(min=0)
    bound = rows[-1][:, None] + cols[-1][None] - (gap**2).sum(0) / eps
    largest = np.array([[exponents[np.ix_(order_x[i : i + 16], order_y[j : j + 8])].max() for j in range(0, 90, 8)]
                        for i in range(0, 100, 16)])
    counts = float((bound >= mk.ZERO.value).mean())
    mk.SAMPLED = rows.shape[1]
    found[d] = {"errors": both, "bounded": bool((largest <= bound + 1e-9 * np.abs(bound)).all()), "counts": counts,
                "sampled": mk._share_that_counts(torch.from_numpy(rows), torch.from_numpy(cols), 1 / eps),
                "sorted": sorted(order_x) == list(range(100))}
mk._share_that_counts = lambda *of: 0.0
mk.ZERO = tl.constexpr(float("inf"))  # as if everything were zero
row, col = mk.plan_sums(*arrays, 1 / eps)
found["all"] = float(row.abs().max() + col.abs().max())
print(json.dumps(found))
"""

COMPILE = r"""
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fsbench import metrics_kernel as mk

d = int(sys.argv[1])
names = ("x", "y", "f", "g", "a", "b", "row", "col", "row_boxes", "col_boxes", "chunk_boxes")
pointers = {p + "_ptr": "*fp64" for p in names}
sizes = dict.fromkeys(("n", "m", "n_row_boxes", "n_col_boxes", "n_chunks"), "i32")
signature = {**pointers, **sizes, "cost_over_eps": "*fp64",
             **dict.fromkeys(("D", "BM", "BN", "CHUNK", "SKIPS"), "constexpr")}
constants = {"D": d, "BM": mk.BLOCK_ROWS, "BN": mk.BLOCK_COLUMNS, "CHUNK": mk.COLUMNS_A_PROGRAM,
             "SKIPS": sys.argv[2] == "skips"}
aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(pointers))}
source = ASTSource(fn=mk.plan_sums_fwd_kernel, signature=signature, constexprs=constants, attrs=aligned)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": mk.NUM_WARPS})
sys.stdout.buffer.write(kernel.asm["cubin"])
"""

MILLION = r"""
import json, sys, time
import numpy as np
from fsbench.metrics import score
from fsbench.problems.gaussian import gaussian

device, large = sys.argv[1], int(sys.argv[2])
small = gaussian(n=1003, m=2049, d=5, eps=0.0, seed=0)
f, g = np.full(1003, 5.0), np.linspace(-1, 1, 2049)
on_host, on_device = score(small, f, g, eps=0.5), score(small, f, g, eps=0.5, device=device)
errors = {k: abs(getattr(on_device, k) / v - 1) for k, v in vars(on_host).items()}
big = gaussian(n=large, m=large, d=3, eps=0.0, seed=0)
times, scored = [], {}
for eps, potential in [(0.5, 1.0), (0.5, 1.0), (1e-3, 0.0), (1e-3, 0.0)]:  # the first one of each compiles
    begin = time.perf_counter()
    scored[eps] = score(big, *np.full((2, large), potential), eps=eps, device=device)
    times.append(time.perf_counter() - begin)
few = gaussian(n=20_000, m=20_000, d=3, eps=0.0, seed=0), *np.zeros((2, 20_000))
small_eps = score(*few, eps=1e-3, device=device).mass / score(*few, eps=1e-3).mass - 1
print(json.dumps({"errors": errors, "seconds": times, "mass": scored[0.5].mass, "small_eps": abs(small_eps)}))
"""


def _python(code: str, *args: str, interpret: bool) -> bytes:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | (
        {"TRITON_INTERPRET": "1"} if interpret else {}
    )
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_kernel_agrees_with_plain_float64() -> None:
    errors = json.loads(_python(INTERPRET, interpret=True))
    assert len(errors) == 10
    # Exponents reach 1e5 at eps = 1e-4, and 1e5 * 2^-52 is 2e-11 of relative error in the exponential.
    assert {k: e for k, e in errors.items() if not e < 1e-10} == {}


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton's interpreter breaks on numpy 2.4 and later"
)
def test_only_pairs_whose_exponential_is_zero_are_left_out() -> None:
    found = json.loads(_python(ZEROS, interpret=True))
    assert found.pop("all") == 0.0
    for d, of_d in found.items():
        assert of_d["bounded"] and of_d["sorted"] and max(of_d["errors"]) < 1e-10, (d, of_d)
        assert of_d["counts"] < 1.0 or int(d) > 3, (d, of_d)
        assert of_d["sampled"] == of_d["counts"], (d, of_d)


@pytest.mark.parametrize("d", [3, 64])
@pytest.mark.parametrize("skips", ["skips", "all"])
def test_kernel_compiles_for_sm_90_without_spills(d: int, skips: str, tmp_path: Path) -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(_python(COMPILE, str(d), skips, interpret=False))
    used = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0
    assert usage["REG"] <= 128  # four programs of four warps fit a multiprocessor
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(r"\b(RED|ATOMG?)\S*\.F64", code)  # one hardware atomic, no compare-and-swap loop
    assert not re.search(r"\b(RED|ATOMG?)\S*\.CAS", code)


@pytest.mark.gpu
def test_a_million_points_a_side_in_five_seconds() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    got = json.loads(_python(MILLION, "cuda", "1000000", interpret=False))
    assert {k: e for k, e in got["errors"].items() if not e < 1e-10} == {}
    # x - y ~ N(0, 2 I_3), so the mean of exp((2 - |x - y|^2) / eps) is e^4 (1 + 4 / eps)^(-3 / 2) at eps = 0.5.
    assert got["mass"] == pytest.approx(2.022, rel=0.02)
    assert got["small_eps"] < 1e-10
    assert got["seconds"][1] < 5
    assert got["seconds"][3] < got["seconds"][1] / 2  # most pairs are of blocks between which all is zero

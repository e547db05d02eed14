"""Run under TRITON_INTERPRET=1: powers of two by polynomial, and a tile's sums, against float64: one JSON line."""

from __future__ import annotations

import json
import math

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from solvers.flash_sinkhorn.sweeps.exponentials import LANES, add_powers, power_by_polynomial

ROWS, COLS = 32, 128


@triton.jit
def powers_kernel(t, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, power_by_polynomial(tl.load(t + index)))


@triton.jit
def sums_kernel(t, out, R: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr):
    row, column, lane = tl.arange(0, R), tl.arange(0, C), tl.arange(0, LANES)
    tile = tl.load(t + row[:, None] * C + column[None, :])
    sums = add_powers(tl.full([R, LANES], 1.0, tl.float32), tile, SHARED)
    tl.store(out + row[:, None] * LANES + lane[None, :], sums)


def powers(t):
    found = torch.empty_like(t)
    powers_kernel[(1,)](t, found, len(t))
    return found.double()


def main():
    t = torch.linspace(-125, 126.9, 1 << 15)
    low = torch.tensor([-125.0, -126.0, -1e4, -math.inf])
    tile = 30 * torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) - 20
    tile[:, 5] = -math.inf
    expected = tile.double().exp2().sum(1) + LANES.value
    errors = {}
    for shared in (False, True):
        sums = torch.empty(ROWS, LANES.value)
        sums_kernel[(1,)](tile, sums, ROWS, COLS, shared)
        errors[str(shared)] = (sums.double().sum(1) / expected - 1).abs().max().item()
    whole = pad(torch.arange(-125.0, 127.0), (0, 4))
    found = {
        "power": (powers(t) / t.double().exp2() - 1).abs().max().item(),
        "whole_exact": torch.equal(powers(whole), whole.double().exp2()),
        "low": powers(low).unique().tolist(),
        "sums": errors,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Triton kernel over the partial sums of a pass, a point against a tile: one program a row tile and its list."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upward(value):
    """The least float32 that is not below float64 `value`, positive or zero."""
    nearest = value.to(tl.float32)
    bits = nearest.to(tl.int32, bitcast=True) + (nearest.to(tl.float64) < value).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reduce_kernel(partial, starts, factor, out, T: tl.constexpr, AT_ONCE: tl.constexpr, MAXIMUM: tl.constexpr):
    """out [K]: of each tile pair, sum over its rows of factor_i s_iJ, float64, or their maximum, float32, rounded up;
    partial [K, T], factor [N] float64, of which zeros count for nothing whatever the partial sum."""
    tile = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, T)
    b_factor = tl.load(factor + tile * T + place)[None, :]
    last = tl.load(starts + tile + 1)
    for start in range(tl.load(starts + tile), last, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        s = tl.load(partial + pair[:, None] * T + place[None, :], (pair < last)[:, None], other=0.0)
        weighted = tl.where(b_factor > 0, s.to(tl.float64) * b_factor, 0.0)
        found = upward(tl.max(weighted, 1)) if MAXIMUM else tl.sum(weighted, 1)
        tl.store(out + pair, found, pair < last)

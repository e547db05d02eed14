"""Sums of a tile's 2^t on a GPU, where scores are cheap an eighth of the powers by polynomial.

A multiprocessor of an H200 takes 16 exponentials a clock and 128 multiply-adds. In low d the former are what a sweep
waits for, and a share of them costs less on the units of the latter, where about nine instructions make one. Idea:
FlashAttention-4's softmax; the polynomial is a minimax fit, off by 1.6e-7 of its value in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_SHARED = tl.constexpr(16)  # dimensions as stored; beyond, products keep a multiprocessor busy
LEAST = tl.constexpr(-125.0)  # below, 2^t leaves the normal numbers of float32: taken for 2^-125, for -inf too
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # added to a float32 it leaves the nearest whole number in the low bits
LANES = tl.constexpr(8)  # neighbouring columns; groups of so many are in a thread's own registers


@triton.jit
def power_by_polynomial(t):
    """2^t of float32 t below 127: 2^(t - i) of the nearest whole number i, with i added to the exponent's bits.

    Of nan either nan or 3e38: no sum hides it.
    """
    t = tl.maximum(t, LEAST, propagate_nan=tl.PropagateNan.ALL)
    whole = t + TO_WHOLE
    rest = t - (whole - TO_WHOLE)  # within [-1/2, 1/2]
    p = 0.0013274633 * rest + 0.009671962
    p = p * rest + 0.055506784
    p = p * rest + 0.24022235
    p = p * rest + 0.69314706
    p = p * rest + 1.0
    bits = p.to(tl.int32, bitcast=True) + (whole.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _halved(t):
    """Every second group of columns of t [R, C], and the others."""
    R: tl.constexpr = t.shape[0]
    C: tl.constexpr = t.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(t, [R, C // (2 * LANES), 2, LANES]), (0, 1, 3, 2)))
    return tl.reshape(first, [R, C // 2]), tl.reshape(second, [R, C // 2])


@triton.jit
def _over_groups(p):
    """[R, LANES] sums of p [R, C]."""
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // LANES, LANES]), 1)


@triton.jit
def add_powers(sums, t, SHARED: tl.constexpr):
    """sums [R, LANES] and those of 2^t over the columns of t [R, C]: C is 64 or more."""
    if SHARED:
        half, others = _halved(t)
        p = _over_groups(tl.exp2(others))
        quarter, others = _halved(half)
        p += _over_groups(tl.exp2(others))
        eighth, others = _halved(quarter)
        p += _over_groups(power_by_polynomial(eighth) + tl.exp2(others))
    else:
        p = _over_groups(tl.exp2(t))
    return sums + p

"""Triton kernels over one cloud: store it as operands of sweeps, and derive biases from potentials.

Biases and scores are large and cancel, and tensor cores truncate what they add up to 24 bits. So where points are pairs
hi + lo a bias is a coarse part, a multiple of a power of two that float32 adds up exactly, and a small rest. Elsewhere
coarse parts are zero.

Integers that vary with n are not specialised, so that a new n compiles nothing.

BATCHED: arrays have the problems of a batch as their first axis, and so has the grid as its last.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_COORDINATE = tl.constexpr(32768.0)  # in units of the stored clouds
MOVE, OFFSET, RESIDUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # a cloud's statistics


@triton.jit(do_not_specialize=["n"])
def prepare_kernel(
    points, stride_point, stride_coordinate, centre, raw_weight, hi, lo, potential, half_square, weight, log2_weight,
    n, stride_stored, stride_stored_coordinate, inverse_unit,
    D: tl.constexpr, D_STORED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, DIRECT: tl.constexpr, PACKED: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """Store BM centred points as operands, with the half squares of what was stored, weights, and potentials of zero.

    Rows from n on repeat the last point with weight zero; coordinates from D on are zero. SPLIT: a coordinate is a pair
    h + l. WHOLE: h is a whole number. PACKED: hi is (h, h, l, l) and lo is (h, l, h, l), as far as D_STORED reaches, so
    that one product of hi and lo is that of two pairs but for l.l, or part of it, which is below float32's resolution.
    """
    if BATCHED:
        problem = tl.program_id(2).to(tl.int64)
        given, stored_rows = problem * n, problem * tl.num_programs(0) * BM
        points += given * D
        raw_weight += given
        centre += problem * D
        hi += stored_rows * D_STORED
        lo += stored_rows * D_STORED
        potential += stored_rows
        half_square += stored_rows
        weight += stored_rows
        log2_weight += stored_rows
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    source = tl.minimum(row, n - 1).to(tl.int64)
    square = tl.zeros([BM], tl.float64)
    for start in range(0, D_STORED, BD):
        dim = start + tl.arange(0, BD)
        coordinate = dim % D if PACKED else dim
        part = dim // D
        inside = part < (4 if PACKED else 1)
        address = points + source[:, None] * stride_point + coordinate[None, :] * stride_coordinate
        value = tl.load(address, inside[None, :], other=0.0).to(tl.float64)
        value -= tl.load(centre + coordinate, inside, other=0.0)[None, :]
        value = tl.where(inside[None, :], value * inverse_unit, 0.0)
        if not DIRECT:  # only points without weight are that far out: keep them finite
            value = tl.minimum(tl.maximum(value, -LARGEST_COORDINATE), LARGEST_COORDINATE)
        target = row.to(tl.int64)[:, None] * stride_stored + dim[None, :] * stride_stored_coordinate
        stored_mask = (dim < D_STORED)[None, :]
        b_hi = (tl.floor(value + 0.5) if WHOLE else value).to(tl.float32).to(hi.dtype.element_ty)
        stored = b_hi.to(tl.float64)
        if SPLIT:
            b_lo = (value - stored).to(tl.float32).to(lo.dtype.element_ty)
            stored += b_lo.to(tl.float64)
            as_col = tl.where((part % 2 == 0)[None, :], b_hi, b_lo) if PACKED else b_lo
            tl.store(lo + target, as_col, stored_mask)
            b_hi = tl.where((part < 2)[None, :], b_hi, b_lo) if PACKED else b_hi
        tl.store(hi + target, b_hi, stored_mask)
        if not DIRECT:
            square += tl.sum(tl.where((part == 0)[None, :], stored * stored, 0.0), 1)
    b_weight = tl.load(raw_weight + row, row < n, other=0.0)
    tl.store(potential + row, tl.zeros([BM], tl.float64))
    tl.store(half_square + row, 0.5 * square)
    tl.store(weight + row, b_weight)
    tl.store(log2_weight + row, tl.where(b_weight > 0, tl.log2(tl.where(b_weight > 0, b_weight, 1.0)), float("-inf")))


@triton.jit
def scaled(value, scale, scale_rest):
    """value, float64, times the scale to that precision."""
    return value * scale + value * scale_rest


@triton.jit
def store_biases(coarse_bias, row_bias, col_bias, row, bias, b_log2_weight, scale, scale_rest, step, mask=None):
    """Split biases, float64 exponents, into multiples of `step`, in units of the scores, and rests; columns' rests have
    the weights."""
    coarse = tl.where(step > 0, tl.floor(bias / (scale * step) + 0.5) * step, 0.0).to(tl.float32)
    rest = bias - scaled(coarse.to(tl.float64), scale, scale_rest)
    tl.store(coarse_bias + row, coarse, mask)
    tl.store(row_bias + row, rest.to(tl.float32), mask)
    tl.store(col_bias + row, (rest + b_log2_weight).to(tl.float32), mask)


@triton.jit
def rescale_kernel(
    potential, half_square, log2_weight, coarse_bias, row_bias, col_bias, statistics, ratio, scale, scale_rest, step,
    ROWS: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """potential *= ratio (a new epsilon), and the biases that follow from it and the new score scale.

    Nothing is known then of the next sums: move and offset are infinite.
    """
    if BATCHED:
        problem = tl.program_id(2).to(tl.int64)
        own = problem * tl.num_programs(0) * ROWS
        potential += own
        half_square += own
        log2_weight += own
        coarse_bias += own
        row_bias += own
        col_bias += own
        statistics += problem * 3
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_potential = tl.load(potential + row) * ratio
    bias = b_potential - scaled(tl.load(half_square + row), scale, scale_rest)
    tl.store(potential + row, b_potential)
    store_biases(coarse_bias, row_bias, col_bias, row, bias, tl.load(log2_weight + row), scale, scale_rest, step)
    if tl.program_id(0) == 0:
        tl.store(statistics + MOVE, float("inf"))
        tl.store(statistics + OFFSET, float("inf"))

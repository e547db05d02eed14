"""Triton kernels: log2 of the row sums of P / a, streamed over column tiles, and the potential update that follows.

Exponents are base 2. For row i and column j

    t_ij = row_bias_i + col_bias_j + score_ij,       score_ij = scale * q_i.k_j      (dot products)
                                                     score_ij = scale * |q_i - k_j|^2 (direct differences, low d)

and a sweep yields L_i = log2 sum_j 2^t_ij. With both potentials in the exponent, sums stay near one, so the plain
sweep keeps no running maximum; blocks whose sums leave [2^-60, 2^60] are swept again with one, in `settle`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_LOG2_SUM = tl.constexpr(60.0)


@triton.jit
def _load_points(points, index, stride_point, stride_coordinate, d_start, D: tl.constexpr, BD: tl.constexpr):
    """[B, BD] coordinates d_start.. of the points at `index` [B]; arrays are padded, so nothing is masked but d."""
    dims = d_start + tl.arange(0, BD)
    offsets = index.to(tl.int64)[:, None] * stride_point + dims[None, :] * stride_coordinate
    if D % BD == 0:
        block = tl.load(points + offsets)
    else:
        block = tl.load(points + offsets, mask=(dims < D)[None, :], other=0.0)
    return block


@triton.jit
def _dot(q_hi, q_lo, k_hi, k_lo, acc, SPLIT: tl.constexpr):
    """acc + q.k^T; with SPLIT the operands are fp16 pairs hi + lo and lo.lo is below float32's resolution."""
    if SPLIT:
        acc = tl.dot(q_lo, tl.trans(k_hi), acc)
        acc = tl.dot(q_hi, tl.trans(k_lo), acc)
    return tl.dot(q_hi, tl.trans(k_hi), acc)


@triton.jit
def _score_tile(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_index, col_index, q_hi, q_lo, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores [BM, BN]. Where one block of BD coordinates holds all of d, the row block q stays on chip."""
    acc = tl.zeros([BM, BN], tl.float32)
    if DIRECT:
        for k in tl.static_range(D):
            q = tl.load(rows_hi + k * stride_row_d + row_index.to(tl.int64) * stride_row)
            c = tl.load(cols_hi + k * stride_col_d + col_index.to(tl.int64) * stride_col)
            delta = q[:, None] - c[None, :]
            acc += delta * delta
    elif D <= BD:
        k_hi = _load_points(cols_hi, col_index, stride_col, stride_col_d, 0, D, BD)
        k_lo = _load_points(cols_lo, col_index, stride_col, stride_col_d, 0, D, BD) if SPLIT else k_hi
        acc = _dot(q_hi, q_lo, k_hi, k_lo, acc, SPLIT)
    else:
        for d_start in tl.range(0, D, BD, num_stages=STAGES):
            b_hi = _load_points(rows_hi, row_index, stride_row, stride_row_d, d_start, D, BD)
            k_hi = _load_points(cols_hi, col_index, stride_col, stride_col_d, d_start, D, BD)
            if SPLIT:
                b_lo = _load_points(rows_lo, row_index, stride_row, stride_row_d, d_start, D, BD)
                k_lo = _load_points(cols_lo, col_index, stride_col, stride_col_d, d_start, D, BD)
            else:
                b_lo = b_hi
                k_lo = k_hi
            acc = _dot(b_hi, b_lo, k_hi, k_lo, acc, SPLIT)
    return acc * scale


@triton.jit
def _row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D: tl.constexpr, BD: tl.constexpr,
               DIRECT: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """The row block as (hi, lo) when it can stay on chip for the whole sweep; placeholders otherwise."""
    if DIRECT or D > BD:
        hi = row_index
        lo = row_index
    else:
        hi = _load_points(rows_hi, row_index, stride_row, stride_row_d, 0, D, BD)
        lo = _load_points(rows_lo, row_index, stride_row, stride_row_d, 0, D, BD) if SPLIT else hi
    return hi, lo


@triton.jit
def _log2_sums_with_maximum(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d, col_bias,
    row_index, first_tile, last_tile, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """log2 sum_j 2^(col_bias_j + score_ij) over the given column tiles, with a running maximum: never overflows."""
    q_hi, q_lo = _row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, SPLIT)
    maximum = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES if D <= BD else 1):
        col_index = tile * BN + tl.arange(0, BN)
        score = _score_tile(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
            row_index, col_index, q_hi, q_lo, scale, D, BM, BN, BD, DIRECT, SPLIT, STAGES,
        )  # fmt: skip
        t = score + tl.load(col_bias + col_index)[None, :]
        new_maximum = tl.maximum(maximum, tl.max(t, 1))
        anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a tile of zero weights so far
        total = total * tl.exp2(maximum - anchor) + tl.sum(tl.exp2(t - anchor[:, None]), 1)
        maximum = new_maximum
    return maximum + tl.log2(total)


@triton.jit
def sweep_kernel(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_bias, col_bias, scale_ptr, partial_log2_sums, n_padded, n_tiles, tiles_per_split,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, SPLIT: tl.constexpr, SAFE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, s): partial_log2_sums[s, rows of block i] over column tiles [s, s + 1) * tiles_per_split."""
    row_index = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, n_tiles)
    scale = tl.load(scale_ptr)
    b_row = tl.load(row_bias + row_index)  # [BM]
    if SAFE:
        log2_sums = b_row + _log2_sums_with_maximum(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d, col_bias,
            row_index, first_tile, last_tile, scale, D, BM, BN, BD, DIRECT, SPLIT, STAGES,
        )  # fmt: skip
    else:
        q_hi, q_lo = _row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, SPLIT)
        WIDTH: tl.constexpr = BN if DIRECT else 1  # direct tiles spread a row over many lanes: reduce once, at the end
        total = tl.zeros([BM, WIDTH], tl.float32)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES if D <= BD else 1):
            col_index = tile * BN + tl.arange(0, BN)
            score = _score_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, scale, D, BM, BN, BD, DIRECT, SPLIT, STAGES,
            )  # fmt: skip
            p = tl.exp2(score + (b_row[:, None] + tl.load(col_bias + col_index)[None, :]))
            total += p if DIRECT else tl.sum(p, 1, keep_dims=True)
        log2_sums = tl.log2(tl.sum(total, 1))
    tl.store(partial_log2_sums + split.to(tl.int64) * n_padded + row_index, log2_sums)


@triton.jit
def settle_kernel(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_bias, col_bias_opposite, scale_ptr, partial_log2_sums, n_padded, n_splits, n_tiles,
    potential, half_square, weight, log2_weight, log2_sum, next_col_bias, block_residual, relaxation,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Combine the splits of BM rows, redo the block if its sums left the safe range, and move the potential.

    potential, half_square, weight, log2_weight: float64 [n_padded]; row_bias, col_bias, log2_sum: float32 [n_padded];
    block_residual: float64, one number a program: sum_i weight_i |P1_i / weight_i - 1| before this update.
    """
    row_index = tl.program_id(0) * BM + tl.arange(0, BM)
    scale = tl.load(scale_ptr)
    b_row = tl.load(row_bias + row_index)

    maximum = tl.full([BM], float("-inf"), tl.float32)
    source = partial_log2_sums + row_index
    for _ in range(n_splits):
        maximum = tl.maximum(maximum, tl.load(source))
        source += n_padded
    anchor = tl.where(tl.abs(maximum) < float("inf"), maximum, 0.0)
    total = tl.zeros([BM], tl.float32)
    source = partial_log2_sums + row_index
    for _ in range(n_splits):
        total += tl.exp2(tl.load(source) - anchor)
        source += n_padded
    b_log2_sum = anchor + tl.log2(total)

    in_range = tl.abs(b_log2_sum) < LARGEST_LOG2_SUM  # false for nan
    if tl.min(in_range.to(tl.int32), 0) == 0:
        b_log2_sum = b_row + _log2_sums_with_maximum(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d, col_bias_opposite,
            row_index, 0, n_tiles, scale, D, BM, BN, BD, DIRECT, SPLIT, STAGES,
        )  # fmt: skip

    # row_bias is the rounded potential that the sweep really used: starting from it keeps the update exact.
    square = tl.load(half_square + row_index) * scale.to(tl.float64)
    used = b_row.to(tl.float64) + square
    moved = used - relaxation * b_log2_sum.to(tl.float64)
    b_weight = tl.load(weight + row_index)
    deviation = tl.where(b_weight > 0, tl.abs(tl.exp2(b_log2_sum) - 1.0), 0.0)
    tl.store(block_residual + tl.program_id(0), tl.sum(b_weight * deviation.to(tl.float64), 0))
    tl.store(potential + row_index, moved)
    tl.store(log2_sum + row_index, b_log2_sum)
    bias = moved - square
    tl.store(row_bias + row_index, bias.to(tl.float32))
    tl.store(next_col_bias + row_index, (bias + tl.load(log2_weight + row_index)).to(tl.float32))

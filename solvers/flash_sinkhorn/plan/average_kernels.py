"""Triton kernels: means of values over the rows of a plan, and the moments that its derivative needs.

Exponents t_ij are those of sweep_kernels.py. A program accumulates p_ij = 2^(t_ij - anchor_i) and p_ij times values
over its columns; ratios of the two are means whatever the anchor. Rows whose sums are known have them in their bias, so
that p_ij <= 1 and the anchor is zero; otherwise the anchor follows the running maximum.

Values meet p either in float32 products and sums, for a few columns, or on tensor cores: then p, times 2^HEADROOM, and
the values are fp16 pairs hi + lo (22 bits) or their hi parts alone. p <= 1 is what makes fp16's range enough: terms
below 2^-36 of a row are lost to one part in 2^36.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sweeps.scores import load_points, row_block, score_tile

HEADROOM = tl.constexpr(12.0)
LARGEST_ROUNDING = tl.constexpr(3.0)  # of an exponent: 2^(HEADROOM + 3) is still in fp16's range
LARGEST_LOG2_VALUE = tl.constexpr(14.0)  # stored columns of values are scaled to at most 2^14


@triton.jit(do_not_specialize=["n", "k", "k_stored", "stride_value", "stride_column", "stride_stored"])
def store_values_kernel(
    values, stride_value, stride_column, largest, hi, lo, column_scale, n, k, k_stored, stride_stored,
    stride_stored_column, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store BM rows of values [n, k] as operands; rows from n on and columns from k on are zero.

    SCALED: each column divided by a power of two, kept in column_scale, such that fp16 holds it well; largest: [k]
    largest absolute values.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (row < n)[:, None] & (column < k)[None, :]
    source = row.to(tl.int64)[:, None] * stride_value + column[None, :] * stride_column
    value = tl.load(values + source, inside, other=0.0).to(tl.float64)
    if SCALED:
        b_largest = tl.load(largest + column, column < k, other=0.0).to(tl.float32)
        exponent = tl.ceil(tl.log2(tl.where(b_largest > 0, b_largest, 1.0))) - LARGEST_LOG2_VALUE
        exponent = tl.minimum(tl.maximum(exponent, -120.0), 120.0)
        value = value * tl.exp2(-exponent)[None, :]
        if tl.program_id(0) == 0:
            tl.store(column_scale + column, tl.exp2(exponent), column < k)
    target = row.to(tl.int64)[:, None] * stride_stored + column[None, :] * stride_stored_column
    stored = (column < k_stored)[None, :]
    b_hi = value.to(tl.float32).to(hi.dtype.element_ty)
    tl.store(hi + target, b_hi, stored)
    if SPLIT:
        tl.store(lo + target, (value - b_hi.to(tl.float64)).to(tl.float32).to(lo.dtype.element_ty), stored)


@triton.jit
def _add_column(acc, q, values_hi, stride_column, first_column, col_index, k: tl.constexpr, BK: tl.constexpr,
                DIRECT: tl.constexpr):  # fmt: skip
    """acc [BM, BN or 1] + q values_k, in float32; unchanged from BK on."""
    if k < BK:
        value = tl.load(values_hi + (first_column + k).to(tl.int64) * stride_column + col_index)
        products = q * value[None, :]
        acc += products if DIRECT else tl.sum(products, 1, keep_dims=True)
    return acc


@triton.jit
def _add_block(acc, q, values_hi, values_lo, stride_value, stride_column, first_column, col_index, K: tl.constexpr,
               BK: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """acc [BM, BK] + q values, on tensor cores; lo.lo is below float32's resolution."""
    v_hi = load_points(values_hi, col_index, stride_value, stride_column, first_column, K, BK)
    q_hi = q.to(tl.float16)
    if SPLIT:
        v_lo = load_points(values_lo, col_index, stride_value, stride_column, first_column, K, BK)
        q_lo = (q - q_hi.to(tl.float32)).to(tl.float16)
        acc = tl.dot(q_lo, v_hi, acc)
        acc = tl.dot(q_hi, v_lo, acc)
    return tl.dot(q_hi, v_hi, acc)


@triton.jit
def _add_values(acc, acc_1, acc_2, acc_3, q, values_hi, values_lo, stride_value, stride_column, first_column,
                col_index, K: tl.constexpr, BK: tl.constexpr, DIRECT: tl.constexpr, SPLIT: tl.constexpr,
                DOT: tl.constexpr):  # fmt: skip
    """The accumulators after one tile: one block on tensor cores, or up to four columns of their own."""
    if DOT:
        acc = _add_block(
            acc, q, values_hi, values_lo, stride_value, stride_column, first_column, col_index, K, BK, SPLIT
        )
    else:
        acc = _add_column(acc, q, values_hi, stride_column, first_column, col_index, 0, BK, DIRECT)
        acc_1 = _add_column(acc_1, q, values_hi, stride_column, first_column, col_index, 1, BK, DIRECT)
        acc_2 = _add_column(acc_2, q, values_hi, stride_column, first_column, col_index, 2, BK, DIRECT)
        acc_3 = _add_column(acc_3, q, values_hi, stride_column, first_column, col_index, 3, BK, DIRECT)
    return acc, acc_1, acc_2, acc_3


@triton.jit
def _store_column(target, acc, k: tl.constexpr, BK: tl.constexpr):
    if k < BK:
        tl.store(target + k, tl.sum(acc, 1))


@triton.jit
def _store_moments(partial_moments, first_row, row_index, first_column, stride_moment, acc, acc_1, acc_2, acc_3,
                   K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write the accumulators to rows first_row + row_index of partial_moments [., stride_moment]."""
    target = partial_moments + (first_row + row_index) * stride_moment + first_column
    if DOT:
        column = tl.arange(0, BK)
        tl.store(target[:, None] + column[None, :], acc, (first_column + column < K)[None, :])
    else:
        _store_column(target, acc, 0, BK)
        _store_column(target, acc_1, 1, BK)
        _store_column(target, acc_2, 2, BK)
        _store_column(target, acc_3, 3, BK)


@triton.jit(do_not_specialize=["settled", "n_tiles", "tiles_per_split"])
def mean_kernel(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_bias, col_bias, rounding, settled, values_hi, values_lo, stride_value, stride_column,
    partial_anchors, partial_totals, partial_moments, n_padded, stride_moment, n_tiles, tiles_per_split, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, VALUES_SPLIT: tl.constexpr, DOT: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Program (i, s, b): totals and moments of row block i over column tiles [s, s + 1) * tiles_per_split.

    partial_totals[s, row] = sum_j p_ij and partial_moments[s, row, k] = sum_j p_ij values_jk for the columns k of
    block b, with p_ij = 2^(t_ij + HEADROOM - partial_anchors[s, row]). settled: row_bias has the rows' sums taken out;
    rounding: by how much exponents can be off. OWN: values are the columns' points, all in one block, so that the tile
    loaded for the scores serves again.
    """
    if OWN:
        values_hi = cols_hi
        values_lo = cols_lo
        stride_value = stride_col
        stride_column = stride_col_d
    row_index = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    first_column = 0 if OWN else tl.program_id(2) * BK
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, n_tiles)
    b_row = tl.load(row_bias + row_index) + HEADROOM  # [BM]
    q_hi, q_lo = row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, ROWS_SPLIT)
    OUTER_STAGES: tl.constexpr = STAGES if D <= BD else 1
    WIDTH: tl.constexpr = BN if DIRECT else 1  # direct tiles spread a row over many lanes: reduce once, at the end
    COLUMN_WIDTH: tl.constexpr = BN if DIRECT and not DOT else 1
    total = tl.zeros([BM, WIDTH], tl.float32)
    acc = tl.zeros([BM, BK if DOT else COLUMN_WIDTH], tl.float32)
    acc_1 = tl.zeros([BM, COLUMN_WIDTH], tl.float32)
    acc_2 = tl.zeros([BM, COLUMN_WIDTH], tl.float32)
    acc_3 = tl.zeros([BM, COLUMN_WIDTH], tl.float32)
    anchor = tl.zeros([BM], tl.float32)
    if settled == 0 or not tl.load(rounding) < LARGEST_ROUNDING:
        maximum = tl.full([BM], float("-inf"), tl.float32)
        for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
            col_index = tile * BN + tl.arange(0, BN)
            score = score_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            )  # fmt: skip
            t = score * scale + (b_row[:, None] + tl.load(col_bias + col_index)[None, :])
            new_maximum = tl.maximum(maximum, tl.max(t, 1))
            zero = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # only zero weights so far
            shrink = tl.exp2(maximum - zero)[:, None]
            total *= shrink
            acc *= shrink
            acc_1 *= shrink
            acc_2 *= shrink
            acc_3 *= shrink
            maximum = new_maximum
            p = tl.exp2(t - (zero - HEADROOM)[:, None])
            total += p if DIRECT else tl.sum(p, 1, keep_dims=True)
            acc, acc_1, acc_2, acc_3 = _add_values(
                acc, acc_1, acc_2, acc_3, p, values_hi, values_lo, stride_value, stride_column, first_column,
                col_index, K, BK, DIRECT, VALUES_SPLIT, DOT,
            )  # fmt: skip
        anchor = maximum - HEADROOM
    else:
        for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
            col_index = tile * BN + tl.arange(0, BN)
            score = score_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            )  # fmt: skip
            p = tl.exp2(score * scale + (b_row[:, None] + tl.load(col_bias + col_index)[None, :]))
            total += p if DIRECT else tl.sum(p, 1, keep_dims=True)
            acc, acc_1, acc_2, acc_3 = _add_values(
                acc, acc_1, acc_2, acc_3, p, values_hi, values_lo, stride_value, stride_column, first_column,
                col_index, K, BK, DIRECT, VALUES_SPLIT, DOT,
            )  # fmt: skip
    first_row = split.to(tl.int64) * n_padded
    if first_column == 0:
        tl.store(partial_anchors + first_row + row_index, anchor)
        tl.store(partial_totals + first_row + row_index, tl.sum(total, 1))
    _store_moments(
        partial_moments, first_row, row_index, first_column, stride_moment, acc, acc_1, acc_2, acc_3, K, BK, DOT
    )


@triton.jit(do_not_specialize=["n", "k", "n_splits", "stride_moment"])
def combine_kernel(
    partial_anchors, partial_totals, partial_moments, n_padded, stride_moment, n_splits, column_scale,
    means, log2_sums, n, k, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """means [n, k] from the splits of BM rows and BK columns, and log2_sums [n] = L, float64."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (row < n)[:, None] & (column < k)[None, :]
    anchor = tl.full([BM], float("-inf"), tl.float32)
    source = row.to(tl.int64)
    for _ in range(n_splits):
        anchor = tl.maximum(anchor, tl.load(partial_anchors + source))
        source += n_padded
    total = tl.zeros([BM], tl.float32)
    moment = tl.zeros([BM, BK], tl.float32)
    source = row.to(tl.int64)
    for _ in range(n_splits):
        share = tl.exp2(tl.load(partial_anchors + source) - anchor)
        total += share * tl.load(partial_totals + source)
        moments = tl.load(partial_moments + source[:, None] * stride_moment + column[None, :], inside, other=0.0)
        moment += share[:, None] * moments
        source += n_padded
    scale = tl.load(column_scale + column, column < k, other=0.0)
    target = row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(means + target, moment / total[:, None] * scale[None, :], inside)
    if tl.program_id(1) == 0:
        b_log2_sum = anchor.to(tl.float64) + tl.log2(total).to(tl.float64) - HEADROOM
        tl.store(log2_sums + row, b_log2_sum, row < n)

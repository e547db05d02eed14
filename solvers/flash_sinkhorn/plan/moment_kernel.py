"""Triton kernel: moments of a plan times its first-order change, for Hessian-vector products.

Settled rows only (see average_kernels.py). With rows moving along v and columns along w

    q_ij = alpha_i + beta_j - factor (x_i - y_j).(v_i - w_j)              (direct differences, low d)
    q_ij = alpha_i + beta_j + factor (v_i.y_j + x_i.w_j)                  (dot products; the rest is in alpha and beta)

everything over a bound of |q|, so that p q has p's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sweeps.scores import row_block, score_tile
from .average_kernels import HEADROOM, LARGEST_ROUNDING, _add_values, _store_moments


@triton.jit
def _direct_change(rows, cols, v, w, stride_row_d, stride_col_d, row_index, col_index, D: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, ROWS_MOVE: tl.constexpr, COLS_MOVE: tl.constexpr):  # fmt: skip
    """(x_i - y_j).(v_i - w_j) [BM, BN]."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.static_range(D):
        q = tl.load(rows + k * stride_row_d + row_index)
        c = tl.load(cols + k * stride_col_d + col_index)
        motion = tl.zeros([BM, BN], tl.float32)
        if ROWS_MOVE:
            motion += tl.load(v + k * stride_row_d + row_index)[:, None]
        if COLS_MOVE:
            motion -= tl.load(w + k * stride_col_d + col_index)[None, :]
        acc += (q[:, None] - c[None, :]) * motion
    return acc


@triton.jit(do_not_specialize=["n_tiles", "tiles_per_split"])
def moment_kernel(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_bias, col_bias, alpha, beta, factor, v_hi, v_lo, w_hi, w_lo,
    values_hi, values_lo, stride_value, stride_column,
    partial_totals, partial_firsts, partial_moments, n_padded, stride_moment, n_tiles, tiles_per_split, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, VALUES_SPLIT: tl.constexpr, DOT: tl.constexpr,
    ROWS_MOVE: tl.constexpr, COLS_MOVE: tl.constexpr, WITH_POINTS: tl.constexpr,
):  # fmt: skip
    """Program (i, s, b): sums of p_ij, p_ij q_ij and p_ij q_ij values_jk over the column tiles of split s.

    v, w: stored like the rows and the columns, as pairs where VALUES_SPLIT.
    """
    row_index = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    first_column = tl.program_id(2) * BK
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, n_tiles)
    b_row = tl.load(row_bias + row_index) + HEADROOM  # [BM]
    b_alpha = tl.load(alpha + row_index)
    b_factor = tl.load(factor)
    q_hi, q_lo = row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, ROWS_SPLIT)
    u_hi, u_lo = row_block(
        v_hi, v_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT or not ROWS_MOVE, VALUES_SPLIT
    )
    OUTER_STAGES: tl.constexpr = STAGES if D <= BD else 1
    WIDTH: tl.constexpr = BN if DIRECT else 1
    total = tl.zeros([BM, WIDTH], tl.float32)
    first = tl.zeros([BM, WIDTH], tl.float32)
    acc = tl.zeros([BM, BK if DOT else WIDTH], tl.float32)
    acc_1 = tl.zeros([BM, WIDTH], tl.float32)
    acc_2 = tl.zeros([BM, WIDTH], tl.float32)
    acc_3 = tl.zeros([BM, WIDTH], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
        col_index = tile * BN + tl.arange(0, BN)
        score = score_tile(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
            row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
        )  # fmt: skip
        t = score * scale + (b_row[:, None] + tl.load(col_bias + col_index)[None, :])
        p = tl.exp2(tl.minimum(t, HEADROOM + LARGEST_ROUNDING))
        q = b_alpha[:, None] + tl.load(beta + col_index)[None, :]
        if DIRECT:
            q -= b_factor * _direct_change(
                rows_hi, cols_hi, v_hi, w_hi, stride_row_d, stride_col_d, row_index, col_index, D, BM, BN,
                ROWS_MOVE, COLS_MOVE,
            )  # fmt: skip
        else:
            if ROWS_MOVE:
                q += b_factor * score_tile(
                    v_hi, v_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                    row_index, col_index, u_hi, u_lo, D, BM, BN, BD, DIRECT, VALUES_SPLIT, COLS_SPLIT, STAGES,
                )  # fmt: skip
            if COLS_MOVE:
                q += b_factor * score_tile(
                    rows_hi, rows_lo, w_hi, w_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                    row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, VALUES_SPLIT, STAGES,
                )  # fmt: skip
        q = p * q
        total += p if DIRECT else tl.sum(p, 1, keep_dims=True)
        first += q if DIRECT else tl.sum(q, 1, keep_dims=True)
        if WITH_POINTS:
            acc, acc_1, acc_2, acc_3 = _add_values(
                acc, acc_1, acc_2, acc_3, q, values_hi, values_lo, stride_value, stride_column, first_column,
                col_index, K, BK, DIRECT, VALUES_SPLIT, DOT,
            )  # fmt: skip
    first_row = split.to(tl.int64) * n_padded
    if first_column == 0:
        tl.store(partial_totals + first_row + row_index, tl.sum(total, 1))
        tl.store(partial_firsts + first_row + row_index, tl.sum(first, 1))
    if WITH_POINTS:
        _store_moments(
            partial_moments, first_row, row_index, first_column, stride_moment, acc, acc_1, acc_2, acc_3, K, BK, DOT
        )

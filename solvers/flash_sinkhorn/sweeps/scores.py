"""Scores of a tile of pairs on a GPU: q_i.k_j (dot products) or |q_i - k_j|^2 (direct differences, low d).

Of points that are pairs hi + lo, scores are accumulated onto the coarse parts of the biases (cloud_kernels.py), first
the products hi.hi: the hi parts are whole numbers, so that nothing is lost while sums stay below 2^24, and what is then
left to add lo's products to is small wherever P is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_HALVED = tl.constexpr(64)  # dimensions; beyond, adding biases in two halves is worth its time


@triton.jit
def load_points(points, index, stride_point, stride_coordinate, d_start, D: tl.constexpr, BD: tl.constexpr):
    """[B, BD] coordinates d_start.. of the points at `index` [B]; arrays are padded, so nothing is masked but d."""
    dim = d_start + tl.arange(0, BD)
    offsets = index.to(tl.int64)[:, None] * stride_point + dim[None, :] * stride_coordinate
    if D % BD == 0:  # noqa: SIM108 (decided at compile time)
        block = tl.load(points + offsets)
    else:
        block = tl.load(points + offsets, mask=(dim < D)[None, :], other=0.0)
    return block


@triton.jit
def _add_rests(q_hi, q_lo, k_hi, k_lo, acc, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr):
    """acc + q.k^T - q_hi.k_hi^T but for lo.lo, which is too small; a split operand is an fp16 pair hi + lo."""
    if ROWS_SPLIT:
        acc = tl.dot(q_lo, tl.trans(k_hi), acc)
    if COLS_SPLIT:
        acc = tl.dot(q_hi, tl.trans(k_lo), acc)
    return acc


@triton.jit
def row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D: tl.constexpr, BD: tl.constexpr,
               DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr):  # fmt: skip
    """The row block (hi, lo) when it can stay on chip for the whole sweep; placeholders otherwise."""
    if DIRECT or D > BD:
        hi = row_index
        lo = row_index
    else:
        hi = load_points(rows_hi, row_index, stride_row, stride_row_d, 0, D, BD)
        lo = load_points(rows_lo, row_index, stride_row, stride_row_d, 0, D, BD) if ROWS_SPLIT else hi
    return hi, lo


@triton.jit
def score_tile(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_index, col_index, q_hi, q_lo,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    row_coarse=None, col_coarse=None,
):  # fmt: skip
    """Scores [BM, BN], yet to be scaled; of pairs with coarse biases where given, row_coarse [BM] and col_coarse [BN].

    Small products are added while sums are small, after the large ones only where biases leave little of these. HALVES:
    half of the biases before and half after the large products, so that sums on the way are half as large.
    """
    FINE: tl.constexpr = row_coarse is not None
    HALVES: tl.constexpr = FINE and D > SMALLEST_HALVED
    if FINE:
        row_share = row_coarse * 0.5 if HALVES else row_coarse
        col_share = col_coarse * 0.5 if HALVES else col_coarse
        acc = row_share[:, None] + col_share[None, :]
    else:
        acc = tl.zeros([BM, BN], tl.float32)
    if DIRECT:
        for k in tl.static_range(D):
            q = tl.load(rows_hi + k * stride_row_d + row_index.to(tl.int64) * stride_row)
            c = tl.load(cols_hi + k * stride_col_d + col_index.to(tl.int64) * stride_col)
            delta = q[:, None] - c[None, :]
            acc += delta * delta
    elif D <= BD:
        k_hi = load_points(cols_hi, col_index, stride_col, stride_col_d, 0, D, BD)
        k_lo = load_points(cols_lo, col_index, stride_col, stride_col_d, 0, D, BD) if COLS_SPLIT else k_hi
        if not FINE:
            acc = _add_rests(q_hi, q_lo, k_hi, k_lo, acc, ROWS_SPLIT, COLS_SPLIT)
        acc = tl.dot(q_hi, tl.trans(k_hi), acc)
        if HALVES:
            acc = (acc + row_share[:, None]) + col_share[None, :]
        if FINE:
            acc = _add_rests(q_hi, q_lo, k_hi, k_lo, acc, ROWS_SPLIT, COLS_SPLIT)
    else:
        rests = tl.zeros([BM, BN], tl.float32)
        for d_start in tl.range(0, D, BD, num_stages=STAGES):
            b_hi = load_points(rows_hi, row_index, stride_row, stride_row_d, d_start, D, BD)
            k_hi = load_points(cols_hi, col_index, stride_col, stride_col_d, d_start, D, BD)
            b_lo = b_hi
            k_lo = k_hi
            if ROWS_SPLIT:
                b_lo = load_points(rows_lo, row_index, stride_row, stride_row_d, d_start, D, BD)
            if COLS_SPLIT:
                k_lo = load_points(cols_lo, col_index, stride_col, stride_col_d, d_start, D, BD)
            if FINE:
                rests = _add_rests(b_hi, b_lo, k_hi, k_lo, rests, ROWS_SPLIT, COLS_SPLIT)
            else:
                acc = _add_rests(b_hi, b_lo, k_hi, k_lo, acc, ROWS_SPLIT, COLS_SPLIT)
            acc = tl.dot(b_hi, tl.trans(k_hi), acc)
        if HALVES:
            acc = (acc + row_share[:, None]) + col_share[None, :]
        if FINE:
            acc += rests
    return acc

"""Triton kernels of half-steps: sweep over all pairs and settle the rows' potentials.

Exponents are base 2. For row i and column j

    t_ij = row_bias_i + col_bias_j + scale * (row_coarse_i + col_coarse_j + score_ij)

with the scores of scores.py and the biases of cloud_kernels.py, and a sweep yields L_i = log2 sum_j 2^t_ij. Both
potentials are in the exponent, so near the solution sums are near one and the plain loop keeps no running maximum. It
is used where it is safe: |L| of a sweep is at most the largest move of the opposite potential just before (Sinkhorn's
map does not expand) and the rows' own largest offset from a full balanced update, both of which settling leaves behind,
and float32 exponents are off by no more than half an ulp of the largest bias.

A row block's columns may be split over programs. The last of them to arrive settles the block, and the last block to
be settled reduces the blocks' statistics, in a fixed order: one launch a half-step, the same bits every time.

Integers that vary with n are not specialised, so that a new n compiles nothing.

BATCHED: arrays have the problems of a batch as their first axis, and so has the grid as its last. Problems share sizes,
scale and damping, and nothing else: each has its own statistics, so each its own choice of loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cloud_kernels import MOVE, OFFSET, RESIDUAL, scaled, store_biases
from .exponentials import LANES, LARGEST_SHARED, add_powers
from .scores import row_block, score_tile

LARGEST_LOG2_SUM = tl.constexpr(60.0)  # sums in [2^-60, 2^60] neither overflow nor lose terms that count
ULPS = tl.constexpr(2.0**-22)  # relative rounding of an exponent's few summands


@triton.jit
def _exponent_tile(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_index, col_index, q_hi, q_lo, b_row_coarse, b_row, col_coarse, col_bias, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """t [BM, BN], of pairs without row_bias."""
    if ROWS_SPLIT and COLS_SPLIT:
        score = score_tile(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
            row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            b_row_coarse, tl.load(col_coarse + col_index),
        )  # fmt: skip
        t = score * scale + tl.load(col_bias + col_index)[None, :]
    else:
        score = score_tile(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
            row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
        )  # fmt: skip
        t = score * scale + (b_row[:, None] + tl.load(col_bias + col_index)[None, :])
    return t


@triton.jit
def _settle_rows(
    row, partial_log2_sums, n_padded, n_splits, potential, half_square, weight, log2_weight, coarse_bias, row_bias,
    col_bias, used, scale, scale_rest, step, relaxation, undamped,
):  # fmt: skip
    """Combine the splits of the rows into L and move their potential u, relaxation of the way to its full update
    F = (1 - undamped) (u - L); undamped = eps / (rho + eps), 0 for a balanced marginal.

    Stores potential, biases, and used: u as the sweep saw it. Returns the block's statistics: the largest |move|,
    rounding included, of a point with weight; the largest distance left to u - L; and the residual before the move,
    sum_i weight_i |2^(u_i - F_i) - 1|.
    """
    maximum = tl.full(row.shape, float("-inf"), tl.float32)
    source = partial_log2_sums + row
    for _ in range(n_splits):
        maximum = tl.maximum(maximum, tl.load(source, cache_modifier=".cg"))  # written by other multiprocessors
        source += n_padded
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros(row.shape, tl.float32)
    source = partial_log2_sums + row
    for _ in range(n_splits):
        total += tl.exp2(tl.load(source, cache_modifier=".cg") - anchor)
        source += n_padded
    balanced_move = (anchor + tl.log2(total)).to(tl.float64)

    # Biases are the rounded potential that the sweep really used: starting from them keeps the update exact.
    square = scaled(tl.load(half_square + row), scale, scale_rest)
    coarse = tl.load(coarse_bias + row).to(tl.float64)
    b_used = scaled(coarse, scale, scale_rest) + tl.load(row_bias + row).to(tl.float64) + square
    excess = balanced_move + undamped * (b_used - balanced_move)  # u - F
    moved = b_used - relaxation * excess
    bias = moved - square
    b_weight = tl.load(weight + row)
    tl.store(potential + row, moved)
    tl.store(used + row, b_used)
    store_biases(coarse_bias, row_bias, col_bias, row, bias, tl.load(log2_weight + row), scale, scale_rest, step)
    move = tl.where(b_weight > 0, relaxation * tl.abs(excess) + ULPS * tl.abs(bias), 0.0)
    deviation = tl.where(b_weight > 0, tl.abs(tl.exp2(excess.to(tl.float32)) - 1.0), 0.0)
    offset = tl.abs(balanced_move - relaxation * excess)
    return tl.max(move, 0), tl.max(offset, 0), tl.sum(b_weight * deviation.to(tl.float64), 0)


@triton.jit
def _reduce_statistics(block_statistics, statistics, n_blocks):
    """statistics [3] of the cloud from those of its blocks, float64 [3, n_blocks]."""
    move = tl.zeros([128], tl.float64)
    offset = tl.zeros([128], tl.float64)
    residual = tl.zeros([128], tl.float64)
    for start in range(0, n_blocks, 128):
        block = start + tl.arange(0, 128)
        inside = block < n_blocks
        source = block_statistics + block
        move = tl.maximum(move, tl.load(source, inside, other=0.0, cache_modifier=".cg"))
        offset = tl.maximum(offset, tl.load(source + n_blocks, inside, other=0.0, cache_modifier=".cg"))
        residual += tl.load(source + 2 * n_blocks, inside, other=0.0, cache_modifier=".cg")
    tl.store(statistics + MOVE, tl.max(move, 0))
    tl.store(statistics + OFFSET, tl.max(offset, 0))
    tl.store(statistics + RESIDUAL, tl.sum(residual, 0))


@triton.jit
def _settle_block(
    row, partial_log2_sums, n_padded, n_splits, potential, half_square, weight, log2_weight, coarse_bias, row_bias,
    col_bias, used, statistics, block_statistics, arrivals, scale, scale_rest, step, relaxation, undamped,
):  # fmt: skip
    """Settle the rows of this program's block; the last block to arrive also reduces the statistics."""
    block, n_blocks = tl.program_id(0), tl.num_programs(0)
    move, offset, residual = _settle_rows(
        row, partial_log2_sums, n_padded, n_splits, potential, half_square, weight, log2_weight, coarse_bias, row_bias,
        col_bias, used, scale, scale_rest, step, relaxation, undamped,
    )  # fmt: skip
    tl.store(block_statistics + block, move)
    tl.store(block_statistics + n_blocks + block, offset)
    tl.store(block_statistics + 2 * n_blocks + block, residual)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + n_blocks, 1, sem="acq_rel") == n_blocks - 1:
        tl.store(arrivals + n_blocks, 0)
        _reduce_statistics(block_statistics, statistics, n_blocks)


@triton.jit(do_not_specialize=["n_splits"])
def settle_kernel(
    partial_log2_sums, n_padded, n_splits, potential, half_square, weight, log2_weight, coarse_bias, row_bias, col_bias,
    used, statistics, block_statistics, arrivals, scale, scale_rest, step, relaxation, undamped, BM: tl.constexpr,
    BATCHED: tl.constexpr,
):  # fmt: skip
    """Settle what sweeps without settling left; one program for every BM rows. Arguments as in `sweep_kernel`."""
    if BATCHED:
        problem, n_blocks = tl.program_id(2).to(tl.int64), tl.num_programs(0)
        own = problem * n_padded
        partial_log2_sums += own * n_splits
        potential += own
        half_square += own
        weight += own
        log2_weight += own
        coarse_bias += own
        row_bias += own
        col_bias += own
        used += own
        statistics += problem * 3
        block_statistics += problem * 3 * n_blocks
        arrivals += problem * (n_blocks + 1)
    _settle_block(
        tl.program_id(0) * BM + tl.arange(0, BM), partial_log2_sums, n_padded, n_splits, potential, half_square,
        weight, log2_weight, coarse_bias, row_bias, col_bias, used, statistics, block_statistics, arrivals, scale,
        scale_rest, step, relaxation, undamped,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_tiles", "tiles_per_split"])
def sweep_kernel(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_coarse, row_bias, col_coarse, col_bias, row_statistics, col_statistics, partial_log2_sums, n_padded, n_tiles,
    tiles_per_split, potential, half_square, weight, log2_weight, own_col_bias, used, block_statistics, arrivals,
    scale, scale_rest, step, relaxation, undamped,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    SETTLE: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """Program (i, s): partial_log2_sums[s, rows of block i] over column tiles [s, s + 1) * tiles_per_split; with
    SETTLE the rows are settled as well.

    potential, half_square, weight, log2_weight, used: float64 [n_padded] and row_coarse, row_bias, own_col_bias:
    float32 [n_padded] of the rows; col_coarse, col_bias: float32, of the columns. scale + scale_rest is the scale to
    float64's precision. row_statistics, col_statistics: float64 [3], as settling each side
    or `rescale_kernel` left them. block_statistics: float64 [3, blocks]; arrivals: int32 [blocks + 1], zero before and
    after.
    """
    if BATCHED:
        problem, n_blocks = tl.program_id(2).to(tl.int64), tl.num_programs(0)
        own, opposite = problem * n_padded, problem * n_tiles * BN
        rows_hi += own * D
        rows_lo += own * D
        cols_hi += opposite * D
        cols_lo += opposite * D
        row_coarse += own
        row_bias += own
        own_col_bias += own
        col_coarse += opposite
        col_bias += opposite
        row_statistics += problem * 3
        col_statistics += problem * 3
        partial_log2_sums += own * tl.num_programs(1)
        potential += own
        half_square += own
        weight += own
        log2_weight += own
        used += own
        block_statistics += problem * 3 * n_blocks
        arrivals += problem * (n_blocks + 1)
    row_index = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, n_tiles)
    b_row_coarse = tl.load(row_coarse + row_index)  # [BM]
    b_row = tl.load(row_bias + row_index)
    bound = (tl.load(col_statistics + MOVE) + tl.load(row_statistics + OFFSET)).to(tl.float32)
    bound += ULPS * tl.max(tl.abs(scale * b_row_coarse + b_row), 0)
    q_hi, q_lo = row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, ROWS_SPLIT)
    OUTER_STAGES: tl.constexpr = STAGES if D <= BD else 1
    if not bound < LARGEST_LOG2_SUM:  # so for nan too
        maximum = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
            col_index = tile * BN + tl.arange(0, BN)
            t = _exponent_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, b_row_coarse, b_row, col_coarse, col_bias, scale,
                D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            )  # fmt: skip
            new_maximum = tl.maximum(maximum, tl.max(t, 1))
            anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # only zero weights so far
            total = total * tl.exp2(maximum - anchor) + tl.sum(tl.exp2(t - anchor[:, None]), 1)
            maximum = new_maximum
        log2_sums = maximum + tl.log2(total)
    else:
        WIDTH: tl.constexpr = BN if DIRECT else LANES  # rows are spread over lanes: reduce once, at the end
        sums = tl.zeros([BM, WIDTH], tl.float32)
        for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
            col_index = tile * BN + tl.arange(0, BN)
            t = _exponent_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, b_row_coarse, b_row, col_coarse, col_bias, scale,
                D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            )  # fmt: skip
            sums = sums + tl.exp2(t) if DIRECT else add_powers(sums, t, D <= LARGEST_SHARED)
        log2_sums = tl.log2(tl.sum(sums, 1))
    if ROWS_SPLIT and COLS_SPLIT:
        log2_sums += b_row
    tl.store(partial_log2_sums + split.to(tl.int64) * n_padded + row_index, log2_sums)
    if SETTLE:
        tl.debug_barrier()
        n_splits = tl.num_programs(1)
        if tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == n_splits - 1:
            tl.store(arrivals + tl.program_id(0), 0)
            _settle_block(
                row_index, partial_log2_sums, n_padded, n_splits, potential, half_square, weight, log2_weight,
                row_coarse, row_bias, own_col_bias, used, row_statistics, block_statistics, arrivals, scale,
                scale_rest, step, relaxation, undamped,
            )  # fmt: skip

"""Triton kernels: prepare a cloud, then half-steps: sweep over all pairs and settle the rows' potentials.

Exponents are base 2. For row i and column j

    t_ij = row_bias_i + col_bias_j + scale * (row_coarse_i + col_coarse_j + score_ij)

with score_ij = q_i.k_j (dot products) or |q_i - k_j|^2 (direct differences, low d), and a sweep yields
L_i = log2 sum_j 2^t_ij. Both potentials are in the exponent, so near the solution sums are near one and the plain loop
keeps no running maximum. It is used where it is safe: |L| of a sweep is at most the largest move of the opposite
potential just before (Sinkhorn's map does not expand) and the rows' own largest offset from a full balanced update,
both of which settling leaves behind, and float32 exponents are off by no more than half an ulp of the largest bias.

Biases and scores are large and cancel, and tensor cores truncate what they add up to 24 bits. So where points are pairs
hi + lo a bias is a coarse part, a multiple of a power of two that float32 adds up exactly, and a small rest. Scores are
accumulated onto the coarse parts, first the products hi.hi: the hi parts are whole numbers, so that nothing is lost
while sums stay below 2^24, and what is then left to add lo's products to is small wherever P is not. Elsewhere coarse
parts are zero.

A row block's columns may be split over programs. The last of them to arrive settles the block, and the last block to
be settled reduces the blocks' statistics, in a fixed order: one launch a half-step, the same bits every time.

Integers that vary with n are not specialised, so that a new n compiles nothing.

BATCHED: arrays have the problems of a batch as their first axis, and so has the grid as its last. Problems share sizes,
scale and damping, and nothing else: each has its own statistics, so each its own choice of loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_LOG2_SUM = tl.constexpr(60.0)  # sums in [2^-60, 2^60] neither overflow nor lose terms that count
LARGEST_COORDINATE = tl.constexpr(32768.0)  # in units of the stored clouds
ULPS = tl.constexpr(2.0**-22)  # relative rounding of an exponent's few summands
SMALLEST_HALVED = tl.constexpr(64)  # dimensions; beyond, adding biases in two halves is worth its time
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
def _scaled(value, scale, scale_rest):
    """value, float64, times the scale to that precision."""
    return value * scale + value * scale_rest


@triton.jit
def _store_biases(coarse_bias, row_bias, col_bias, row, bias, b_log2_weight, scale, scale_rest, step, mask=None):
    """Split biases, float64 exponents, into multiples of `step`, in units of the scores, and rests; columns' rests have
    the weights."""
    coarse = tl.where(step > 0, tl.floor(bias / (scale * step) + 0.5) * step, 0.0).to(tl.float32)
    rest = bias - _scaled(coarse.to(tl.float64), scale, scale_rest)
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
    bias = b_potential - _scaled(tl.load(half_square + row), scale, scale_rest)
    tl.store(potential + row, b_potential)
    _store_biases(coarse_bias, row_bias, col_bias, row, bias, tl.load(log2_weight + row), scale, scale_rest, step)
    if tl.program_id(0) == 0:
        tl.store(statistics + MOVE, float("inf"))
        tl.store(statistics + OFFSET, float("inf"))


@triton.jit
def _load_points(points, index, stride_point, stride_coordinate, d_start, D: tl.constexpr, BD: tl.constexpr):
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
def _row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D: tl.constexpr, BD: tl.constexpr,
               DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr):  # fmt: skip
    """The row block (hi, lo) when it can stay on chip for the whole sweep; placeholders otherwise."""
    if DIRECT or D > BD:
        hi = row_index
        lo = row_index
    else:
        hi = _load_points(rows_hi, row_index, stride_row, stride_row_d, 0, D, BD)
        lo = _load_points(rows_lo, row_index, stride_row, stride_row_d, 0, D, BD) if ROWS_SPLIT else hi
    return hi, lo


@triton.jit
def _score_tile(
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
        k_hi = _load_points(cols_hi, col_index, stride_col, stride_col_d, 0, D, BD)
        k_lo = _load_points(cols_lo, col_index, stride_col, stride_col_d, 0, D, BD) if COLS_SPLIT else k_hi
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
            b_hi = _load_points(rows_hi, row_index, stride_row, stride_row_d, d_start, D, BD)
            k_hi = _load_points(cols_hi, col_index, stride_col, stride_col_d, d_start, D, BD)
            b_lo = b_hi
            k_lo = k_hi
            if ROWS_SPLIT:
                b_lo = _load_points(rows_lo, row_index, stride_row, stride_row_d, d_start, D, BD)
            if COLS_SPLIT:
                k_lo = _load_points(cols_lo, col_index, stride_col, stride_col_d, d_start, D, BD)
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


@triton.jit
def _exponent_tile(
    rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
    row_index, col_index, q_hi, q_lo, b_row_coarse, b_row, col_coarse, col_bias, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    DIRECT: tl.constexpr, ROWS_SPLIT: tl.constexpr, COLS_SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """t [BM, BN], of pairs without row_bias."""
    if ROWS_SPLIT and COLS_SPLIT:
        score = _score_tile(
            rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
            row_index, col_index, q_hi, q_lo, D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            b_row_coarse, tl.load(col_coarse + col_index),
        )  # fmt: skip
        t = score * scale + tl.load(col_bias + col_index)[None, :]
    else:
        score = _score_tile(
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
    square = _scaled(tl.load(half_square + row), scale, scale_rest)
    coarse = tl.load(coarse_bias + row).to(tl.float64)
    b_used = _scaled(coarse, scale, scale_rest) + tl.load(row_bias + row).to(tl.float64) + square
    excess = balanced_move + undamped * (b_used - balanced_move)  # u - F
    moved = b_used - relaxation * excess
    bias = moved - square
    b_weight = tl.load(weight + row)
    tl.store(potential + row, moved)
    tl.store(used + row, b_used)
    _store_biases(coarse_bias, row_bias, col_bias, row, bias, tl.load(log2_weight + row), scale, scale_rest, step)
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
    q_hi, q_lo = _row_block(rows_hi, rows_lo, row_index, stride_row, stride_row_d, D, BD, DIRECT, ROWS_SPLIT)
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
        WIDTH: tl.constexpr = BN if DIRECT else 1  # direct tiles spread a row over many lanes: reduce once, at the end
        sums = tl.zeros([BM, WIDTH], tl.float32)
        for tile in tl.range(first_tile, last_tile, num_stages=OUTER_STAGES):
            col_index = tile * BN + tl.arange(0, BN)
            t = _exponent_tile(
                rows_hi, rows_lo, cols_hi, cols_lo, stride_row, stride_row_d, stride_col, stride_col_d,
                row_index, col_index, q_hi, q_lo, b_row_coarse, b_row, col_coarse, col_bias, scale,
                D, BM, BN, BD, DIRECT, ROWS_SPLIT, COLS_SPLIT, STAGES,
            )  # fmt: skip
            p = tl.exp2(t)
            sums += p if DIRECT else tl.sum(p, 1, keep_dims=True)
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

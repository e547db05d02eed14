"""Triton kernels of the balance: half-sweeps over a sparse matrix, its sums over coarser nodes, the coarsest level.

w are natural logarithms of multipliers; everything is float64. A program of a half-sweep does a few rows (columns) at
once and goes over their lists together.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(30.0)  # of a multiplier's logarithm
LARGEST_STEP = tl.constexpr(4.0)
LEAST_SUM = tl.constexpr(1e-300)  # so that a starved row or column has a logarithm
HALVINGS = tl.constexpr(6)
DONE = tl.constexpr(1e-11)  # |columns - B|_1 at which a small matrix is balanced
INEXACT = tl.constexpr(1e-8)  # of a squared norm: how far one Newton step's equations are solved


@triton.jit(do_not_specialize=["n"])
def sum_kernel(values, starts, entries, out, n, BLOCK: tl.constexpr):
    """out [n]: the k-th is the sum of values over entries[starts[k] : starts[k + 1]]."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    first = tl.load(starts + k, inside, other=0)
    last = tl.load(starts + k + 1, inside, other=0)
    total = tl.zeros([BLOCK], tl.float64)
    for step in range(tl.max(last - first, 0)):
        there = first + step < last
        entry = tl.load(entries + first + step, there, other=0)
        total += tl.load(values + entry, there, other=0.0)
    tl.store(out + k, total, inside)


@triton.jit(do_not_specialize=["n"])
def ratio_kernel(
    starts, cols, values, parents, w, mass, ratios, parts, n,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """ratios [FACTORS, n]: A_I / sum_J S_IJ e^(f w_J) for f = 1, 2, 4, ... of the FACTORS; with several of them w is of
    the columns' parents, and parts [FACTORS, programs] are the sums of A_I log sum_J S_IJ e^(f w_J)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    first = tl.load(starts + row, inside, other=0)[:, None]
    last = tl.load(starts + row + 1, inside, other=0)[:, None]
    totals = ()
    for _ in tl.static_range(FACTORS):
        totals = totals + (tl.zeros([ROWS, LANES], tl.float64),)
    for step in range(0, tl.max(last - first).to(tl.int32), LANES):
        entry = first + step + tl.arange(0, LANES)[None, :]
        there = entry < last
        column = tl.load(cols + entry, there, other=0)
        if FACTORS > 1:
            column = tl.load(parents + column)
        power = tl.exp(tl.load(w + column))
        value = tl.load(values + entry, there, other=0.0)
        moved = ()
        for f in tl.static_range(FACTORS):
            moved = moved + (totals[f] + value * power,)
            power = power * power
        totals = moved
    b_mass = tl.load(mass + row, inside, other=0.0)
    for f in tl.static_range(FACTORS):
        q = tl.maximum(tl.sum(totals[f], 1), LEAST_SUM)
        tl.store(ratios + f * n + row, b_mass / q, inside)
        if FACTORS > 1:
            part = tl.sum(tl.where(inside, b_mass * tl.log(q), 0.0), 0)
            tl.store(parts + f * tl.num_programs(0) + tl.program_id(0), part)


@triton.jit(do_not_specialize=["n_parts", "n"])
def choose_kernel(parts, n_parts, w, mass, n, best, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """best [1]: the f for which D(2^f w) = 2^f <B, w> - the sum of parts[f] is largest; w and B = mass of n coarser
    columns, of all which the others are in."""
    linear = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        k = start + tl.arange(0, BLOCK)
        linear += tl.load(w + k, k < n, other=0.0) * tl.load(mass + k, k < n, other=0.0)
    slope = tl.sum(linear, 0)
    largest = slope - slope + float("-inf")
    chosen = 0
    for f in tl.static_range(FACTORS):
        total = tl.zeros([BLOCK], tl.float64)
        for start in range(0, n_parts, BLOCK):
            k = start + tl.arange(0, BLOCK)
            total += tl.load(parts + f * n_parts + k, k < n_parts, other=0.0)
        dual = slope * 2**f - tl.sum(total, 0)
        chosen = tl.where(dual > largest, f, chosen)
        largest = tl.where(dual > largest, dual, largest)
    tl.store(best, chosen)


@triton.jit(do_not_specialize=["n", "n_rows"])
def update_kernel(
    starts, rows, values, ratios, parents, coarse_w, best, w, mass, n, n_rows,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """w [n] moved towards log(B_J / sum_I S_IJ ratio_I), as far as it stays within its range or comes nearer to it.

    FIRST: w is not there yet, but 2^best times that of the columns' parents, with ratios [best].
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    if FIRST:
        chosen = tl.load(best)
        ratios += chosen * n_rows
        parent = tl.load(parents + column, inside, other=0)
        at = tl.load(coarse_w + parent) * (1 << chosen)
    else:
        at = tl.load(w + column, inside, other=0.0)
    first = tl.load(starts + column, inside, other=0)[:, None]
    last = tl.load(starts + column + 1, inside, other=0)[:, None]
    total = tl.zeros([COLUMNS, LANES], tl.float64)
    for step in range(0, tl.max(last - first).to(tl.int32), LANES):
        entry = first + step + tl.arange(0, LANES)[None, :]
        there = entry < last
        row = tl.load(rows + entry, there, other=0)
        total += tl.load(values + entry, there, other=0.0) * tl.load(ratios + row)
    c = tl.maximum(tl.exp(at) * tl.sum(total, 1), LEAST_SUM)
    b_mass = tl.load(mass + column, inside, other=0.0)
    updated = tl.where(b_mass > 0, at + tl.log(b_mass / c), at)
    # a part of the way to a column's maximum never lowers D
    updated = tl.minimum(tl.maximum(updated, tl.minimum(at, -LARGEST)), tl.maximum(at, LARGEST))
    tl.store(w + column, updated, inside)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def newton_kernel(
    S, row_mass, col_mass, out, n_rows, n_cols,
    SIZE: tl.constexpr, STEPS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One program: w [n_cols] that nearly maximises D, of the dense S [n_rows, n_cols] within [SIZE, SIZE], as `newton`
    does, but for conjugate gradients in place of a factorisation."""
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    inside = (row < n_rows)[:, None] & (column < n_cols)[None, :]
    matrix = tl.load(S + row[:, None] * n_cols + column[None, :], inside, other=0.0)
    A = tl.load(row_mass + row, row < n_rows, other=0.0)
    B = tl.load(col_mass + column, column < n_cols, other=0.0)
    w = tl.zeros([SIZE], tl.float64)
    off = tl.sum(B, 0)
    step = 0
    while (step < STEPS) & (off > DONE):
        scale = tl.exp(w)
        q = tl.maximum(tl.sum(matrix * scale[None, :], 1), LEAST_SUM)
        shares = matrix * scale[None, :] / q[:, None]
        c = tl.sum(shares * A[:, None], 0)
        residual = B - c
        off = tl.sum(tl.abs(residual), 0)
        diagonal = c * (1.0 + 1e-10) + 1e-14
        direction = tl.zeros([SIZE], tl.float64)
        conjugate = residual / diagonal
        size = tl.sum(residual * conjugate, 0)
        enough = INEXACT * size
        product = 0
        while (product < PRODUCTS) & (size > enough):
            moved = tl.sum(shares * conjugate[None, :], 1)
            image = diagonal * conjugate - tl.sum(shares * (A * moved)[:, None], 0)
            curvature = tl.sum(conjugate * image, 0)
            length = tl.where(curvature > 0, size / curvature, 0.0)
            direction += length * conjugate
            residual -= length * image
            scaled = residual / diagonal
            following = tl.where(curvature > 0, tl.sum(residual * scaled, 0), 0.0)
            conjugate = scaled + following / size * conjugate
            size = following
            product += 1
        direction /= tl.maximum(tl.max(tl.abs(direction), 0) / LARGEST_STEP, 1.0)
        # multiples of the direction, and the plain update, which never lowers D
        plain = tl.where(B > 0, w + tl.log(B / tl.maximum(c, LEAST_SUM)), w)
        from_w, best = w, w
        largest = off - off + float("-inf")
        fraction = off - off + 1.0
        for trial in range(HALVINGS + 1):
            candidate = tl.where(trial < HALVINGS, from_w + fraction * direction, plain)
            candidate = tl.minimum(tl.maximum(candidate, -LARGEST), LARGEST)
            sums = tl.maximum(tl.sum(matrix * tl.exp(candidate)[None, :], 1), LEAST_SUM)
            dual = tl.sum(B * candidate, 0) - tl.sum(A * tl.log(sums), 0)
            best = tl.where(dual > largest, candidate, best)
            largest = tl.where(dual > largest, dual, largest)
            fraction *= 0.5
        w = best
        step += 1
    tl.store(out + column, w, column < n_cols)

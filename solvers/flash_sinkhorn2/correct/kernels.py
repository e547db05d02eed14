"""Triton kernels of the balance: half-sweeps over a sparse matrix, its sums over coarser nodes, the coarsest level.

w are natural logarithms of multipliers; everything is float64. A program of a half-sweep does a few rows (columns) at
once and goes over their lists together.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl

from .newton import BALANCED
from .newton import TRIALS as TRIAL_STEPS

LARGEST = tl.constexpr(30.0)  # of a multiplier's logarithm
LARGEST_STEP = tl.constexpr(4.0)
LEAST_SUM = tl.constexpr(1e-300)  # so that a starved row or column has a logarithm
TRIALS = tl.constexpr(TRIAL_STEPS)  # multiples of a Newton step, each half of the one before
DONE = tl.constexpr(BALANCED)


@triton.jit(do_not_specialize=["n"])
def sum_kernel(values, starts, entries, places, out, n, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """out [n]: the k-th is the sum of values over entries[starts[k] : starts[k + 1]]; DENSE: out[places[k]] is."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    first = tl.load(starts + k, inside, other=0)
    last = tl.load(starts + k + 1, inside, other=0)
    total = tl.zeros([BLOCK], tl.float64)
    for step in range(tl.max(last - first, 0)):
        there = first + step < last
        entry = tl.load(entries + first + step, there, other=0)
        total += tl.load(values + entry, there, other=0.0)
    if DENSE:
        k = tl.load(places + k, inside, other=0)
    tl.store(out + k, total, inside)


@triton.jit
def _entry_of(values, order, in_order, entry, there, SORTS: tl.constexpr):
    """Entries of S in the order of the lists that are gone over; SORTS: of `values`, for they are not there yet."""
    if SORTS:
        value = tl.load(values + tl.load(order + entry, there, other=0), there, other=0.0)
        tl.store(in_order + entry, value, there)
    else:
        value = tl.load(in_order + entry, there, other=0.0)
    return value


@triton.jit(do_not_specialize=["n", "n_coarse"])
def ratio_kernel(
    starts, cols, values, order, in_order, parents, w, mass, ratios, parts, n, coarse_mass, n_coarse, best, arrivals,
    FACTORS: tl.constexpr, SORTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ratios [FACTORS, n]: A_I / sum_J S_IJ e^(f w_J) for f = 1, 2, 4, ... of the FACTORS; S as `_entry_of` has it.

    With several factors w is of the columns' n_coarse parents, parts [FACTORS, programs] are the sums of
    A_I log sum_J S_IJ e^(f w_J), and the last program to arrive finds the best.
    """
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
        value = _entry_of(values, order, in_order, entry, there, SORTS)
        moved = ()
        for f in tl.static_range(FACTORS):
            moved = moved + (totals[f] + value * power,)
            power = power * power
        totals = moved
    b_mass = tl.load(mass + row, inside, other=0.0)
    n_programs = tl.num_programs(0)
    for f in tl.static_range(FACTORS):
        q = tl.maximum(tl.sum(totals[f], 1), LEAST_SUM)
        tl.store(ratios + f * n + row, b_mass / q, inside)
        if FACTORS > 1:
            part = tl.sum(tl.where(inside, b_mass * tl.log(q), 0.0), 0)
            tl.store(parts + f * n_programs + tl.program_id(0), part)
    if FACTORS > 1:
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == n_programs - 1:
            tl.store(arrivals, 0)
            _choose(parts, n_programs, w, coarse_mass, n_coarse, best, FACTORS, BLOCK)


@triton.jit
def _choose(parts, n_parts, w, mass, n, best, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
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
            total += tl.load(parts + f * n_parts + k, k < n_parts, other=0.0, cache_modifier=".cg")
        dual = slope * 2**f - tl.sum(total, 0)
        chosen = tl.where(dual > largest, f, chosen)
        largest = tl.where(dual > largest, dual, largest)
    tl.store(best, chosen)


@triton.jit(do_not_specialize=["n", "n_rows"])
def update_kernel(
    starts, rows, values, order, in_order, ratios, parents, coarse_w, best, from_w, w, mass, n, n_rows,
    FIRST: tl.constexpr, SORTS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """w [n], from_w moved towards log(B_J / sum_I S_IJ ratio_I), as far as it stays within its range or comes nearer to
    it; S as `_entry_of` has it.

    FIRST: in place of from_w is 2^best times that of the columns' parents, with ratios [best].
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    if FIRST:
        chosen = tl.load(best)
        ratios += chosen * n_rows
        parent = tl.load(parents + column, inside, other=0)
        at = tl.load(coarse_w + parent) * (1 << chosen)
    else:
        at = tl.load(from_w + column, inside, other=0.0)
    first = tl.load(starts + column, inside, other=0)[:, None]
    last = tl.load(starts + column + 1, inside, other=0)[:, None]
    total = tl.zeros([COLUMNS, LANES], tl.float64)
    for step in range(0, tl.max(last - first).to(tl.int32), LANES):
        entry = first + step + tl.arange(0, LANES)[None, :]
        there = entry < last
        row = tl.load(rows + entry, there, other=0)
        total += _entry_of(values, order, in_order, entry, there, SORTS) * tl.load(ratios + row)
    c = tl.maximum(tl.exp(at) * tl.sum(total, 1), LEAST_SUM)
    b_mass = tl.load(mass + column, inside, other=0.0)
    updated = tl.where(b_mass > 0, at + tl.log(b_mass / c), at)
    # a part of the way to a column's maximum never lowers D
    updated = tl.minimum(tl.maximum(updated, tl.minimum(at, -LARGEST)), tl.maximum(at, LARGEST))
    tl.store(w + column, updated, inside)


@triton.jit(do_not_specialize=["n"])
def bound_kernel(w, mass, out, n, BLOCK: tl.constexpr):
    """One program: out [n] is w - <B, w>, shortened to at most 30; B = mass sums to one."""
    linear = tl.zeros([BLOCK], tl.float64)
    low, high = tl.full([BLOCK], float("inf"), tl.float64), tl.full([BLOCK], float("-inf"), tl.float64)
    for start in range(0, n, BLOCK):
        k = start + tl.arange(0, BLOCK)
        b_w = tl.load(w + k, k < n, other=0.0)
        linear += b_w * tl.load(mass + k, k < n, other=0.0)
        low = tl.minimum(low, tl.where(k < n, b_w, float("inf")))
        high = tl.maximum(high, tl.where(k < n, b_w, float("-inf")))
    level = tl.sum(linear, 0)
    largest = tl.maximum(tl.max(high, 0) - level, level - tl.min(low, 0))
    share = LARGEST / tl.maximum(largest, LARGEST)
    for start in range(0, n, BLOCK):
        k = start + tl.arange(0, BLOCK)
        tl.store(out + k, (tl.load(w + k, k < n, other=0.0) - level) * share, k < n)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def newton_kernel(
    S, row_mass, col_mass, out, n_rows, n_cols,
    SIZE: tl.constexpr, STEPS: tl.constexpr, STOP: tl.constexpr, PRODUCTS: tl.constexpr, INEXACT: tl.constexpr,
):  # fmt: skip
    """One program: w [n_cols] that nearly maximises D, of the dense S [n_rows, n_cols] within [SIZE, SIZE], as `newton`
    does, but for conjugate gradients in place of a factorisation: PRODUCTS with the matrix at most a step, or until the
    squared norm of what is left of its equations has fallen to INEXACT."""
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    inside = (row < n_rows)[:, None] & (column < n_cols)[None, :]
    matrix = tl.load(S + row[:, None] * n_cols + column[None, :], inside, other=0.0)
    A = tl.load(row_mass + row, row < n_rows, other=0.0)
    B = tl.load(col_mass + column, column < n_cols, other=0.0)
    w = tl.zeros([SIZE], tl.float64)
    shares, c, off = _columns(matrix, w, A, B)
    enough_off = tl.maximum(STOP * off, DONE)
    step = 0
    while (step < STEPS) & (off > enough_off):
        residual = B - c
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
        for trial in range(TRIALS + 1):
            candidate = tl.where(trial < TRIALS, from_w + fraction * direction, plain)
            candidate = tl.minimum(tl.maximum(candidate, -LARGEST), LARGEST)
            sums = tl.maximum(tl.sum(matrix * tl.exp(candidate)[None, :], 1), LEAST_SUM)
            dual = tl.sum(B * candidate, 0) - tl.sum(A * tl.log(sums), 0)
            best = tl.where(dual > largest, candidate, best)
            largest = tl.where(dual > largest, dual, largest)
            fraction *= 0.5
        w = best
        step += 1
        if step < STEPS:
            shares, c, off = _columns(matrix, w, A, B)
    tl.store(out + column, w, column < n_cols)


@triton.jit
def _columns(matrix, w, A, B):
    """The shares of rows that columns have at w, their sums c, and |c - B|_1."""
    scaled = matrix * tl.exp(w)[None, :]
    shares = scaled / tl.maximum(tl.sum(scaled, 1), LEAST_SUM)[:, None]
    c = tl.sum(shares * A[:, None], 0)
    return shares, c, tl.sum(tl.abs(B - c), 0)

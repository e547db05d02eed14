"""Triton kernels of a pass: sums over the kept tile pairs, and what they add up to.

A tile has a frame (`frame_kernel.py`): the plane U_I + G_I.dx that its potentials lie close to, and its image
c_I = X_I - G_I / 2k, where the plan sends its centre X_I. With D = X_I - Y_J, V_J and e_J those of columns, and

    rest_i = u_i - U_I - G_I.dx_i - k |dx_i|^2        rest_j = v_j + log2 b_j - V_J - H_J.dy_j - k |dy_j|^2

the exponent of a pair is

    t_ij = rest_i + [rest_j + (U_I + V_J - k |D|^2) + 2k (X_I - e_J).dy_j] + 2k dx_i.z_j,   z_j = (Y_J - c_I) + dy_j

where for pairs that matter z_j is a few blurs, so that float32 will do whatever the extent. A column's bracket and z
are formed once a tile pair; a pair costs d multiply-adds, an exponential and two additions. The second addition, of
rest_i, becomes a factor of the row's sum where the rest is small. Tiles that straddle a gap are no plane and far too
wide for float32: their pairs take float64.

Integers that vary with n are not specialised, so that a new n compiles nothing. k is read from float64
`scale` [1]: as an argument it would be rounded.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(32)  # tile pairs whose frames are combined at once, one a lane
ROW_LANES, COL_LANES = tl.constexpr(8), tl.constexpr(4)  # of the warp that sums a tile pair
WIDEST = tl.constexpr(1024.0)  # parts of an exponent up to here are off by 2^-14, half an ulp, at most
PLAIN, FACTORED, WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how a tile pair is summed
LARGEST_FACTOR = tl.constexpr(60.0)  # log2; so neither factor nor sum leaves float32's range unnoticed


@triton.jit
def _by_row(values):
    """[1, R, ROW_LANES, 1] of values [R, ROW_LANES] of the rows."""
    return values[None, :, :, None]


@triton.jit
def _by_col(values, T: tl.constexpr):
    """[C, 1, 1, COL_LANES] of values [T] of the columns: consecutive ones to a lane."""
    return tl.trans(tl.reshape(values, [COL_LANES, T // COL_LANES]))[:, None, None, :]


@triton.jit
def _load_columns(packed, n, col_index, D: tl.constexpr):
    """dy_1 to dy_D and the rest of the columns [T]."""
    values = ()
    for d in tl.static_range(D + 1):
        values = values + (tl.load(packed + d * n + col_index),)
    return values


@triton.jit
def _exponents(
    row, columns, cols, chunk, pick, col_index, k,
    D: tl.constexpr, T: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """float32 exponents [C, R, ROW_LANES, COL_LANES] of a tile pair, less the rows' factor; see `_add_chunk`."""
    if CASE == WIDE:
        opposite, _b, _s, _t = chunk
        _packed, potential, frame, _n, tiles = cols
        exponent = _by_row(row[1]) + _by_col(tl.load(potential + col_index), T)
        for d in tl.static_range(D):
            y = tl.load(frame + (1 + d) * tiles + tl.gather(opposite, pick, 0)) + columns[d]
            difference = _by_row(row[0][d]) - _by_col(y, T)
            exponent -= k * difference * difference
        t = exponent.to(tl.float32)
    else:
        _o, bracket, shifts, tilts = chunk
        b = columns[D] + tl.gather(bracket, pick, 0)
        z = ()
        for d in tl.static_range(D):
            b += tl.gather(tilts[d], pick, 0) * columns[d]
            z = z + (tl.gather(shifts[d], pick, 0) + columns[d],)
        t = _by_col(b, T)
        if CASE == PLAIN:
            t = t + _by_row(row[1])
        for d in tl.static_range(D):
            t += _by_row(row[0][d]) * _by_col(z[d], T)
    return t


@triton.jit
def _add_chunk(
    totals, row, cols, chunk, n_pairs, values, partial, k,
    D: tl.constexpr, T: tl.constexpr, VALUES: tl.constexpr, PARTIAL: tl.constexpr, MAXIMUM: tl.constexpr,
    CASE: tl.constexpr,
):  # fmt: skip
    """totals after the first n_pairs tile pairs of a chunk.

    row: coordinates (2k dx_i; WIDE: float64 x_i) and rest (WIDE: float64 potential), of shape [R, ROW_LANES]. cols: as
    the kernel's col_ arguments. chunk, of shape [CHUNK]: J; U_I + V_J - k |D|^2; Y_J - c_I; 2k (X_I - e_J). partial
    points to the rows' places for the first pair. The columns of a pair are loaded during the one before.
    """
    packed, _p, _f, n, _n = cols
    pick = tl.zeros([T], tl.int32)
    col_index = tl.gather(chunk[0], pick, 0) * T + tl.arange(0, T)
    columns = _load_columns(packed, n, col_index, D)
    for _ in range(n_pairs):
        following = tl.minimum(pick + 1, CHUNK - 1)
        next_index = tl.gather(chunk[0], following, 0) * T + tl.arange(0, T)
        next_columns = _load_columns(packed, n, next_index, D)
        t = _exponents(row, columns, cols, chunk, pick, col_index, k, D, T, CASE)
        if MAXIMUM:
            totals = (tl.maximum(totals[0], tl.max(t, 0)),)
        elif VALUES:
            p = tl.exp2(t)
            moved = ()
            for v in tl.static_range(VALUES):
                value = tl.load(values + v * n + col_index)
                moved = moved + (totals[v] + tl.sum(p * _by_col(value, T), 0),)
            totals = moved
        else:
            s = tl.sum(tl.exp2(t), 0)
            totals = (totals[0] + s,)
            if PARTIAL:
                stored = tl.sum(s, 2)
                if CASE == FACTORED:
                    stored *= tl.exp2(row[1])
                tl.store(partial, stored)
                partial += T
        pick = following
        col_index = next_index
        columns = next_columns
    return totals


@triton.jit(do_not_specialize=["n_rows", "n_cols", "row_tiles", "col_tiles", "pairs_per_item"])
def sweep_kernel(
    row_packed, row_potential, row_frame, col_packed, col_potential, col_frame,
    starts, lists, item_starts, item_tiles, values, sums, partial, scale, n_rows, n_cols, row_tiles, col_tiles,
    pairs_per_item,
    D: tl.constexpr, T: tl.constexpr, VALUES: tl.constexpr, PARTIAL: tl.constexpr, MAXIMUM: tl.constexpr,
    FACTOR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Item (program) p: pairs_per_item tile pairs of one row tile, or what is left of its list, in chunks; with FAR
    those with a tile too wide for float32, otherwise all others.

    sums [items, T]: the rows' sums of 2^t over these pairs, or with MAXIMUM their largest t; with VALUES columns of
    values [VALUES, n_cols], sums [items, VALUES, T] of 2^t times the value. PARTIAL: partial [pairs, T] is the sum
    over each tile pair, in the order of the lists. FACTOR: the rests of rows may become factors.
    """
    item = tl.program_id(0)
    tile = tl.load(item_tiles + item)
    if tile >= row_tiles:
        return
    R: tl.constexpr = T // ROW_LANES
    OUTPUTS: tl.constexpr = max(VALUES, 1)
    k = tl.load(scale)
    n_rows = n_rows.to(tl.int64)
    n_cols = n_cols.to(tl.int64)
    first = tl.load(starts + tile) + (item - tl.load(item_starts + tile)) * pairs_per_item
    last = tl.minimum(first + pairs_per_item, tl.load(starts + tile + 1))
    place = tl.arange(0, R)[:, None] * ROW_LANES + tl.arange(0, ROW_LANES)[None, :]  # [R, ROW_LANES]
    row_index = tile * T + place
    rest = tl.load(row_packed + D * n_rows + row_index)
    coordinates = ()
    for d in tl.static_range(D):
        dx = tl.load(row_packed + d * n_rows + row_index)
        if FAR:
            coordinates = coordinates + (tl.load(row_frame + (1 + d) * row_tiles + tile) + dx,)
        else:
            coordinates = coordinates + (dx * (2.0 * k).to(tl.float32),)
    cols = (col_packed, col_potential, col_frame, n_cols, col_tiles)
    level = tl.load(row_frame + tile)
    part = tl.load(row_frame + (1 + 2 * D) * row_tiles + tile)
    factored = False
    if FACTOR:
        factored = tl.max(tl.abs(rest)) <= LARGEST_FACTOR
    totals = ()
    for _v in tl.static_range(OUTPUTS):
        totals = totals + (tl.full([R, ROW_LANES, COL_LANES], float("-inf") if MAXIMUM else 0.0, tl.float32),)

    for start in range(first, last, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        opposite = tl.load(lists + pair, pair < last, other=0)
        widest = tl.max(tl.load(col_frame + (1 + 2 * D) * col_tiles + opposite, pair < last, other=0.0), 0)
        if (tl.maximum(widest, part) > WIDEST) == FAR:
            n_pairs = tl.minimum(last - start, CHUNK).to(tl.int32)
            square = tl.zeros([CHUNK], tl.float64)
            shifts = ()
            tilts = ()
            for d in tl.static_range(D):
                x = tl.load(row_frame + (1 + d) * row_tiles + tile)
                y = tl.load(col_frame + (1 + d) * col_tiles + opposite)
                row_image = tl.load(row_frame + (1 + D + d) * row_tiles + tile)
                col_image = tl.load(col_frame + (1 + D + d) * col_tiles + opposite)
                square += (x - y) * (x - y)
                shifts = shifts + ((y - row_image).to(tl.float32),)
                tilts = tilts + ((2.0 * k * (x - col_image)).to(tl.float32),)
            bracket = (level + tl.load(col_frame + opposite) - k * square).to(tl.float32)
            chunk = (opposite, bracket, shifts, tilts)
            target = partial + start * T + place
            if FAR:
                row = (coordinates, tl.load(row_potential + row_index))
                totals = _add_chunk(
                    totals, row, cols, chunk, n_pairs, values, target, k, D, T, VALUES, PARTIAL, MAXIMUM, WIDE
                )
            else:
                row = (coordinates, rest)
                if factored:
                    totals = _add_chunk(
                        totals, row, cols, chunk, n_pairs, values, target, k, D, T, VALUES, PARTIAL, MAXIMUM, FACTORED
                    )
                else:
                    totals = _add_chunk(
                        totals, row, cols, chunk, n_pairs, values, target, k, D, T, VALUES, PARTIAL, MAXIMUM, PLAIN
                    )
    for v in tl.static_range(OUTPUTS):
        total = tl.max(totals[v], 2) if MAXIMUM else tl.sum(totals[v], 2)
        if FACTOR:
            total *= tl.where(factored, tl.exp2(rest), 1.0)
        tl.store(sums + (item.to(tl.int64) * OUTPUTS + v) * T + place, total)


@triton.jit(do_not_specialize=["n_items", "n"])
def combine_kernel(
    sums, item_starts, anchor, out, n_items, n,
    T: tl.constexpr, VALUES: tl.constexpr, MAXIMUM: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """One row tile: its items' near and far sums [2, n_items, ...], added in float64.

    out: float64 [n], log2 of the sums with the rows' anchor added; with VALUES [VALUES, n], sums as they are; with
    MAXIMUM float32 [n], the largest exponents, 0 where there is none.
    """
    OUTPUTS: tl.constexpr = max(VALUES, 1)
    tile = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, T)
    far = n_items.to(tl.int64) * OUTPUTS * T
    for v in tl.static_range(OUTPUTS):
        total = tl.full([T], float("-inf") if MAXIMUM else 0.0, tl.float32 if MAXIMUM else tl.float64)
        for item in range(tl.load(item_starts + tile), tl.load(item_starts + tile + 1)):
            source = sums + (item * OUTPUTS + v) * T + place
            if MAXIMUM:
                total = tl.maximum(total, tl.maximum(tl.load(source), tl.load(source + far)))
            else:
                total += tl.load(source).to(tl.float64) + tl.load(source + far).to(tl.float64)
        if MAXIMUM:
            total = tl.where(total == float("-inf"), 0.0, total)
        elif VALUES == 0:
            total = tl.log2(total)
            if ANCHORED:
                total += tl.load(anchor + tile * T + place).to(tl.float64)
        tl.store(out + v * n.to(tl.int64) + tile * T + place, total)

"""Tile shapes of the sweep by precision and dimension, measured on one NVIDIA H200. No tuning at run time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

LOG2_E = math.log2(math.e)
LARGEST_DIRECT_DIMENSION = 4  # up to here exact scores are direct differences, the most accurate at any offset
SMALLEST_DOT_DIMENSION = 16
LARGEST_PACKED_DIMENSION = 5  # up to here the three products of split points fit into one
HOPPER_SHARED_BYTES = 227 * 1024
REGISTERS = 1 << 16  # of a multiprocessor
WORTH_SMALL_TILES = 0.75  # of the busiest multiprocessor's pairs at most: small tiles load each point more often


class Precision(StrEnum):
    """How points enter the dot products of a sweep; one, two and three fp16 products.

    fast: both clouds rounded to 10-bit mantissas, as TF32. mixed: only y rounded. exact: FP32 grade. In low d see
    `packs`.
    """

    FAST = "fast"
    MIXED = "mixed"
    EXACT = "exact"

    @property
    def splits_x(self) -> bool:
        """Whether x is kept as an fp16 pair hi + lo."""
        return self is not Precision.FAST

    @property
    def splits_y(self) -> bool:
        return self is Precision.EXACT

    def packs(self, d: int) -> bool:
        """Whether nothing is rounded, because the products of both clouds as pairs are one: FP32 grade, as exact."""
        return self is not Precision.EXACT and d <= LARGEST_PACKED_DIMENSION


@dataclass(frozen=True)
class Tile:
    """rows x cols pairs a step, `coordinates` of d a dot product; `resident` programs share one multiprocessor."""

    rows: int
    cols: int
    coordinates: int
    warps: int
    stages: int
    resident: int

    @property
    def registers(self) -> int:
        """A thread may use so that `resident` programs fit."""
        return min(255, REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


def padded_dimension(d: int, *, packed: bool = False) -> int:
    """d as stored: as given for direct differences, else a multiple of 16 (of 64 beyond 128)."""
    if packed:
        return SMALLEST_DOT_DIMENSION
    if d <= LARGEST_DIRECT_DIMENSION:
        return d
    step = SMALLEST_DOT_DIMENSION if d <= 128 else 64
    return -(-d // step) * step


def pair_unit(d: int) -> float:
    """Unit of points in R^d kept as pairs, over `Inputs.unit`; their hi parts are whole numbers of it.

    A compromise, for Gaussian clouds: sums of hi.hi stay near 2^24, up to which float32 is exact; lo.lo, which is left
    out, and the rounding of lo stay small.
    """
    return 2.0**-5 if d <= 128 else 2.0**-4


def sweep_tile(precision: Precision, d: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> Tile:
    """The tile of the sweep for clouds in R^d on a GPU with `shared_bytes` of shared memory a multiprocessor."""
    packed = precision.packs(d)
    if d <= LARGEST_DIRECT_DIMENSION and not packed:
        return Tile(8, 128, 1, 1, 2, 32)
    width = padded_dimension(d, packed=packed)
    coordinates = min(_power_of_two(width), 128)
    if shared_bytes < HOPPER_SHARED_BYTES:  # fits any GPU since Ampere; not tuned
        return Tile(64, 64, min(coordinates, 64), 4, 2, 1)
    if packed:
        return Tile(128, 64, coordinates, 4, 3, 4)
    if precision is Precision.FAST:
        if width <= 64:
            return Tile(128, 64, coordinates, 4, 3, 4)
        return Tile(128, 64, coordinates, 4, 2, 3) if width <= 128 else Tile(128, 256, 64, 8, 3, 1)
    if precision is Precision.MIXED:
        return (
            Tile(128, 64, coordinates, 4, 2, 4 if width <= 64 else 2) if width <= 128 else Tile(128, 128, 64, 8, 3, 1)
        )
    if width <= 16:
        return Tile(128, 64, coordinates, 4, 3, 4)
    if width <= 64:
        return Tile(128, 128, coordinates, 8, 2, 2)
    if width <= 128:
        return Tile(256, 64, coordinates, 8, 2, 1)
    if width < 1024:
        return Tile(128, 128, 32, 8, 3, 1)  # twice the coordinates spill registers here
    return Tile(128, 128, 64, 8, 3, 1)


def small_tile(precision: Precision, d: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> Tile:
    """The tile for clouds of about a thousand points, of which those of `sweep_tile` leave multiprocessors idle."""
    coordinates = sweep_tile(precision, d, shared_bytes).coordinates
    if padded_dimension(d, packed=precision.packs(d)) <= coordinates or shared_bytes < HOPPER_SHARED_BYTES:
        return Tile(64, 64, coordinates, 4, 2, 1)
    if precision is Precision.FAST:
        return Tile(64, 128, coordinates, 4, 3, 1)  # rows are loaded for each tile anew: the wider, the fewer times
    return Tile(64, 64, coordinates, 4, 3 if coordinates == 64 else 4, 1)


def fitted_tile(
    precision: Precision,
    d: int,
    n_padded: int,
    m_padded: int,
    multiprocessors: int,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> Tile:
    """`sweep_tile`, or `small_tile` where that leaves the busiest multiprocessor much less to do."""
    large, small = sweep_tile(precision, d, shared_bytes), small_tile(precision, d, shared_bytes)
    of_large, of_small = (
        sum(_busiest(tile, *shape, multiprocessors) for shape in ((n_padded, m_padded), (m_padded, n_padded)))
        for tile in (large, small)
    )
    return small if of_small < WORTH_SMALL_TILES * of_large else large


def _busiest(tile: Tile, n_rows: int, n_cols: int, multiprocessors: int) -> int:
    """Pairs that the busiest multiprocessor sweeps."""
    blocks, tiles = n_rows // tile.rows, n_cols // tile.cols
    splits = column_splits(blocks, tiles, multiprocessors * tile.resident)
    return math.ceil(blocks * splits / multiprocessors) * math.ceil(tiles / splits) * tile.rows * tile.cols


def column_splits(n_row_blocks: int, n_col_tiles: int, slots: int) -> int:
    """Into how many programs to split each row block's columns, so that the last wave of programs is full.

    `slots` programs run at once. Fewest splits within 2 % of the best balance.
    """
    costs = []
    for splits in range(1, _most_splits(n_col_tiles) + 1):
        waves = math.ceil(n_row_blocks * splits / slots)
        costs.append(waves * math.ceil(n_col_tiles / splits))
    best = min(costs)
    fewest = 1 + next(i for i, cost in enumerate(costs) if cost <= 1.02 * best)
    return math.ceil(n_col_tiles / math.ceil(n_col_tiles / fewest))  # no split without tiles


def _most_splits(n_col_tiles: int) -> int:
    return max(1, min(n_col_tiles // 2, 32))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()

"""Tile shapes of the sweeps that carry values, by precision, dimension and number of columns."""

from __future__ import annotations

from dataclasses import dataclass

from ..sweeps.tiles import HOPPER_SHARED_BYTES, LARGEST_DIRECT_DIMENSION, Precision, Tile, padded_dimension, sweep_tile

FMA_COLUMNS = 4  # of one program
LARGEST_DIRECT_FMA_COLUMNS = 8
LARGEST_FMA_COLUMNS = 2  # beyond, converting p for the tensor cores costs less than products of its own a column
LARGEST_PARTIAL_COLUMNS = 128  # splits times columns, where there are programs enough without splits


@dataclass(frozen=True)
class ValueTile:
    """pairs: the tile of the scores; columns: of values a program; dot: on tensor cores."""

    pairs: Tile
    columns: int
    dot: bool

    def stored_columns(self, k: int) -> int:
        """k padded to what programs read."""
        step = min(self.columns, 16) if self.dot else self.columns
        return -(-k // step) * step

    def holds_points(self, d_stored: int) -> bool:
        """Whether the points of a tile of columns, as loaded for the scores, are one block of values too."""
        return self.dot and d_stored <= self.pairs.coordinates == self.columns


def value_tile(precision: Precision, d: int, k: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> ValueTile:
    """The tile of a sweep that averages k columns of values over clouds in R^d."""
    small = shared_bytes < HOPPER_SHARED_BYTES  # fits any GPU since Ampere; not tuned
    width, columns = padded_dimension(d), max(_power_of_two(k), 16)
    if d <= LARGEST_DIRECT_DIMENSION:
        if k <= LARGEST_DIRECT_FMA_COLUMNS:
            columns = min(k, FMA_COLUMNS)
            return ValueTile(Tile(8 if columns == 1 else 4, 128, 1, 1, 2, 16), columns, dot=False)
        return ValueTile(Tile(64, 32, 1, 8, 2, 1), min(columns, 64 if small else 128), dot=True)
    if k <= LARGEST_FMA_COLUMNS:
        return ValueTile(sweep_tile(precision, d, shared_bytes), k, dot=False)
    if small:
        return ValueTile(Tile(64, 64, min(_power_of_two(width), 64), 4, 2, 1), min(columns, 64), dot=True)
    if width <= 128:
        resident = 2 if width <= 64 and columns <= 64 else 1
        return ValueTile(Tile(128, 64, _power_of_two(width), 8, 2, resident), min(columns, 128), dot=True)
    return ValueTile(Tile(128, 64, 64, 8, 2, 1), min(columns, 256), dot=True)


def moment_tile(d: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> ValueTile:
    """The tile of a sweep that takes the moments of a plan's change, d columns; not tuned."""
    if d <= LARGEST_DIRECT_DIMENSION:
        return ValueTile(Tile(4, 128, 1, 1, 2, 8), d, dot=False)
    width = _power_of_two(padded_dimension(d))
    if shared_bytes < HOPPER_SHARED_BYTES:
        return ValueTile(Tile(64, 32, min(width, 64), 4, 2, 1), min(width, 128), dot=True)
    if width <= 64:
        return ValueTile(Tile(128, 32, width, 8, 2, 2), width, dot=True)
    return ValueTile(Tile(128, 32, 64, 8, 2, 1), 128, dot=True)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()

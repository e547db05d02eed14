"""Tile pairs that matter, found by walking both trees; what the others hold is bounded a row and a column."""

from .every_pair import every_pair
from .mask import Mask, thin
from .screen import screen
from .walk import TooManyPairs

__all__ = ["Mask", "TooManyPairs", "every_pair", "screen", "thin"]

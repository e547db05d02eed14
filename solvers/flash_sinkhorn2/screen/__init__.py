"""Tile pairs that matter, found by walking both trees; what the others hold is bounded a row and a column."""

from .mask import Mask, thin
from .screen import screen

__all__ = ["Mask", "screen", "thin"]

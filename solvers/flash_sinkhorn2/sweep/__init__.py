"""A pass over the kept tile pairs: row sums, their parts by tile, and the plan's product with values."""

from .sweep import Pass, apply, sweep, tile_maxima

__all__ = ["Pass", "apply", "sweep", "tile_maxima"]

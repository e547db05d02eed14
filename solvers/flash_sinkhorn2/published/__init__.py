"""The published method on this package's tiles: two levels, averaged updates, a sampled check."""

from .solve import Published, Trial, solve_published

__all__ = ["Published", "Trial", "solve_published"]

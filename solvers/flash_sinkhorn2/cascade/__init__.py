"""From nothing to potentials on the points: levels of both kd trees, each started from the one before."""

from .anneal import squared_diameter
from .cascade import Cascade, solve_levels

__all__ = ["Cascade", "solve_levels", "squared_diameter"]

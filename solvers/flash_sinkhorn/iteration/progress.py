"""When more iterations change nothing: the residual is of rounding's size, and has stopped falling."""

from __future__ import annotations

import math

from ..sweeps.sweeps import Sweeps

FALL = 0.8  # of the residual in as many iterations again: a constant rate falls much further, and even 1 / k halves
FEWEST = 20  # iterations, for starts whose residual is small already
ROUNDINGS = 4.0  # plain iterations end at 0.05 to 0.6 of `Sweeps.rounding`, mixed ones at tiny eps up to 4


class Progress:
    """Of the residuals of one problem at one epsilon, over the iterations from its first.

    A plateau alone is no end: at tiny eps a residual may stay for hundreds of iterations until mass has found its way,
    far above rounding. Nor is smallness: true convergence may well go below what rounding is expected to leave.
    """

    def __init__(self, sweeps: Sweeps):
        self.sweeps = sweeps
        self.mark, self.marked_at = math.inf, 0

    def has_stalled(self, iteration: int, residual: float) -> bool:
        """Whether the residual is no more than some roundings, and was no better as many iterations ago as had led
        there. Waits for the device once in that many."""
        if residual < FALL * self.mark:
            self.mark, self.marked_at = residual, iteration
            return False
        if iteration - self.marked_at < max(FEWEST, self.marked_at):
            return False
        self.mark, self.marked_at = residual, iteration
        return residual <= ROUNDINGS * self.sweeps.rounding()

"""When more iterations change nothing: the residual is of rounding's size, and has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..sweeps.sweeps import ROUNDINGS

FALL = 0.8  # of the residual in as many iterations again: a constant rate falls much further, and even 1 / k halves
FEWEST = 20  # iterations, for starts whose residual is small already


class Progress:
    """Of the residuals of one problem at one epsilon, over the iterations from its first.

    rounding: the residual that rounding of exponents and sums makes; asked for seldom, as it may wait for the device.

    A plateau alone is no end: at tiny eps a residual may stay for hundreds of iterations until mass has found its way,
    far above rounding. Nor is smallness: true convergence may well go below what rounding is expected to leave.
    """

    def __init__(self, rounding: Callable[[], float]):
        self.rounding = rounding
        self.mark, self.marked_at = math.inf, 0

    def has_stalled(self, iteration: int, residual: float) -> bool:
        """Whether the residual is no more than some roundings, and was no better as many iterations ago as had led
        there."""
        if residual < FALL * self.mark:
            self.mark, self.marked_at = residual, iteration
            return False
        if iteration - self.marked_at < max(FEWEST, self.marked_at):
            return False
        self.mark, self.marked_at = residual, iteration
        return residual <= ROUNDINGS * self.rounding()

"""When more iterations change nothing: the residual is of rounding's size, and has stopped falling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..sweeps.sweeps import ROUNDINGS

FALL = 0.8  # of the residual in as many iterations again: a constant rate falls much further, and even 1 / k halves
FEWEST = 20  # iterations, for starts whose residual is small already


class Progress:
    """Of the residuals of one problem at one epsilon, over the iterations from its first; or of each of a batch, where
    residuals are arrays [B].

    rounding: the residual that rounding of exponents and sums makes; asked for seldom, as it may wait for the device.

    A plateau alone is no end: at tiny eps a residual may stay for hundreds of iterations until mass has found its way,
    far above rounding. Nor is smallness: true convergence may well go below what rounding is expected to leave.
    """

    def __init__(self, rounding: Callable[[], Any]):
        self.rounding = rounding
        self.mark: Any = math.inf
        self.marked_at: Any = 0

    def has_stalled(self, iteration: int, residual: Any) -> Any:
        """Whether the residual is no more than some roundings, and was no better as many iterations ago as had led
        there. Never where it is nan."""
        fell = residual < FALL * self.mark
        is_due = (residual >= FALL * self.mark) & (iteration - self.marked_at >= np.maximum(FEWEST, self.marked_at))
        self.mark = np.where(fell | is_due, residual, self.mark)
        self.marked_at = np.where(fell | is_due, iteration, self.marked_at)
        if is_due.any():
            is_due = is_due & (residual <= ROUNDINGS * self.rounding())
        return is_due if isinstance(residual, np.ndarray) else bool(is_due)

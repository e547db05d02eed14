"""What a user is told without asking: warnings, at the line of theirs that led here."""

from __future__ import annotations

import sys
import warnings

PASSED_OVER = ("torch", __package__)  # packages whose frames are not the user's


class NotConverged(UserWarning):
    """A solve ended at a limit: what was returned has the residual that the message states."""


def tell(message: str, category: type[Warning]) -> None:
    """Warn. Python shows one message of one line once: messages state figures to one digit, and so repeat."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_passed_over(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_passed_over(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in PASSED_OVER)

"""What a user is told without asking: warnings, at the line of theirs that led here."""

from __future__ import annotations

import sys
import warnings

PASSED_OVER = ("torch", __package__.partition(".")[0])  # packages whose frames are not the user's


class NotConverged(UserWarning):
    """A solve ended at a limit, or where rounding let it go no further, above its tolerance: what was returned has the
    residual that the message states."""


def tell_not_converged(residual: float, tol: float, *, by_rounding: bool, in_float64: bool) -> None:
    """Warn that a solve ended above tol, with what would help: more iterations do not where rounding ended them."""
    if not by_rounding:
        advice = "raise max_iterations, max_seconds, eps (blur) or tol"
    elif in_float64:
        advice = "rounding lets it fall no further: raise tol or eps (blur)"
    else:
        advice = "float32 lets it fall no further: raise tol or eps (blur), or give float64 points on the CPU"
    tell(f"not converged: residual {residual:.1e} above tol {tol:.1e}; {advice}", NotConverged)


def tell(message: str, category: type[Warning]) -> None:
    """Warn. Python shows one message of one line once: messages state few digits, and so repeat."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_passed_over(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_passed_over(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in PASSED_OVER)

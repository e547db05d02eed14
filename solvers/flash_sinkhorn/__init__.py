"""FlashSinkhorn: dense streaming entropic OT. README.md derives the method; `solve` is the entry point."""

from .solver import Check, Result, Updates, solve
from .tiles import Precision

__all__ = ["Check", "Precision", "Result", "Updates", "solve"]

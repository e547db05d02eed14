"""FlashSinkhorn2: multiscale, block-sparse entropic OT for points of low dimension."""

from .solver import Result, solve

__all__ = ["Result", "solve"]

"""FlashSinkhorn2: multiscale, block-sparse entropic OT for points of low dimension."""

from .plan.operators import Costs, KeptPlan
from .plan.transport import KeptTransport, transport
from .solver import Result, solve

__all__ = ["Costs", "KeptPlan", "KeptTransport", "Result", "solve", "transport"]

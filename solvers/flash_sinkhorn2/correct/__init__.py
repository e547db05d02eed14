"""The coarse correction: what half-steps move slowly, between tiles far apart, is solved for on sums over tiles."""

from .balance import Balance
from .coarse import Coarse
from .levels import Level, levels
from .newton import newton
from .pairs import Pairs, pairs_of

__all__ = ["Balance", "Coarse", "Level", "Pairs", "levels", "newton", "pairs_of"]

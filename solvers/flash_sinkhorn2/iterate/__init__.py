"""Half-steps over kept tile pairs, corrected and mixed, until the residual of the whole plan is met."""

from .loop import Check, Options, Outcome, iterate
from .passes import Passes, ScreenedPasses
from .updates import Correction

__all__ = ["Check", "Correction", "Options", "Outcome", "Passes", "ScreenedPasses", "iterate"]

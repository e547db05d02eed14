"""FlashSinkhorn: dense streaming entropic OT.

`SamplesLoss` is the loss for training, `transport` one problem's full result, `solve` its potentials; the rest applies
the plan they define. README.md derives the method.
"""

from .iteration.solver import Check, Result, Updates, solve
from .losses.costs import LabelTransport, label_transport, unit_vectors
from .losses.loss import ot_value
from .losses.notices import NotConverged
from .losses.samples_loss import SamplesLoss
from .losses.transport import Transport, transport
from .plan.hvp import hvp
from .plan.lanczos import lanczos_min_eigenvalue
from .plan.operators import Plan, barycentric_projection, gradient, plan_apply
from .sweeps.tiles import Precision

__all__ = [
    "Check",
    "LabelTransport",
    "NotConverged",
    "Plan",
    "Precision",
    "Result",
    "SamplesLoss",
    "Transport",
    "Updates",
    "barycentric_projection",
    "gradient",
    "hvp",
    "label_transport",
    "lanczos_min_eigenvalue",
    "ot_value",
    "plan_apply",
    "solve",
    "transport",
    "unit_vectors",
]

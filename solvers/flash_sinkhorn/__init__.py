"""FlashSinkhorn: dense streaming entropic OT.

`SamplesLoss` is the loss for training, `transport` one problem's full result, `solve` its potentials; the rest applies
the plan they define. README.md derives the method.
"""

from .costs import LabelTransport, label_transport, unit_vectors
from .hvp import hvp
from .lanczos import lanczos_min_eigenvalue
from .loss import ot_value
from .notices import NotConverged
from .operators import Plan, barycentric_projection, gradient, plan_apply
from .samples_loss import SamplesLoss
from .solver import Check, Result, Updates, solve
from .tiles import Precision
from .transport import Transport, transport

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

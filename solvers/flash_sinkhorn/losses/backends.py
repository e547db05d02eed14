"""Which solver a loss runs on: this one, over all pairs, or FlashSinkhorn2, over the pairs that matter."""

from __future__ import annotations

from typing import Any

import torch

from ..inputs.checks import positive
from ..sweeps.tiles import Precision
from .functions import Term
from .tolerances import DEFAULT_TOL
from .transport import Transport

BACKENDS = ("auto", "tensorized", "online", "multiscale")
DENSE = "use backend='online'"


def check_backend(backend: str, options: dict[str, Any]) -> None:
    """ValueError for a backend that there is not, or one that does not offer what is asked for.

    options: as of `transport`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "multiscale" and (reason := _refusal(options)) is not None:
        raise ValueError(f"backend='multiscale' {reason}: {DENSE}")


def runs_multiscale(backend: str, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether clouds x, y, [points, d] or batches of them, go to FlashSinkhorn2.

    "auto": single clouds of d from 1 to 6 for which it pays, by `choice.is_sparse`, with options that it takes.
    """
    if backend == "auto" and x.ndim == 2 and _refusal(options) is None:
        from solvers.flash_sinkhorn2.choice import is_sparse

        tol = DEFAULT_TOL if options["tol"] is None else positive("tol", options["tol"])
        return is_sparse(x, y, eps=options["eps"], cost_scale=options["cost_scale"], tol=tol)
    return backend == "multiscale"


def find_multiscale(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[Transport, list[Term]]:
    """`transport.find` of x [n, d], y [m, d], a [n], b [m], by FlashSinkhorn2."""
    from solvers.flash_sinkhorn2.plan.transport import find

    names = ("eps", "cost_scale", "debias", "tol", "max_iterations", "max_seconds", "hessian_tol")
    return find(x, y, a, b, **{name: options[name] for name in names})


def _refusal(options: dict[str, Any]) -> str | None:
    """Why FlashSinkhorn2 does not take these options."""
    if options["rho_x"] is not None or options["rho_y"] is not None:
        return "has fixed marginals only, no reach"
    if options["n_iterations"] is not None:
        return "solves to a tolerance, not n_iterations: the pairs that it keeps follow from tol"
    if options["precision"] != Precision.EXACT:
        return f"has precision 'exact' only, not {options['precision']!r}"
    return None

"""SamplesLoss: the Sinkhorn part of GeomLoss's class, with the same calls, on this package's solver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..inputs.checks import positive
from ..sweeps.tiles import Precision
from .backends import check_backend, find_multiscale, runs_multiscale
from .batches import find_batch
from .functions import Term, apart, constants
from .joined import joined, one_by_one, with_values
from .transport import Transport, attached, find
from .values import balance

ELSEWHERE = ("hausdorff", "energy", "gaussian", "laplacian")


class SamplesLoss(torch.nn.Module):
    """Sinkhorn divergence of weighted point clouds, to be called as GeomLoss's class of that name.

    C = |x - y|^2 / 2 (half the squared distance, p = 2), eps = blur^2 and rho = reach^2 in units of C. The loss is
    S_eps = OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2, or OT_eps(a, b) with debias=False. It is a squared
    distance, no root is taken, and rounding can leave it a little below zero: clamp before taking one. reach None:
    masses must be equal, else ValueError. reach_x, reach_y override reach, one side each; gradients with a reach are
    those of the value returned.

    Calls: loss(x, y), or loss(a, x, b, y) with weights, or loss(None, a, x, None, b, y). x [N, D], y [M, D], a [N] or
    [N, 1], b likewise: a scalar. x [B, N, D], y [B, M, D], a [B, N] or [B, N, 1]: values [B], of B problems solved
    together, each to its own residual (with max_seconds one after another). Any float dtype, strides and device; y on
    that of x. Values are float64 if a cloud is, else float32: half-precision clouds are taken as they are and their
    gradients returned in their type. Differentiable twice in x, y, a and b, by the envelope theorem, and under
    autocast, which changes nothing. torch.compile leaves the call out of its graphs. torch.func's grad, vjp and jacrev
    give the same derivatives, and vmap solves what it maps as a batch; NotImplementedError for forward mode.

    potentials=True returns potentials (F, G) in the shapes of the weights, constants to autograd, instead of a value:
    f - f_self and g - g_self with debias, f and g without; <a, f> / |a| = <b, g> / |b| with reach None.

    Every solve ends on its residual, not on a schedule: tol (L1 marginal residual over the mass; None as of
    `transport.transport`: 1e-4, or with a RuntimeWarning what float32 allows), or n_iterations for a fixed number. At
    max_iterations, or max_seconds for each item of a batch, the warning NotConverged says how far it came. So scaling,
    diameter, truncate, cluster_scale and kernel change nothing: they are checked and otherwise ignored. verbose prints
    each result.

    backend "tensorized" and "online" go over all pairs of points, streamed. "multiscale" is FlashSinkhorn2, over the
    pairs that matter, for D of 1 to 6: fixed marginals, to a tolerance (1e-4 if None), one problem of a batch after
    another. What it does not offer raises ValueError. "auto" is multiscale for single clouds of D <= 6 with so
    many pairs that it pays (N M from 2^24 on the CPU, 2^34 on a GPU), where at most an eighth of them would be kept,
    which a sample tells, and where it offers what is asked for; else all pairs.

    Other losses, p = 1, other costs and cluster labels raise ValueError: they are GeomLoss's own.

    Source: Feydy et al. 2019 (1810.08278).
    """

    def __init__(
        self,
        loss: str = "sinkhorn",
        p: int = 2,
        blur: float = 0.05,
        reach: float | None = None,
        diameter: float | None = None,
        scaling: float = 0.5,
        truncate: float | None = 5,
        cost: Any = None,
        kernel: Any = None,
        cluster_scale: float | None = None,
        debias: bool = True,
        potentials: bool = False,
        verbose: bool = False,
        backend: str = "auto",
        *,
        reach_x: float | None = None,
        reach_y: float | None = None,
        tol: float | None = None,
        n_iterations: int | None = None,
        max_iterations: int = 1_000,
        max_seconds: float | None = None,
        precision: Precision | str = Precision.EXACT,
        hessian_tol: float | None = None,
    ):
        super().__init__()
        if loss in ELSEWHERE:
            raise ValueError(f"loss {loss!r} is not offered here, only 'sinkhorn': use geomloss.SamplesLoss for it")
        if loss != "sinkhorn":
            raise ValueError(f"loss must be 'sinkhorn', got {loss!r}")
        if p != 2:
            raise ValueError(f"p must be 2, got {p!r}: use geomloss.SamplesLoss for other exponents")
        if cost is not None:
            raise ValueError("cost must be None, for |x - y|^2 / 2: use geomloss.SamplesLoss for other costs")
        for name, flag in (("debias", debias), ("potentials", potentials)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        if not 0 < positive("scaling", scaling) < 1:
            raise ValueError(f"scaling must be a ratio in (0, 1), got {scaling:g}")
        for name, length in (("diameter", diameter), ("cluster_scale", cluster_scale), ("truncate", truncate)):
            if length is not None:
                positive(name, length)
        self.loss, self.p, self.cost, self.kernel, self.backend = loss, p, cost, kernel, backend
        self.diameter, self.scaling, self.truncate, self.cluster_scale = diameter, scaling, truncate, cluster_scale
        self.blur, self.reach, self.reach_x, self.reach_y = blur, reach, reach_x, reach_y
        self.debias, self.potentials, self.verbose = debias, potentials, verbose
        self.tol, self.n_iterations = tol, n_iterations
        self.max_iterations, self.max_seconds = max_iterations, max_seconds
        self.precision, self.hessian_tol = precision, hessian_tol
        self._options()

    @torch.compiler.disable
    def forward(self, *clouds: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The value, or the potentials, of the clouds in any of the call forms of the class."""
        a, x, b, y = _call(clouds)
        dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
        inputs = x, y, _weights("a", a, x), _weights("b", b, y)
        if not self.potentials:
            found, terms = apart(self._find, *inputs, maps=True)
            ot, divergence = attached(terms, *inputs, found[0].problem)
            return (ot if divergence is None else divergence).to(dtype)
        f, g = (potential.to(dtype) for potential in constants(self._find_potentials, *inputs, maps=True))
        return f.reshape(x.shape[:-1] if a is None else a.shape), g.reshape(y.shape[:-1] if b is None else b.shape)

    @torch.compiler.disable
    def transport(self, *clouds: torch.Tensor | None) -> Transport | list[Transport]:
        """All there is to know of the same call: values, linear cost, potentials, plan, residual, conventions.

        A list of them for a batch.
        """
        a, x, b, y = _call(clouds)
        inputs = x, y, _weights("a", a, x), _weights("b", b, y)
        found, terms = apart(self._find, *inputs)
        ot, divergence = attached(terms, *inputs, found[0].problem)
        if x.ndim == 3:
            return with_values(found, ot, divergence)
        return replace(found[0], ot=ot, divergence=divergence)

    def extra_repr(self) -> str:
        names = ("blur", "reach", "reach_x", "reach_y", "debias", "potentials", "tol", "n_iterations")
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None)
        return f"C = |x - y|^2 / 2, {settings}"

    def _options(self) -> dict[str, Any]:
        """Settings as `transport` takes them. ValueError in the names of this class."""
        reach_x = self.reach if self.reach_x is None else self.reach_x
        reach_y = self.reach if self.reach_y is None else self.reach_y
        if self.reach is not None:
            _squared("reach", self.reach)
        options = {
            "eps": _squared("blur", self.blur),
            "cost_scale": 0.5,
            "rho_x": None if reach_x is None else _squared("reach_x", reach_x),
            "rho_y": None if reach_y is None else _squared("reach_y", reach_y),
            "debias": self.debias,
            "tol": self.tol,
            "n_iterations": self.n_iterations,
            "max_iterations": self.max_iterations,
            "max_seconds": self.max_seconds,
            "precision": self.precision,
            "hessian_tol": self.hessian_tol,
        }
        check_backend(self.backend, options)
        return options

    def _find(
        self, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> tuple[Sequence[Transport], Sequence[Term]]:
        """One result a problem, and their terms, of x [..., n, d], y [..., m, d], a [..., n] and b [..., m]."""
        options, shape = self._options(), x.shape[:-2]
        multiscale = runs_multiscale(self.backend, x, y, options)
        x, y = (v[None].flatten(0, len(shape)) for v in (x, y))
        a, b = (v if v is None else v[None].flatten(0, len(shape)) for v in (a, b))
        if multiscale:
            parts = one_by_one(partial(find_multiscale, options=options), x, y, a, b)
        elif shape:
            parts = find_batch(x, y, a, b, **options)
        else:
            parts = one_by_one(partial(find, **options), x, y, a, b)
        results, terms = joined(parts, shape)
        if self.verbose:
            print(*results, sep="\n")
        return results, terms

    def _find_potentials(
        self, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(F, G), [..., n] and [..., m], of inputs as of `_find`."""
        results, (term, *_) = self._find(x, y, a, b)
        f, g = zip(*(self._potentials(result) for result in results), strict=True)
        return torch.stack(f).reshape(term.f.shape), torch.stack(g).reshape(term.g.shape)

    def _potentials(self, result: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        f, g = result.f, result.g
        if result.problem.balanced:
            f, g = balance(*result.inputs[2:], f, g)
        if result.f_self is None or result.g_self is None:
            return f, g
        return f - result.f_self, g - result.g_self


def _squared(name: str, length: Any) -> float:
    """ValueError unless the length and its square are positive finite numbers."""
    length = positive(name, length)
    square = length * length
    if not 0 < square < math.inf:
        raise ValueError(f"{name} must be a length whose square is a float64 number, got {length:g}")
    return square


def _call(
    clouds: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(a, x, b, y) from any call form; a and b are None for uniform weights."""
    labels: tuple[torch.Tensor | None, ...] = ()
    if len(clouds) == 2:
        (x, y), a, b = clouds, None, None
    elif len(clouds) == 4:
        a, x, b, y = clouds
    elif len(clouds) == 6:
        l_x, a, x, l_y, b, y = clouds
        labels = l_x, l_y
    else:
        raise ValueError(f"call with (x, y), (a, x, b, y) or (l_x, a, x, l_y, b, y), got {len(clouds)} arguments")
    if any(label is not None for label in labels):
        raise ValueError("cluster labels l_x, l_y must be None: this solver has no clusters to be given")
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor) or points.ndim not in (2, 3):
            kind = list(points.shape) if isinstance(points, torch.Tensor) else type(points).__name__
            raise ValueError(f"{name} must be a tensor [points, d] or [batch, points, d], got {kind}")
    assert x is not None and y is not None
    if x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2] or x.shape[:-2] == (0,):
        raise ValueError(
            f"x and y must both be [points, d], or batches of the same size of at least one, "
            f"got {list(x.shape)} and {list(y.shape)}"
        )
    return a, x, b, y


def _weights(name: str, weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor | None:
    """[points] or [batch, points]."""
    if weight is None:
        return None
    shape = points.shape[:-1]
    if not isinstance(weight, torch.Tensor) or weight.shape not in (shape, (*shape, 1)):
        kind = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"{name} must be a tensor {list(shape)} or {[*shape, 1]}, one weight a point, got {kind}")
    return weight.reshape(shape)

"""Problems that were solved apart, as one batch to autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .functions import Derivatives, Gradients, Term
from .transport import Transport

Part = tuple[Sequence[Transport], Sequence[Term]]  # of one problem, its terms without an axis for it, or of a batch


def one_by_one(
    find: Callable[..., tuple[Transport, list[Term]]],
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
) -> list[Part]:
    """find of each problem of x [B, n, d], y [B, m, d], a [B, n], b [B, m]."""
    parts: list[Part] = []
    of_a, of_b = ([None] * len(x) if weight is None else weight.unbind(0) for weight in (a, b))
    for problem in zip(x.unbind(0), y.unbind(0), of_a, of_b, strict=True):
        found, terms = find(*problem)
        parts.append(([found], terms))
    return parts


def joined(parts: Sequence[Part], shape: torch.Size) -> Part:
    """All as one batch of that shape: results in its order, and terms with its axes."""
    if len(parts) == 1 and parts[0][1][0].value.shape == shape:
        return parts[0]
    results = [result for found, _ in parts for result in found]
    terms = []
    for same in zip(*(terms for _, terms in parts), strict=True):
        sizes = [None if term.value.ndim == 0 else len(term.value) for term in same]
        value, f, g = (
            torch.cat([_batch(v, size) for v, size in zip(each, sizes, strict=True)]).unflatten(0, shape)
            for each in zip(*((term.value, term.f, term.g) for term in same), strict=True)
        )
        derivatives = _Joined(tuple(zip((term.derivatives for term in same), sizes, strict=True)), shape)
        terms.append(Term(value, f, g, derivatives, same[0].symmetric))
    return results, terms


def with_values(found: Sequence[Transport], ot: torch.Tensor, divergence: torch.Tensor | None) -> list[Transport]:
    """Results with ot [B] and divergence [B] in the place of theirs."""
    of_each = ot.unbind(0), [None] * len(found) if divergence is None else divergence.unbind(0)
    return [replace(one, ot=v, divergence=w) for one, v, w in zip(found, *of_each, strict=True)]


@dataclass(frozen=True)
class _Joined:
    """Derivatives of parts of one problem (None) or of so many, one after another in a batch of that shape."""

    parts: tuple[tuple[Derivatives, int | None], ...]
    shape: torch.Size

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        return self._each(lambda part, some, _: part.gradients(some, needed), tensors, ())

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        return self._each(lambda part, some, along: part.hessian_times(some, along), tensors, direction)

    def _each(
        self, compute: Callable[[Derivatives, Any, Any], Gradients], *groups: Sequence[torch.Tensor | None]
    ) -> Gradients:
        """compute of each part with its share of the groups, put together."""
        flat = [[v if v is None else v.flatten(0, len(self.shape) - 1) for v in group] for group in groups]
        found, start = [], 0
        for part, size in self.parts:
            share = start if size is None else slice(start, start + size)
            own = compute(part, *(tuple(v if v is None else v[share] for v in group) for group in flat))
            found.append([v if v is None else _batch(v, size) for v in own])
            start += size or 1
        return tuple(
            None if each[0] is None else torch.cat(each).unflatten(0, self.shape) for each in zip(*found, strict=True)
        )


def _batch(values: torch.Tensor, size: int | None) -> torch.Tensor:
    return values[None] if size is None else values

"""Solves and their derivatives as functions of autograd and of torch.func's reverse-mode transforms and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

NO_FORWARD_MODE = (
    "OT values have no forward mode (jvp, jacfwd, hessian): use torch.func.vjp, jacrev, or jacrev(grad(...)) for a "
    "Hessian"
)
Gradients = tuple[torch.Tensor | None, ...]
Rest = TypeVar("Rest")


class Derivatives(Protocol):
    """Of values in their inputs, given these and constants."""

    def gradients(self, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> Gradients:
        """Of the values in each input; None where it is not needed."""

    def hessian_times(self, tensors: Sequence[torch.Tensor], direction: Gradients) -> Gradients:
        """Change of the gradients along a direction in the inputs; None is zero."""


@dataclass(frozen=True)
class Term:
    """An OT value that was solved for, with any batch axes in front: potentials f [n], g [m], all constants.

    symmetric: of a cloud with itself, differentiated at g on both sides.
    """

    value: torch.Tensor
    f: torch.Tensor
    g: torch.Tensor
    derivatives: Derivatives
    symmetric: bool = False

    def attached(self, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The value as a function that is differentiated in x [n, d], y [m, d], a [n] and b [m]."""
        if self.symmetric:
            return _Envelope.apply(self.value, self.derivatives, 2, x, a, self.g)
        return _Envelope.apply(self.value, self.derivatives, 4, x, y, a, b, self.f, self.g)


def apart(
    solve: Callable[..., tuple[Rest, Sequence[Term]]], *inputs: torch.Tensor | None, maps: bool = False
) -> tuple[Rest, list[Term]]:
    """solve(*inputs) where no transform sees it, and nothing differentiates it: its inputs are plain tensors, for
    kernels, threads and numbers read back. The transforms see its terms' tensors.

    maps: whether solve takes batch axes in front of its inputs, which is what it gets under vmap.
    """

    def flat(*inputs: torch.Tensor | None) -> tuple[Any, ...]:
        rest, terms = solve(*inputs)
        kinds = [(term.derivatives, term.symmetric) for term in terms]
        return (rest, kinds), *(tensor for term in terms for tensor in (term.value, term.f, term.g))

    (rest, kinds), *tensors = constants(flat, *inputs, maps=maps)
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], kinds, strict=True)
    return rest, [Term(value, f, g, *kind) for value, f, g, kind in triples]


def constants(solve: Callable[..., tuple[Any, ...]], *inputs: torch.Tensor | None, maps: bool = False) -> Any:
    """As `apart`, of a function that returns a tuple of tensors, and of what no transform sees."""
    return _Constants.apply(solve, maps, *inputs)


def full_precision(tensor: torch.Tensor) -> torch.autocast:
    """Products inside are chosen for their accuracy: autocast must not touch them."""
    return torch.autocast(tensor.device.type, enabled=False)


class _ReverseMode(torch.autograd.Function):
    """Without forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any):
        raise NotImplementedError(NO_FORWARD_MODE)


class _Constants(_ReverseMode):
    """solve(*inputs) of (solve, maps, *inputs)."""

    @staticmethod
    def forward(solve: Callable[..., tuple[Any, ...]], maps: bool, *inputs: torch.Tensor | None):
        return solve(*(v.detach() if isinstance(v, torch.Tensor) else v for v in inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]):
        ctx.count = len(inputs)
        ctx.mark_non_differentiable(*(v for v in output if isinstance(v, torch.Tensor)))

    @staticmethod
    def backward(ctx: Any, *upstream: Any):
        return (None,) * ctx.count

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], solve: Any, maps: bool, *inputs: torch.Tensor | None):
        if not maps:
            raise NotImplementedError("transport and ot_value do not vmap: use torch.func.vmap on a SamplesLoss")
        output = _Constants.apply(solve, maps, *_in_front(info, in_dims[2:], inputs))
        return output, tuple(0 if isinstance(v, torch.Tensor) else None for v in output)


class _Envelope(_ReverseMode):
    """The value as given, or values [B], with the derivatives of its problem attached: (value, derivatives, count,
    *tensors), of which the first `count` tensors are differentiated and the rest are constants."""

    @staticmethod
    def forward(value: torch.Tensor, derivatives: Derivatives, count: int, *tensors: torch.Tensor):
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor):
        _, ctx.derivatives, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor):
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[3 : 3 + ctx.count]
        gradients = _Gradient.apply(ctx.derivatives, needed, *tensors)
        scaled = (gradient if gradient is None else _times(upstream[0], gradient) for gradient in gradients)
        return None, None, None, *scaled, *(None for _ in tensors[ctx.count :])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], value: torch.Tensor, derivatives: Any, count: int, *tensors: Any):
        first, *others = _in_front(info, (in_dims[0], *in_dims[3:]), (value, *tensors))
        return _Envelope.apply(first, derivatives, count, *others), 0


class _Gradient(_ReverseMode):
    """The gradients themselves, as functions of (derivatives, needed, *tensors)."""

    @staticmethod
    def forward(derivatives: Derivatives, needed: Sequence[bool], *tensors: torch.Tensor):
        with full_precision(tensors[0]):
            return derivatives.gradients(tensors, needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients):
        ctx.derivatives, _, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *direction: torch.Tensor | None):
        tensors, count = ctx.saved_tensors, len(direction)
        inputs, others = [_NoThirdDerivative.apply(tensor) for tensor in tensors[:count]], tensors[count:]
        changes = _HessianProduct.apply(ctx.derivatives, count, *direction, *inputs, *others)
        return None, None, *changes, *(None for _ in others)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], derivatives: Any, needed: Sequence[bool], *tensors: torch.Tensor):
        return _with_axes(_Gradient.apply(derivatives, needed, *_in_front(info, in_dims[2:], tensors)))


class _HessianProduct(_ReverseMode):
    """The Hessian times a direction, linear in it and symmetric: its own transpose. (derivatives, count, *tensors) are
    the `count` tensors of the direction, as many that the value is differentiated in, and the constants."""

    @staticmethod
    def forward(derivatives: Derivatives, count: int, *tensors: torch.Tensor | None):
        direction, at = tensors[:count], [tensor for tensor in tensors[count:] if tensor is not None]
        with full_precision(at[0]):
            return derivatives.hessian_times(at, direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients):
        ctx.derivatives, ctx.count, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.given = [v is not None for v in tensors[: ctx.count]]
        ctx.save_for_backward(*tensors[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None):
        at, count = ctx.saved_tensors, ctx.count
        changes = _HessianProduct.apply(ctx.derivatives, count, *upstream, *at)
        changes = (change if is_given else None for change, is_given in zip(changes, ctx.given, strict=True))
        refused = (tensor.new_zeros(()).expand_as(tensor) for tensor in at[:count])
        return None, None, *changes, *refused, *(None for _ in at[count:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], derivatives: Any, count: int, *tensors: torch.Tensor | None):
        in_front = _in_front(info, in_dims[2:], tensors)
        if any(dim is not None for dim in in_dims[2 + count :]):
            return _with_axes(_HessianProduct.apply(derivatives, count, *in_front))
        direction, at = in_front[:count], tensors[count:]  # directions at one place
        along = (tuple(v if v is None else v[k] for v in direction) for k in range(info.batch_size))
        found = zip(*(_HessianProduct.apply(derivatives, count, *one, *at) for one in along), strict=True)
        return _with_axes(tuple(None if each[0] is None else torch.stack(each) for each in found))


class _NoThirdDerivative(_ReverseMode):
    """Identity, through which nothing can be differentiated."""

    @staticmethod
    def forward(tensor: torch.Tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor):
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor):
        raise NotImplementedError("OT values are differentiable twice, not three times: detach the second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tensor: torch.Tensor):
        return _NoThirdDerivative.apply(tensor), in_dims[0]


def _times(upstream: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """In the gradient's dtype; upstream: as the values, a scalar or [B]."""
    return upstream.to(gradient.dtype).reshape(upstream.shape + (1,) * (gradient.ndim - upstream.ndim)) * gradient


def _in_front(
    info: Any, in_dims: Sequence[int | None], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """All with the mapped axis in front, also those that had none."""
    return [
        v if v is None else v.expand(info.batch_size, *v.shape) if dim is None else v.movedim(dim, 0)
        for v, dim in zip(tensors, in_dims, strict=True)
    ]


def _with_axes(outputs: Gradients) -> tuple[Gradients, tuple[int | None, ...]]:
    """Where the mapped axis of each is, as vmap rules say it."""
    return outputs, tuple(None if v is None else 0 for v in outputs)

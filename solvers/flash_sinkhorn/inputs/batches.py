"""The checks of a batch of problems, with one look at all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .checks import Inputs, check_points, check_values, checked_weights, reach, span, unit
from .far import Far, Seen
from .survey import survey_batch

ALIKE = 2.0**8  # in units of one 2^8 times as wide a cloud's coordinates are 2 at most: an fp16 pair holds 22 bits


@dataclass(frozen=True)
class Batch:
    """`Inputs` of B problems: x [B, n, d], y [B, m, d], a [B, n], b [B, m], centre [B, d], and units and masses [B]."""

    x: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    centre: torch.Tensor
    units: tuple[float, ...]
    masses: tuple[float, ...]
    far_x: Far | None = None
    far_y: Far | None = None

    @staticmethod
    def of(inputs: Inputs) -> Batch:
        """One problem."""
        x, y, a, b, centre = (tensor[None] for tensor in (inputs.x, inputs.y, inputs.a, inputs.b, inputs.centre))
        return Batch(x, y, a, b, centre, (inputs.unit,), (inputs.mass,), inputs.far_x, inputs.far_y)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of `problem`."""
        return self.x, self.y, self.a, self.b, self.centre

    @property
    def log_mass(self) -> torch.Tensor | float:
        """[B, 1], or that of a single problem."""
        logs = [math.log(mass) for mass in self.masses]
        return logs[0] if len(logs) == 1 else self.centre.new_tensor(logs)[:, None]

    def extended(
        self,
        f: torch.Tensor,
        g: torch.Tensor,
        *,
        eps: float,
        cost_scale: float,
        rho_x: float | None = None,
        rho_y: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """f [B, n], g [B, m], for the weights as given, with those of far points in their place: half-steps from the
        opposite one."""
        sides = (
            (self.far_x, f, rho_x, self.y, self.b, g),
            (self.far_y, g, rho_y, self.x, self.a, f),
        )
        found = []
        for far, own, rho, points, weight, opposite in sides:
            if far is not None:
                seen = Seen.of(points, weight, opposite + eps * self.log_mass, eps=eps, cost_scale=cost_scale)
                damping = 1.0 if rho is None else rho / (rho + eps)
                own = far.put(own, damping * far.potentials(seen))
            found.append(own)
        return found[0], found[1]


def problem(unit: float, *tensors: torch.Tensor) -> Inputs:
    """Of tensors x, y, a, b and centre; whatever their masses, they count as one."""
    x, y, a, b, centre = tensors
    return Inputs(x, y, a, b, centre, unit, mass=1.0, mass_x=1.0, mass_y=1.0)


def checked_batch(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    eps: float,
    cost_scale: float,
    balanced: bool = True,
) -> Batch:
    """`checked_inputs` of x [B, n, d], y [B, m, d], a [B, n] and b [B, m], with one look at the device,
    and one more a cloud where there are points without weight.

    Units are those of the widest clouds, except of clouds so narrow that it would cost them digits: units are numbers
    that recordings are made for, and alike they do not change with every batch.
    """
    check_points(x[0], y[0])
    a, b = _weights("a", a, x), _weights("b", b, y)
    dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x, y = x.detach().to(dtype).contiguous(), y.detach().to(dtype).contiguous()
    found, sums = survey_batch(x, a, y, b)
    for of_x, of_y in found:
        check_values(of_x, of_y, d=x.shape[2], eps=eps, cost_scale=cost_scale, balanced=balanced)
    numbers = [
        [1.0 / of_x.mass, 1.0 / of_y.mass, 0.5 / of_x.mass, 0.5 / of_y.mass, *reach(*span(of_x, of_y))]
        for of_x, of_y in found
    ]
    by_mass_x, by_mass_y, half_x, half_y, least, most = sums.new_tensor(numbers).T[..., None]
    masses = [1.0] * len(found)
    if balanced:
        masses = [(of_x.mass + of_y.mass) / 2 for of_x, of_y in found]
        a, b = a * by_mass_x, b * by_mass_y
    far_x = far_y = None
    if any(0 in (of_x.least_weight, of_y.least_weight) for of_x, of_y in found):
        low, high = least[..., None].to(dtype), most[..., None].to(dtype)
        given_x, given_y = x, y
        x, y = x.clamp(low, high), y.clamp(low, high)
        far_x, far_y = Far.of(given_x, x), Far.of(given_y, y)
    centre = torch.addcmul(sums[:, 0] * half_x, sums[:, 1], half_y).to(dtype).double()
    widths = [high - low for low, high in (span(of_x, of_y) for of_x, of_y in found)]
    widest = unit(max(widths))
    units = [widest if widest <= ALIKE * unit(width) else unit(width) for width in widths]
    return Batch(x, y, a, b, centre, tuple(units), tuple(masses), far_x, far_y)


def _weights(name: str, weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor:
    """float64 [B, points], contiguous."""
    one = checked_weights(name, weight if weight is None else weight[0], points[0])
    return (one.expand(points.shape[:2]) if weight is None else weight.detach().double()).contiguous()

"""What the checks must know of a problem's values, from one look at the clouds and one readback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Summary(NamedTuple):
    """Of one cloud: how many coordinates and weights are NaN or infinite, the least and largest coordinate of the
    points with weight, the least weight, and the mass. Meaningless beyond the counts unless these are zero."""

    bad_coordinates: float
    bad_weights: float
    low: float
    high: float
    least_weight: float
    mass: float


MASS = Summary._fields.index("mass")


@dataclass(frozen=True)
class Survey:
    """One cloud's summary, and sum_i weight_i x_i: float64 [d], on the cloud's device."""

    summary: Summary
    weighted_sum: torch.Tensor


def survey(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> tuple[Survey, Survey]:
    """x [n, d], y [m, d] float32 or float64; a [n], b [m] float64; all on one device."""
    ((of_x, of_y),), sums = survey_batch(x[None], a[None], y[None], b[None])
    return Survey(of_x, sums[0, 0]), Survey(of_y, sums[0, 1])


def survey_batch(
    x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor
) -> tuple[list[tuple[Summary, Summary]], torch.Tensor]:
    """Of B problems, [B, ...] each: both clouds' summaries, and their weighted sums [B, 2, d]."""
    numbers, sums = numbers_of(x, a, y, b)
    return [(Summary(*of_x), Summary(*of_y)) for of_x, of_y in numbers.tolist()], sums


def numbers_of(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`survey_batch` before the readback, which waits for the device: summaries are rows of numbers [B, 2, 6]."""
    if x.device.type == "cpu":
        found = [
            [torch.stack(of_both) for of_both in zip(_summarise(*of_x), _summarise(*of_y), strict=True)]
            for of_x, of_y in zip(zip(x, a, strict=True), zip(y, b, strict=True), strict=True)
        ]
        numbers, sums = (torch.stack(of_all) for of_all in zip(*found, strict=True))
        return numbers, sums
    from .triton_survey import summarise  # Triton is there only where a GPU is

    return summarise(x, a, y, b)


def _summarise(points: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summary as a tensor [6], and the weighted sum [d]; float64."""
    numbers = points.new_empty(6, dtype=torch.float64)
    numbers[0] = (~torch.isfinite(points)).sum()
    numbers[1] = (~torch.isfinite(weight)).sum()
    counted = points if bool((weight > 0).all()) else points[weight > 0]
    numbers[2], numbers[3] = torch.aminmax(counted) if len(counted) else (0.0, 0.0)
    numbers[4], numbers[5] = weight.amin(), weight.sum()
    return numbers, (points.T @ weight.to(points.dtype)).double()

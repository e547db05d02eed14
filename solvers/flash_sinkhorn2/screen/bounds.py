"""The largest exponent that a pair of nodes can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .planes import Level


def largest_exponents(x: Level, y: Level, i: Tensor, j: Tensor, k: float) -> Tensor:
    """Upper bounds [pairs] of u + v - k |x - y|^2 over the points with weight of nodes i of x and j of y.

    With the planes for the potentials this is separable: per axis the maximum over |s| <= l, |t| <= h of
    G s + H t - k (D + s - t)^2. Along (1, 1) the function is linear with slope G + H, so the maximum has s or t at the
    end that the sign of G + H favours; the other one is at the top of a parabola, clamped.
    """
    bound = x.offset[i] + y.offset[j]
    for axis in range(x.centre.shape[1]):
        G, H = x.slope[i, axis], y.slope[j, axis]
        l, h = x.half[i, axis], y.half[j, axis]
        D = x.centre[i, axis] - y.centre[j, axis]
        rises = G + H > 0
        s_end, t_end = torch.where(rises, l, -l), torch.where(rises, h, -h)
        t = torch.clamp(D + s_end + H / (2 * k), -h, h)
        s = torch.clamp(t_end - D + G / (2 * k), -l, l)
        with_s_end = G * s_end + H * t - k * (D + s_end - t).square()
        with_t_end = G * s + H * t_end - k * (D + s - t_end).square()
        bound += torch.maximum(with_s_end, with_t_end)
    return bound

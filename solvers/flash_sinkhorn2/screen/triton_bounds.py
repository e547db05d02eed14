"""`bounds.largest_exponents` on a GPU: one launch, no temporaries."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .planes import Level

PAIRS = 256  # a program


def largest_exponents(x: Level, y: Level, i: Tensor, j: Tensor, k: float) -> Tensor:
    """Upper bounds [pairs] float64 of u + v - k |x - y|^2 over the points with weight of nodes i of x and j of y."""
    bound = torch.empty(len(i), dtype=torch.float64, device=i.device)
    if not len(i):
        return bound
    sides = [t.contiguous() for side in (x, y) for t in (side.centre, side.half, side.slope, side.offset)]
    scale = torch.full((1,), k, dtype=torch.float64, device=i.device)  # an argument would be rounded to float32
    context: Any = torch.cuda.device(i.device) if i.is_cuda else nullcontext()
    with context:
        grid = (triton.cdiv(len(i), PAIRS),)
        exponent_kernel[grid](*sides, i, j, scale, bound, len(i), D=x.centre.shape[1], BP=PAIRS)
    return bound


@triton.jit
def exponent_kernel(
    x_centre, x_half, x_slope, x_offset,  # [nodes, D] and [nodes]
    y_centre, y_half, y_slope, y_offset,
    rows, cols,  # [pairs] int64
    scale,  # [1]
    bound,  # [pairs]
    pairs,
    D: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = pair < pairs
    i = tl.load(rows + pair, inside, other=0)
    j = tl.load(cols + pair, inside, other=0)
    k = tl.load(scale)
    total = tl.load(x_offset + i) + tl.load(y_offset + j)
    for axis in tl.static_range(D):
        G, H = tl.load(x_slope + i * D + axis), tl.load(y_slope + j * D + axis)
        l, h = tl.load(x_half + i * D + axis), tl.load(y_half + j * D + axis)
        apart = tl.load(x_centre + i * D + axis) - tl.load(y_centre + j * D + axis)
        rises = G + H > 0
        s_end, t_end = tl.where(rises, l, -l), tl.where(rises, h, -h)
        t = tl.minimum(tl.maximum(apart + s_end + H / (2 * k), -h), h)
        s = tl.minimum(tl.maximum(t_end - apart + G / (2 * k), -l), l)
        by_s, by_t = apart + s_end - t, apart + s - t_end
        total += tl.maximum(G * s_end + H * t - k * by_s * by_s, G * s + H * t_end - k * by_t * by_t)
    tl.store(bound + pair, total, inside)

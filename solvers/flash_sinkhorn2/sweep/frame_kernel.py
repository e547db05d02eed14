"""Triton kernel: the frames of a cloud's tiles at a potential, and the cloud packed for the sweep; see `kernels.py`."""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "tiles"])
def frame_kernel(
    local, stride_point, stride_coordinate, lost, centre, stride_centre, potential, log2_weight, offset,
    packed, shifted, frame, scale, n, tiles,
    D: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Frames of TILES tiles: frame [2 D + 2, tiles] is U, X, c and the largest part of an exponent; packed [D + 1, n]
    is dx and rest. SHIFT adds offset to the rest, and to the potential for `shifted`.

    The plane is fitted to the points with weight, axis after axis, twice: any plane is valid, a close one is exact.

    dx are float32 and have lost e [n, D]. Now k |x + e - y|^2 = k |x - y|^2 + 2 k e.(x - c) + k |e|^2 - 2 k e.(y - c):
    all but the last term is taken off the rest, and that is small, for y that matter are close to the image c.
    """
    k = tl.load(scale)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    inside = (tile < tiles)[:, None]
    tile = tl.minimum(tile, tiles - 1)
    point = tile[:, None] * T + tl.arange(0, T)[None, :]  # [TILES, T]
    b_potential = tl.load(potential + point)
    counts = tl.load(log2_weight + point) > float("-inf")
    count = tl.maximum(tl.sum(counts.to(tl.float32), 1), 1.0)
    level = tl.sum(tl.where(counts, b_potential, 0.0), 1) / count
    left = tl.where(counts, b_potential - level[:, None], 0.0).to(tl.float32)
    coordinates = ()
    deviations = ()
    slopes = ()
    for d in tl.static_range(D):
        dx = tl.load(local + point.to(tl.int64) * stride_point + d * stride_coordinate)
        mean = tl.sum(tl.where(counts, dx, 0.0), 1) / count
        coordinates = coordinates + (dx,)
        deviations = deviations + (tl.where(counts, dx - mean[:, None], 0.0),)
        slopes = slopes + (tl.zeros([TILES], tl.float32),)
    for _ in tl.static_range(2):
        fitted = ()
        for d in tl.static_range(D):
            square = tl.sum(deviations[d] * deviations[d], 1)
            step = tl.sum(left * deviations[d], 1) / tl.where(square > 0, square, 1.0)
            left -= step[:, None] * deviations[d]
            fitted = fitted + (slopes[d] + step,)
        slopes = fitted
    rest = b_potential - level[:, None]
    square = tl.zeros([TILES, T], tl.float64)
    for d in tl.static_range(D):
        dx = coordinates[d].to(tl.float64)
        slope = slopes[d].to(tl.float64)
        mean = tl.sum(tl.where(counts, coordinates[d], 0.0), 1) / count
        x = tl.load(centre + tile * stride_centre + d)
        rest -= slope[:, None] * (dx - mean.to(tl.float64)[:, None])
        level -= slope * mean.to(tl.float64)
        square += dx * dx
        e = tl.load(lost + point.to(tl.int64) * D + d).to(tl.float64)
        rest -= e * (2.0 * k * dx + slope[:, None] + k * e)
        tl.store(packed + d * n.to(tl.int64) + point, coordinates[d], inside)
        tl.store(frame + (1 + d) * tiles + tile, x)
        tl.store(frame + (1 + D + d) * tiles + tile, x - slope / (2.0 * k))
    rest -= k * square
    part = tl.maximum(tl.maximum(tl.abs(rest), k * square), 0.0)
    tl.store(frame + tile, level)
    tl.store(frame + (1 + 2 * D) * tiles + tile, tl.max(part, 1))
    if SHIFT:
        b_offset = tl.load(offset + point)
        rest += b_offset
        tl.store(shifted + point, b_potential + b_offset, inside)
    tl.store(packed + D * n.to(tl.int64) + point, rest.to(tl.float32), inside)

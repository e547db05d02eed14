"""The survey of two clouds, or of a batch of pairs, on a GPU: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sweeps.launching import launch

ROWS, COORDINATES = 32, 32  # a block of one program
LARGEST_PROGRAMS = 132  # of each cloud; each of them loops over its blocks
NUMBERS = tl.constexpr(6)  # of `survey.Summary`, in its order


def summarise(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x [B, n, d] with weights a [B, n] and of y [B, m, d] with weights b [B, m], weights contiguous: their
    `survey.Summary` [B, 2, 6], weighted sums [B, 2, d]; float64."""
    count, n, d = x.shape
    m = y.shape[1]
    programs = min(-(-max(n, m) // ROWS), LARGEST_PROGRAMS)
    width = NUMBERS.value + d
    found, partial = (x.new_empty(*shape, width, dtype=torch.float64) for shape in ((count, 2), (count, 2, programs)))
    launch(
        survey_kernel, (count, programs, 2),
        (x, *x.stride(), a, n, y, *y.stride(), b, m, found, partial, x.new_zeros(2 * count, dtype=torch.int32)),
        {"D": d, "BM": ROWS, "BD": min(COORDINATES, triton.next_power_of_2(d))},
    )  # fmt: skip
    return found[..., : NUMBERS.value], found[..., NUMBERS.value :]


@triton.jit
def _reduce(found, partial, n_programs, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """The summary and weighted sum [6 + D] from partial [n_programs, 6 + D], in a fixed order."""
    WIDTH: tl.constexpr = NUMBERS + D
    bad_coordinates = tl.zeros([BK], tl.float64)
    bad_weights = tl.zeros([BK], tl.float64)
    low = tl.full([BK], float("inf"), tl.float64)
    high = tl.full([BK], float("-inf"), tl.float64)
    least = tl.full([BK], float("inf"), tl.float64)
    mass = tl.zeros([BK], tl.float64)
    for start in range(0, n_programs, BK):
        k = start + tl.arange(0, BK)
        inside = k < n_programs
        source = partial + k * WIDTH  # written by other multiprocessors, hence .cg
        bad_coordinates += tl.load(source, inside, other=0.0, cache_modifier=".cg")
        bad_weights += tl.load(source + 1, inside, other=0.0, cache_modifier=".cg")
        low = tl.minimum(low, tl.load(source + 2, inside, other=float("inf"), cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(source + 3, inside, other=float("-inf"), cache_modifier=".cg"))
        least = tl.minimum(least, tl.load(source + 4, inside, other=float("inf"), cache_modifier=".cg"))
        mass += tl.load(source + 5, inside, other=0.0, cache_modifier=".cg")
    tl.store(found, tl.sum(bad_coordinates, 0))
    tl.store(found + 1, tl.sum(bad_weights, 0))
    tl.store(found + 2, tl.min(low, 0))
    tl.store(found + 3, tl.max(high, 0))
    tl.store(found + 4, tl.min(least, 0))
    tl.store(found + 5, tl.sum(mass, 0))
    for d_start in range(0, D, BD):
        dim = d_start + tl.arange(0, BD)
        total = tl.zeros([BD], tl.float64)
        for start in range(0, n_programs, BK):
            k = start + tl.arange(0, BK)
            source = partial + k[:, None] * WIDTH + NUMBERS + dim[None, :]
            mask = (k < n_programs)[:, None] & (dim < D)[None, :]
            total += tl.sum(tl.load(source, mask, other=0.0, cache_modifier=".cg"), 0)
        tl.store(found + NUMBERS + dim, total, dim < D)


@triton.jit
def _survey_cloud(
    points, stride_point, stride_coordinate, weight, n, found, partial, arrivals,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program k of a cloud surveys blocks k, k + programs, ... of BM points into its row of partial; the last of the
    cloud to arrive reduces them."""
    program, n_programs = tl.program_id(1), tl.num_programs(1)
    bad_coordinates = tl.zeros([BM], tl.float64)
    bad_weights = tl.zeros([BM], tl.float64)
    low = tl.full([BM], float("inf"), tl.float64)
    high = tl.full([BM], float("-inf"), tl.float64)
    least = tl.full([BM], float("inf"), tl.float64)
    mass = tl.zeros([BM], tl.float64)
    cloud = 2 * tl.program_id(0) + tl.program_id(2)
    own = partial + (cloud * n_programs + program).to(tl.int64) * (NUMBERS + D)
    for start in range(0, D, BD):
        dim = start + tl.arange(0, BD)
        total = tl.zeros([BD], tl.float64)
        for block in range(program, tl.cdiv(n, BM), n_programs):
            row = block * BM + tl.arange(0, BM)
            inside = row < n
            b_weight = tl.load(weight + row, inside, other=0.0)
            mask = inside[:, None] & (dim < D)[None, :]
            offsets = row.to(tl.int64)[:, None] * stride_point + dim[None, :] * stride_coordinate
            value = tl.load(points + offsets, mask, other=0.0).to(tl.float64)
            bad_coordinates += tl.sum(tl.where(value - value == 0.0, 0.0, 1.0), 1)
            counted = mask & (b_weight > 0.0)[:, None]
            low = tl.minimum(low, tl.min(tl.where(counted, value, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(counted, value, float("-inf")), 1))
            total += tl.sum(b_weight[:, None] * value, 0)
            if start == 0:
                bad_weights += tl.where(b_weight - b_weight == 0.0, 0.0, 1.0)
                least = tl.minimum(least, tl.where(inside, b_weight, float("inf")))
                mass += b_weight
        tl.store(own + NUMBERS + dim, total, dim < D)
    tl.store(own, tl.sum(bad_coordinates, 0))
    tl.store(own + 1, tl.sum(bad_weights, 0))
    tl.store(own + 2, tl.min(low, 0))
    tl.store(own + 3, tl.max(high, 0))
    tl.store(own + 4, tl.min(least, 0))
    tl.store(own + 5, tl.sum(mass, 0))
    tl.debug_barrier()
    if tl.atomic_add(arrivals + cloud, 1, sem="acq_rel") == n_programs - 1:
        partial += (cloud * n_programs).to(tl.int64) * (NUMBERS + D)
        _reduce(found + cloud * (NUMBERS + D), partial, n_programs, D, BD, 32)


@triton.jit(do_not_specialize=["x_stride_problem", "n", "y_stride_problem", "m"])
def survey_kernel(
    x, x_stride_problem, x_stride, x_stride_coordinate, a, n, y, y_stride_problem, y_stride, y_stride_coordinate, b, m,
    found, partial, arrivals, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Programs (p, k, 0) survey x of problem p, programs (p, k, 1) y. found [B, 2, 6 + D], partial [B, 2, programs,
    6 + D]: float64; arrivals: int32 [B, 2], zeros."""
    problem = tl.program_id(0).to(tl.int64)
    if tl.program_id(2) == 0:
        x += problem * x_stride_problem
        a += problem * n
        _survey_cloud(x, x_stride, x_stride_coordinate, a, n, found, partial, arrivals, D, BM, BD)
    else:
        y += problem * y_stride_problem
        b += problem * m
        _survey_cloud(y, y_stride, y_stride_coordinate, b, m, found, partial, arrivals, D, BM, BD)

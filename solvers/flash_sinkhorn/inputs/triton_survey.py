"""The survey of two clouds on a GPU: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sweeps.launching import launch

ROWS, COORDINATES = 32, 32  # a block of one program
LARGEST_PROGRAMS = 132  # of each cloud; each of them loops over its blocks
NUMBERS = tl.constexpr(6)  # of `survey.Summary`, in its order


def summarise(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x with weights a and of y with weights b: their `survey.Summary` [2, 6], weighted sums [2, d]; float64."""
    d = x.shape[1]
    programs = min(-(-max(len(x), len(y)) // ROWS), LARGEST_PROGRAMS)
    numbers, sums, partial = (
        x.new_empty(shape, dtype=torch.float64)
        for shape in ((2, NUMBERS.value), (2, d), (2, programs, NUMBERS.value + d))
    )
    launch(
        survey_kernel, (programs, 2, 1),
        (x, *x.stride(), a, len(x), y, *y.stride(), b, len(y), numbers, sums, partial,
         x.new_zeros(2, dtype=torch.int32)),
        {"D": d, "BM": ROWS, "BD": min(COORDINATES, triton.next_power_of_2(d))},
    )  # fmt: skip
    return numbers, sums


@triton.jit
def _reduce(numbers, sums, partial, n_programs, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """numbers [6] and sums [D] from partial [n_programs, 6 + D], in a fixed order."""
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
    tl.store(numbers, tl.sum(bad_coordinates, 0))
    tl.store(numbers + 1, tl.sum(bad_weights, 0))
    tl.store(numbers + 2, tl.min(low, 0))
    tl.store(numbers + 3, tl.max(high, 0))
    tl.store(numbers + 4, tl.min(least, 0))
    tl.store(numbers + 5, tl.sum(mass, 0))
    for d_start in range(0, D, BD):
        dim = d_start + tl.arange(0, BD)
        total = tl.zeros([BD], tl.float64)
        for start in range(0, n_programs, BK):
            k = start + tl.arange(0, BK)
            source = partial + k[:, None] * WIDTH + NUMBERS + dim[None, :]
            mask = (k < n_programs)[:, None] & (dim < D)[None, :]
            total += tl.sum(tl.load(source, mask, other=0.0, cache_modifier=".cg"), 0)
        tl.store(sums + dim, total, dim < D)


@triton.jit
def _survey_cloud(
    points, stride_point, stride_coordinate, weight, n, numbers, sums, partial, arrivals,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program k surveys blocks k, k + programs, ... of BM points into partial[k]; the last to arrive reduces that."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    bad_coordinates = tl.zeros([BM], tl.float64)
    bad_weights = tl.zeros([BM], tl.float64)
    low = tl.full([BM], float("inf"), tl.float64)
    high = tl.full([BM], float("-inf"), tl.float64)
    least = tl.full([BM], float("inf"), tl.float64)
    mass = tl.zeros([BM], tl.float64)
    own = partial + program * (NUMBERS + D)
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
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == n_programs - 1:
        _reduce(numbers, sums, partial, n_programs, D, BD, 32)


@triton.jit(do_not_specialize=["n", "m"])
def survey_kernel(
    x, x_stride, x_stride_coordinate, a, n, y, y_stride, y_stride_coordinate, b, m, numbers, sums, partial, arrivals,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Programs (k, 0) survey x, programs (k, 1) y. numbers [2, 6], sums [2, D], partial [2, programs, 6 + D]: float64;
    arrivals: int32 [2], zeros."""
    if tl.program_id(1) == 0:
        _survey_cloud(x, x_stride, x_stride_coordinate, a, n, numbers, sums, partial, arrivals, D, BM, BD)
    else:
        partial += tl.num_programs(0) * (NUMBERS + D)
        _survey_cloud(
            y, y_stride, y_stride_coordinate, b, m, numbers + NUMBERS, sums + D, partial, arrivals + 1, D, BM, BD
        )

"""The survey of a cloud on a GPU: one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .launching import launch

ROWS, COORDINATES = 32, 32  # a block of one program
LARGEST_PROGRAMS = 264  # two a multiprocessor; each of them loops over its blocks
NUMBERS = tl.constexpr(6)  # of `survey.Summary`, in its order


def summarise(clouds: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every (points, weight): its `survey.Summary` as a tensor [6], and its weighted sum [d]; both float64."""
    found = []
    for points, weight in clouds:
        n, d = points.shape
        programs = min(-(-n // ROWS), LARGEST_PROGRAMS)
        buffer = points.new_empty(programs + 1, NUMBERS.value + d, dtype=torch.float64)
        launch(
            survey_kernel, (programs, 1, 1),
            (points, *points.stride(), weight, n, buffer, points.new_zeros(1, dtype=torch.int32)),
            {"D": d, "BM": ROWS, "BD": min(COORDINATES, triton.next_power_of_2(d))},
        )  # fmt: skip
        found.append((buffer[0, : NUMBERS.value], buffer[0, NUMBERS.value :]))
    return found


@triton.jit
def _reduce(buffer, n_programs, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """Row 0 of the buffer from rows 1 to n_programs, in a fixed order."""
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
        source = buffer + (k + 1) * WIDTH  # written by other multiprocessors, hence .cg
        bad_coordinates += tl.load(source, inside, other=0.0, cache_modifier=".cg")
        bad_weights += tl.load(source + 1, inside, other=0.0, cache_modifier=".cg")
        low = tl.minimum(low, tl.load(source + 2, inside, other=float("inf"), cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(source + 3, inside, other=float("-inf"), cache_modifier=".cg"))
        least = tl.minimum(least, tl.load(source + 4, inside, other=float("inf"), cache_modifier=".cg"))
        mass += tl.load(source + 5, inside, other=0.0, cache_modifier=".cg")
    tl.store(buffer, tl.sum(bad_coordinates, 0))
    tl.store(buffer + 1, tl.sum(bad_weights, 0))
    tl.store(buffer + 2, tl.min(low, 0))
    tl.store(buffer + 3, tl.max(high, 0))
    tl.store(buffer + 4, tl.min(least, 0))
    tl.store(buffer + 5, tl.sum(mass, 0))
    for d_start in range(0, D, BD):
        dim = d_start + tl.arange(0, BD)
        total = tl.zeros([BD], tl.float64)
        for start in range(0, n_programs, BK):
            k = start + tl.arange(0, BK)
            source = buffer + (k[:, None] + 1) * WIDTH + NUMBERS + dim[None, :]
            mask = (k < n_programs)[:, None] & (dim < D)[None, :]
            total += tl.sum(tl.load(source, mask, other=0.0, cache_modifier=".cg"), 0)
        tl.store(buffer + NUMBERS + dim, total, dim < D)


@triton.jit(do_not_specialize=["n"])
def survey_kernel(
    points, stride_point, stride_coordinate, weight, n, buffer, arrivals,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program k surveys blocks k, k + programs, ... of BM points into row k + 1 of buffer [programs + 1, 6 + D]; the
    last to arrive reduces them into row 0. arrivals: int32 [1], zero."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    bad_coordinates = tl.zeros([BM], tl.float64)
    bad_weights = tl.zeros([BM], tl.float64)
    low = tl.full([BM], float("inf"), tl.float64)
    high = tl.full([BM], float("-inf"), tl.float64)
    least = tl.full([BM], float("inf"), tl.float64)
    mass = tl.zeros([BM], tl.float64)
    own = buffer + (program + 1) * (NUMBERS + D)
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
        _reduce(buffer, n_programs, D, BD, 32)

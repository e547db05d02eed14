"""The history that Anderson mixing needs, on a GPU: two launches an iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .kernels import MOVE, OFFSET, RESIDUAL
from .launching import Launch
from .mixing import MEMORY, History
from .triton_sweeps import StoredCloud, TritonSweeps

POINTS = 512  # of one program
NUMBERS = tl.constexpr(4 + 2 * MEMORY)  # of `History.record`
SLOTS = tl.constexpr(8)  # MEMORY as a power of two


class TritonHistory(History):
    """Of the cloud y of these sweeps."""

    def __init__(self, sweeps: TritonSweeps):
        self.sweeps = sweeps
        x, y = sweeps.x, sweeps.y
        self.steps, self.images = torch.zeros(2, MEMORY, y.n_padded, dtype=torch.float64, device=y.weight.device)
        self.last_step = torch.empty_like(y.potential)
        self.last_images = torch.empty(2, y.n_padded, dtype=torch.float64, device=y.weight.device)
        blocks_x, blocks_y = (triton.cdiv(cloud.n_padded, POINTS) for cloud in (x, y))
        blocks = blocks_x + blocks_y
        partial = torch.empty(blocks + 1, NUMBERS.value, dtype=torch.float64, device=y.weight.device)
        arrivals = torch.zeros(1, dtype=torch.int32, device=y.weight.device)
        self.numbers = partial[0]
        self.turn = 0  # which of last_images is the newest
        self._record = Launch(
            record_kernel, (blocks, 1, 1),
            (x.potential, x.weight, x.n_padded, y.potential, y.used, y.weight, y.statistics, y.n_padded, self.steps,
             self.images, self.last_step, self.last_images, partial, arrivals, blocks_x),
            {"POINTS": POINTS, "MEMORY": MEMORY},
        )  # fmt: skip
        self._mix = Launch(
            mix_kernel, (blocks_y, 1, 1),
            (self.images, self.last_images, y.potential, y.half_square, y.weight, y.log2_weight, y.row_bias,
             y.col_bias, y.statistics, partial, arrivals, y.n_padded),
            {"POINTS": POINTS},
        )  # fmt: skip

    @property
    def previous_image(self) -> torch.Tensor:
        return self.last_images[1 - self.turn]

    def record(self, slot: int | None) -> torch.Tensor:
        self.turn = 1 - self.turn
        self._record(
            self.turn, -1 if slot is None else slot, _eps_over_rho(self.sweeps.x), _eps_over_rho(self.sweeps.y)
        )
        return self.numbers

    def mix(self, coefficients: Sequence[float]) -> None:
        self._mix(self.turn, self.sweeps.scale, *coefficients)


def _eps_over_rho(cloud: StoredCloud) -> float:
    return (1.0 - cloud.damping) / cloud.damping


@triton.jit
def _entropic(u, eps_over_rho):
    """f / eps, or -rho (exp(-f / rho) - 1) / eps of a relaxed marginal."""
    in_eps = u * 0.6931471805599453  # ln 2
    if eps_over_rho > 0.0:
        in_eps = (1.0 - tl.exp(-eps_over_rho * in_eps)) / eps_over_rho
    return in_eps


@triton.jit(do_not_specialize=["blocks_x", "turn", "slot"])
def record_kernel(
    x_potential, x_weight, n, y_potential, y_used, y_weight, y_statistics, m, steps, images, last_step, last_images,
    numbers, arrivals, blocks_x, turn, slot, x_eps_over_rho, y_eps_over_rho,
    POINTS: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """`History.record`: partial sums of the first blocks_x programs over x, of the rest over y, reduced in a fixed
    order by the last to arrive. n, m: points with padding. turn: which of last_images [2, m] becomes the newest.
    slot: -1 if there is no step before this."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    own = numbers + (program + 1) * NUMBERS
    kept = tl.arange(0, SLOTS)
    with_newest = tl.zeros([SLOTS], tl.float64)
    with_step = tl.zeros([SLOTS], tl.float64)
    zero = tl.sum(with_step, 0)  # a literal would be float32
    residual, dual, sum_step, sum_newest = zero, zero, zero, zero
    if program < blocks_x:
        point = program * POINTS + tl.arange(0, POINTS)
        weight = tl.load(x_weight + point, point < n, other=0.0)
        u = tl.load(x_potential + point, point < n, other=0.0)
        dual = tl.sum(tl.where(weight > 0.0, weight * _entropic(u, x_eps_over_rho), 0.0), 0) * (1.0 + x_eps_over_rho)
    else:
        point = (program - blocks_x) * POINTS + tl.arange(0, POINTS)
        inside = point < m
        weight = tl.load(y_weight + point, inside, other=0.0)
        image = tl.load(y_potential + point, inside, other=0.0)
        used = tl.load(y_used + point, inside, other=0.0)
        counted = weight > 0.0
        dual = tl.sum(tl.where(counted, weight * _entropic(used, y_eps_over_rho), 0.0), 0)
        step = tl.where(counted, image - used, 0.0)
        sum_step = tl.sum(weight * step, 0)
        if program == blocks_x:
            residual = tl.load(y_statistics + RESIDUAL)
        if slot >= 0:
            newest = tl.where(counted, step - tl.load(last_step + point, inside, other=0.0), 0.0)
            previous_image = tl.load(last_images + (1 - turn) * m + point, inside, other=0.0)
            difference = tl.where(counted, image - previous_image, 0.0)
            tl.store(steps + slot * m + point, newest, inside)
            tl.store(images + slot * m + point, difference, inside)
            sum_newest = tl.sum(weight * newest, 0)
            for k in tl.static_range(MEMORY):
                other = tl.load(steps + k * m + point, inside, other=0.0)
                other = tl.where(slot == k, newest, other)
                with_newest += tl.where(kept == k, tl.sum(weight * newest * other, 0), 0.0)
                with_step += tl.where(kept == k, tl.sum(weight * step * other, 0), 0.0)
        tl.store(last_step + point, step, inside)
        tl.store(last_images + turn * m + point, image, inside)
    tl.store(own, residual)
    tl.store(own + 1, dual)
    tl.store(own + 2, sum_step)
    tl.store(own + 3, sum_newest)
    tl.store(own + 4 + kept, with_newest, kept < MEMORY)
    tl.store(own + 4 + MEMORY + kept, with_step, kept < MEMORY)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == n_programs - 1:
        tl.store(arrivals, 0)
        column = tl.arange(0, 16)
        total = tl.zeros([16], tl.float64)
        for start in range(0, n_programs, 32):
            row = start + tl.arange(0, 32)
            mask = (row < n_programs)[:, None] & (column < NUMBERS)[None, :]
            source = numbers + (row[:, None] + 1) * NUMBERS + column[None, :]
            total += tl.sum(tl.load(source, mask, other=0.0, cache_modifier=".cg"), 0)
        tl.store(numbers + column, total, column < NUMBERS)


@triton.jit
def _times(coefficient, difference, point, inside):
    """A slot that is not in use may hold anything."""
    return tl.where(coefficient != 0.0, coefficient * tl.load(difference + point, inside, other=0.0), 0.0)


@triton.jit(do_not_specialize=["turn"])
def mix_kernel(
    images, last_images, potential, half_square, weight, log2_weight, row_bias, col_bias, statistics, largest,
    arrivals, m, turn, scale, c_0, c_1, c_2, c_3, c_4, POINTS: tl.constexpr,
):  # fmt: skip
    """potential = last_images[turn] - sum_k c_k images_k where there is weight, and the biases that follow.

    The largest change of all points is added to move and offset in statistics. largest: float64, one number a program.
    """
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    point = program * POINTS + tl.arange(0, POINTS)
    inside = point < m
    image = tl.load(last_images + turn * m + point, inside, other=0.0)
    b_weight = tl.load(weight + point, inside, other=0.0)
    change = _times(c_0, images, point, inside) + _times(c_1, images + m, point, inside)
    change += _times(c_2, images + 2 * m, point, inside) + _times(c_3, images + 3 * m, point, inside)
    change += _times(c_4, images + 4 * m, point, inside)
    change = tl.where(b_weight > 0.0, change, 0.0)
    moved = image - change
    bias = moved - scale * tl.load(half_square + point, inside, other=0.0)
    log2_b = tl.load(log2_weight + point, inside, other=0.0)
    tl.store(potential + point, moved, inside)
    tl.store(row_bias + point, bias.to(tl.float32), inside)
    tl.store(col_bias + point, (bias + log2_b).to(tl.float32), inside)
    tl.store(largest + program, tl.max(tl.abs(change), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == n_programs - 1:
        tl.store(arrivals, 0)
        most = tl.zeros([128], tl.float64)
        for start in range(0, n_programs, 128):
            other = start + tl.arange(0, 128)
            most = tl.maximum(most, tl.load(largest + other, other < n_programs, other=0.0, cache_modifier=".cg"))
        total = tl.max(most, 0)
        tl.store(statistics + MOVE, tl.load(statistics + MOVE) + total)
        tl.store(statistics + OFFSET, tl.load(statistics + OFFSET) + total)

"""Anderson mixing on a GPU: two launches an iteration, and no wait for the host, which decides nothing."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from ..sweeps.cloud_kernels import MOVE, OFFSET, RESIDUAL, scaled, store_biases
from ..sweeps.launching import Launch
from ..sweeps.triton_sweeps import StoredCloud, TritonSweeps
from .acceleration import (
    DUAL_ROUNDING,
    DUAL_SLACK,
    FIRST_AFTER_REJECTION,
    LARGEST_REGULARISATION,
    LEAST_REGULARISATION,
    Anderson,
)
from .mixing import MEMORY

POINTS = 512  # of one program
NUMBERS = tl.constexpr(4 + 2 * MEMORY)  # of `History.record`
SLOTS = tl.constexpr(8)  # MEMORY as a power of two

# What is kept between iterations, float64: the fields of `TorchAnderson`, which of last_images is the newest, and which
# one the next g starts from.
COUNT, BEST_DUAL, BEST_RESIDUAL, REGULARISATION = (tl.constexpr(k) for k in range(4))
EXTRAPOLATED, TURN, SOURCE, MASS = (tl.constexpr(k) for k in range(4, 8))
SUMS, COEFFICIENTS, GRAM = tl.constexpr(8), tl.constexpr(8 + SLOTS.value), tl.constexpr(8 + 2 * SLOTS.value)
STATE = tl.constexpr(GRAM.value + SLOTS.value**2)

LEAST, FIRST, LARGEST = (
    tl.constexpr(value) for value in (LEAST_REGULARISATION, FIRST_AFTER_REJECTION, LARGEST_REGULARISATION)
)
SLACK, ROUNDING = tl.constexpr(DUAL_SLACK), tl.constexpr(DUAL_ROUNDING)


class TritonAnderson(Anderson):
    """For sweeps on a GPU. The numbers and rules are those of `TorchAnderson`."""

    sweeps: TritonSweeps
    memory = "steps", "images", "last_images", "last_step", "state"

    def __init__(self, sweeps: TritonSweeps, *, mass: float | torch.Tensor):
        super().__init__(sweeps, mass=mass)
        x, y, batch, problems, device = sweeps.x, sweeps.y, sweeps.batch, sweeps.problems, sweeps.y.weight.device
        self.steps, self.images = torch.zeros(2, *batch, MEMORY, y.n_padded, dtype=torch.float64, device=device)
        self.last_images = torch.empty(*batch, 2, y.n_padded, dtype=torch.float64, device=device)
        self.last_step = torch.empty_like(y.potential)
        blocks_x, blocks_y = (triton.cdiv(cloud.n_padded, POINTS) for cloud in (x, y))
        blocks = blocks_x + blocks_y
        partial = torch.empty(*batch, blocks + 1, NUMBERS.value, dtype=torch.float64, device=device)
        largest = torch.empty(*batch, blocks_y, dtype=torch.float64, device=device)
        arrivals = torch.zeros(problems, dtype=torch.int32, device=device)
        self.numbers = partial[..., 0, :]
        start = [0.0] * STATE.value
        start[COUNT.value], start[BEST_DUAL.value], start[BEST_RESIDUAL.value] = -1.0, -math.inf, math.inf
        start[REGULARISATION.value] = LEAST_REGULARISATION
        self._start = torch.tensor(start, dtype=torch.float64).to(device).repeat(*batch, 1)
        self._start[..., MASS.value] = mass
        self.state = self._start.clone()
        options = {"POINTS": POINTS, "MEMORY": MEMORY}
        self._record = Launch(
            record_kernel, (blocks, 1, problems),
            (x.potential, x.weight, x.n_padded, y.potential, y.used, y.weight, y.statistics, y.n_padded, self.steps,
             self.images, self.last_step, self.last_images, partial, arrivals, self.state, blocks_x),
            {**options, "FREE_CONSTANT": self.free_constant, "BATCHED": bool(batch)},
        )  # fmt: skip
        self._mix = Launch(
            mix_kernel, (blocks_y, 1, problems),
            (self.images, self.last_images, self.state, y.potential, y.half_square, y.weight, y.log2_weight,
             y.coarse_bias, y.row_bias, y.col_bias, y.statistics, largest, arrivals, y.n_padded),
            {**options, "BATCHED": bool(batch)},
        )  # fmt: skip

    def start(self) -> None:
        self.state.copy_(self._start)

    def record(self) -> None:
        self._record(_eps_over_rho(self.sweeps.x), _eps_over_rho(self.sweeps.y))

    def extrapolate(self, *, plain: bool | np.ndarray = False) -> None:
        if np.any(plain):
            unmixed = torch.as_tensor(plain, device=self.state.device)
            self.state[..., EXTRAPOLATED.value].masked_fill_(unmixed, 0.0)
            self.state[..., COEFFICIENTS.value : GRAM.value].masked_fill_(unmixed[..., None], 0.0)
        self._mix(*self.sweeps.scales)


def _eps_over_rho(cloud: StoredCloud) -> float:
    return (1.0 - cloud.damping) / cloud.damping


@triton.jit
def _entropic(u, eps_over_rho):
    """f / eps, or -rho (exp(-f / rho) - 1) / eps of a relaxed marginal."""
    in_eps = u * 0.6931471805599453  # ln 2
    if eps_over_rho > 0.0:
        in_eps = (1.0 - tl.exp(-eps_over_rho * in_eps)) / eps_over_rho
    return in_eps


@triton.jit(do_not_specialize=["blocks_x"])
def record_kernel(
    x_potential, x_weight, n, y_potential, y_used, y_weight, y_statistics, m, steps, images, last_step, last_images,
    numbers, arrivals, state, blocks_x, x_eps_over_rho, y_eps_over_rho,
    POINTS: tl.constexpr, MEMORY: tl.constexpr, FREE_CONSTANT: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """`History.record`: partial sums of the first blocks_x programs over x, of the rest over y, reduced in a fixed
    order by the last to arrive, which also decides the next step. n, m: points with padding; last_images [2, m].
    BATCHED: as of `sweep_kernels.py`."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    if BATCHED:
        problem = tl.program_id(2).to(tl.int64)
        x_potential += problem * n
        x_weight += problem * n
        y_potential += problem * m
        y_used += problem * m
        y_weight += problem * m
        y_statistics += problem * 3
        steps += problem * MEMORY * m
        images += problem * MEMORY * m
        last_step += problem * m
        last_images += problem * 2 * m
        numbers += problem * (n_programs + 1) * NUMBERS
        arrivals += problem
        state += problem * STATE
    count = tl.load(state + COUNT).to(tl.int32)
    slot = tl.where(count >= 0, count % MEMORY, -1)
    turn = 1 - tl.load(state + TURN).to(tl.int32)
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
        _decide(total / tl.load(state + MASS), column, state, count + 1, slot, turn, MEMORY, FREE_CONSTANT)


@triton.jit
def _decide(numbers, column, state, count, slot, turn, MEMORY: tl.constexpr, FREE_CONSTANT: tl.constexpr):
    """`TorchAnderson.extrapolate`, from the numbers over the mass: coefficients and source of the next g, and all that
    is kept. count: differences taken since the memory was empty."""
    residual, dual = pick(numbers, column, 0), pick(numbers, column, 1)
    k = tl.arange(0, SLOTS)
    with_newest = segment(numbers, column, k, 4, MEMORY)
    with_step = segment(numbers, column, k, 4 + MEMORY, MEMORY)
    best_dual, best_residual = tl.load(state + BEST_DUAL), tl.load(state + BEST_RESIDUAL)
    regularisation = tl.load(state + REGULARISATION)
    fall, few = best_dual - dual, tl.minimum(residual, 1.0)
    is_kept = (fall <= few * few * SLACK) | ((fall <= ROUNDING) & (residual <= best_residual))  # nan is not
    rejected = (tl.load(state + EXTRAPOLATED) > 0.0) & (is_kept == 0)
    if FREE_CONSTANT:
        newest_sum, sums = pick(numbers, column, 3), tl.load(state + SUMS + k)
        sums = tl.where(k == slot, newest_sum, sums)
        tl.store(state + SUMS + k, sums)
        with_newest -= newest_sum * sums
        with_step -= pick(numbers, column, 2) * sums
    filled = tl.minimum(count, MEMORY)
    i, j = k[:, None], k[None, :]
    gram = tl.load(state + GRAM + i * SLOTS + j)
    gram = tl.where((i == slot) & (j < filled), with_newest[None, :], gram)
    gram = tl.where((j == slot) & (i < filled), with_newest[:, None], gram)
    tl.store(state + GRAM + i * SLOTS + j, gram)
    regularisation = tl.where(
        rejected,
        tl.minimum(tl.maximum(1000.0 * regularisation, FIRST), LARGEST),
        tl.maximum(regularisation / 3.0, LEAST),
    )
    coefficients, is_solved = solved_coefficients(gram, with_step, regularisation, k, filled, MEMORY)
    mixes = is_solved & (filled > 0) & (rejected == 0)
    tl.store(state + COEFFICIENTS + k, tl.where(mixes & (k < filled), coefficients, 0.0))
    tl.store(state + COUNT, tl.where(rejected, -1, count).to(tl.float64))
    tl.store(state + REGULARISATION, regularisation)
    tl.store(state + EXTRAPOLATED, tl.where(mixes, 1, 0).to(tl.float64))
    tl.store(state + TURN, turn.to(tl.float64))
    tl.store(state + SOURCE, tl.where(rejected, 1 - turn, turn).to(tl.float64))
    if rejected == 0:
        tl.store(state + BEST_DUAL, tl.maximum(best_dual, dual))
        tl.store(state + BEST_RESIDUAL, residual)


@triton.jit
def solved_coefficients(gram, with_step, regularisation, k, filled, MEMORY: tl.constexpr):
    """Of the first `filled` differences [SLOTS], and whether they could be found: rounding may leave no solution."""
    i, j = k[:, None], k[None, :]
    square = tl.where(k < filled, tl.sum(tl.where(i == j, gram, 0.0), 1), 1.0)
    is_solved = tl.min(tl.where((square > 0.0) & (square < float("inf")), 1, 0), 0) == 1
    length = tl.sqrt(square)
    normal = tl.where((i < filled) & (j < filled), gram / (length[:, None] * length[None, :]), 0.0)
    normal += tl.where(i == j, tl.where(i < filled, regularisation, 1.0), 0.0)
    right = tl.where(k < filled, with_step / length, 0.0)
    for p in tl.static_range(MEMORY):  # Gauss-Jordan: the matrix is positive definite, so without pivoting
        row = tl.sum(tl.where(i == p, normal, 0.0), 0)
        pivot = pick(row, k, p)
        is_solved = is_solved & (pivot > 0.0)
        factor = tl.where(k == p, 0.0, tl.sum(tl.where(j == p, normal, 0.0), 1) / pivot)
        normal -= factor[:, None] * row[None, :]
        right -= factor * pick(right, k, p)
    solution = right / tl.sum(tl.where(i == j, normal, 0.0), 1)
    is_solved = is_solved & (tl.min(tl.where(tl.abs(solution) < float("inf"), 1, 0), 0) == 1)
    return solution / length, is_solved


@triton.jit
def pick(vector, index, at):
    return tl.sum(tl.where(index == at, vector, 0.0), 0)


@triton.jit
def segment(vector, index, k, first, count: tl.constexpr):
    """Elements first, first + 1, ... [SLOTS], `count` of them and zeros."""
    chosen = (index[None, :] == first + k[:, None]) & (k < count)[:, None]
    return tl.sum(tl.where(chosen, vector[None, :], 0.0), 1)


@triton.jit
def mix_kernel(
    images, last_images, state, potential, half_square, weight, log2_weight, coarse_bias, row_bias, col_bias,
    statistics, largest, arrivals, m, scale, scale_rest, step, POINTS: tl.constexpr, MEMORY: tl.constexpr,
    BATCHED: tl.constexpr,
):  # fmt: skip
    """potential = source image - sum_k c_k images_k where there is weight, and the biases that follow.

    Its largest distance from the newest image is added to move and offset in statistics. largest: float64, one number
    a program. BATCHED: as of `sweep_kernels.py`.
    """
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    if BATCHED:
        problem = tl.program_id(2).to(tl.int64)
        images += problem * MEMORY * m
        last_images += problem * 2 * m
        state += problem * STATE
        potential += problem * m
        half_square += problem * m
        weight += problem * m
        log2_weight += problem * m
        coarse_bias += problem * m
        row_bias += problem * m
        col_bias += problem * m
        statistics += problem * 3
        largest += problem * n_programs
        arrivals += problem
    point = program * POINTS + tl.arange(0, POINTS)
    inside = point < m
    newest = tl.load(last_images + tl.load(state + TURN).to(tl.int32) * m + point, inside, other=0.0)
    source = tl.load(last_images + tl.load(state + SOURCE).to(tl.int32) * m + point, inside, other=0.0)
    b_weight = tl.load(weight + point, inside, other=0.0)
    change = tl.zeros([POINTS], tl.float64)
    for k in tl.static_range(MEMORY):
        coefficient = tl.load(state + COEFFICIENTS + k)
        difference = tl.load(images + k * m + point, inside, other=0.0)
        change += tl.where(coefficient != 0.0, coefficient * difference, 0.0)  # an unused slot may hold anything
    moved = source - tl.where(b_weight > 0.0, change, 0.0)
    bias = moved - scaled(tl.load(half_square + point, inside, other=0.0), scale, scale_rest)
    log2_b = tl.load(log2_weight + point, inside, other=0.0)
    tl.store(potential + point, moved, inside)
    store_biases(coarse_bias, row_bias, col_bias, point, bias, log2_b, scale, scale_rest, step, inside)
    tl.store(largest + program, tl.max(tl.abs(moved - newest), 0))
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

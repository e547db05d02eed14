"""The history of Anderson mixing on a GPU: a launch to take a step in and one to mix."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.iteration.triton_mixing import pick, segment, solved_coefficients
from solvers.flash_sinkhorn.sweeps.launching import launch

POINTS = 1024  # a program
PARTS = 64  # programs whose sums are added at once


class TritonHistory:
    """As `History`. Sums are of steps with their constants, which are taken off products: a plain step's is no larger
    than the rest of it, so that no digits are lost."""

    def __init__(self, weight: Tensor, memory: int):
        self.weight, self.slots = weight, triton.next_power_of_2(memory)
        self.steps, self.images = weight.new_zeros(2, memory, len(weight))
        self.last_step, self.last_image = weight, weight  # none yet
        self.programs = triton.cdiv(len(weight), POINTS)
        width = triton.next_power_of_2(3 + 2 * memory)
        self.parts = weight.new_empty(self.programs, width)
        self.state = weight.new_zeros(self.slots * (self.slots + 3) + 1)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=weight.device)
        self.options = {"POINTS": POINTS, "MEMORY": memory, "SLOTS": self.slots}
        self.of_record = {**self.options, "PARTS": PARTS, "WIDTH": width}

    def record(self, at: Tensor, image: Tensor, slot: int | None, filled: int, regularisation: float) -> None:
        step = torch.empty_like(image)
        arguments = (
            at, image, step, self.weight, self.last_image, self.last_step, self.steps, self.images, self.parts,
            self.arrivals, self.state, len(image), -1 if slot is None else slot, filled, regularisation,
        )  # fmt: skip
        launch(record_kernel, (self.programs, 1, 1), arguments, self.of_record)
        self.last_step, self.last_image = step, image

    def mixed(self) -> Tensor:
        mixed = torch.empty_like(self.last_image)
        arguments = self.last_image, self.images, self.state, mixed, len(mixed)
        launch(mix_kernel, (self.programs, 1, 1), arguments, self.options)
        return mixed


@triton.jit(do_not_specialize=["n", "slot", "filled"])
def record_kernel(
    at, image, step, weight, last_image, last_step, steps, images, parts, arrivals, state, n, slot, filled,
    regularisation,
    POINTS: tl.constexpr, MEMORY: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """step [n] is image - at; with a slot (not -1) the differences from the last ones are steps[slot], images[slot],
    and the last program to arrive finds the coefficients of the first `filled`, from parts [programs, WIDTH] added in a
    fixed order."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    point = program.to(tl.int64) * POINTS + tl.arange(0, POINTS)
    inside = point < n
    b_image = tl.load(image + point, inside, other=0.0)
    b_step = b_image - tl.load(at + point, inside, other=0.0)
    tl.store(step + point, b_step, inside)
    if slot >= 0:
        stride = n.to(tl.int64)
        column = tl.arange(0, WIDTH)
        b_weight = tl.load(weight + point, inside, other=0.0)
        newest = b_step - tl.load(last_step + point, inside, other=0.0)
        difference = b_image - tl.load(last_image + point, inside, other=0.0)
        tl.store(steps + slot * stride + point, newest, inside)
        tl.store(images + slot * stride + point, difference, inside)
        found = tl.where(column == 0, tl.sum(b_weight * b_step, 0), 0.0)
        found = tl.where(column == 1, tl.sum(b_weight * newest, 0), found)
        found = tl.where(column == 2, tl.sum(b_weight * difference, 0), found)
        for k in tl.static_range(MEMORY):
            other = tl.where(slot == k, newest, tl.load(steps + k * stride + point, inside, other=0.0))
            found = tl.where(column == 3 + k, tl.sum(b_weight * newest * other, 0), found)
            found = tl.where(column == 3 + MEMORY + k, tl.sum(b_weight * b_step * other, 0), found)
        tl.store(parts + program * WIDTH + column, found)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == n_programs - 1:
            tl.store(arrivals, 0)
            total = tl.zeros([WIDTH], tl.float64)
            for start in range(0, n_programs, PARTS):
                row = start + tl.arange(0, PARTS)
                source = parts + row[:, None] * WIDTH + column[None, :]
                total += tl.sum(tl.load(source, (row < n_programs)[:, None], other=0.0, cache_modifier=".cg"), 0)
            _solve(total, column, state, slot, filled, regularisation, MEMORY, SLOTS)


@triton.jit
def _solve(numbers, column, state, slot, filled, regularisation, MEMORY: tl.constexpr, SLOTS: tl.constexpr):
    """state: coefficients, means of the differences of steps and of images [SLOTS] each, their products [SLOTS, SLOTS],
    and by how much the mixed image is to be raised, so that its mean is the image's; nan where there is none."""
    k = tl.arange(0, SLOTS)
    i, j = k[:, None], k[None, :]
    step_mean, newest_mean = pick(numbers, column, 0), pick(numbers, column, 1)
    means = tl.where(k == slot, newest_mean, tl.load(state + SLOTS + k))
    image_means = tl.where(k == slot, pick(numbers, column, 2), tl.load(state + 2 * SLOTS + k))
    with_newest = segment(numbers, column, k, 3, MEMORY) - newest_mean * means
    with_step = segment(numbers, column, k, 3 + MEMORY, MEMORY) - step_mean * means
    products = tl.load(state + 3 * SLOTS + i * SLOTS + j)
    products = tl.where(i == slot, with_newest[None, :], products)
    products = tl.where(j == slot, with_newest[:, None], products)
    coefficients, is_solved = solved_coefficients(products, with_step, regularisation, k, filled, MEMORY)
    coefficients = tl.where(k < filled, coefficients, 0.0)
    shift = tl.sum(tl.where(k < filled, coefficients * image_means, 0.0), 0)
    tl.store(state + k, coefficients)
    tl.store(state + SLOTS + k, means)
    tl.store(state + 2 * SLOTS + k, image_means)
    tl.store(state + 3 * SLOTS + i * SLOTS + j, products)
    tl.store(state + 3 * SLOTS + SLOTS * SLOTS, tl.where(is_solved & (step_mean - step_mean == 0), shift, float("nan")))


@triton.jit(do_not_specialize=["n"])
def mix_kernel(image, images, state, mixed, n, POINTS: tl.constexpr, MEMORY: tl.constexpr, SLOTS: tl.constexpr):
    """mixed [n]: the image less the sum of coefficient times difference, raised; the image itself where that is not
    finite: a sum by weight of what is not finite is not either."""
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)
    inside = point < n
    b_image = tl.load(image + point, inside, other=0.0)
    shift = tl.load(state + 3 * SLOTS + SLOTS * SLOTS)
    change = tl.zeros([POINTS], tl.float64)
    for k in tl.static_range(MEMORY):
        coefficient = tl.load(state + k)
        difference = tl.load(images + k * n.to(tl.int64) + point, inside, other=0.0)
        change += tl.where(coefficient != 0.0, coefficient * difference, 0.0)  # an unused slot may hold anything
    tl.store(mixed + point, tl.where(shift - shift == 0, b_image - change + shift, b_image), inside)

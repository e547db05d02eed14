"""Anderson mixing of a batch in torch: a small system and a safeguard for each problem, without a look at any."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..sweeps.sweeps import Sweeps
from .acceleration import (
    DUAL_ROUNDING,
    DUAL_SLACK,
    FIRST_AFTER_REJECTION,
    LARGEST_REGULARISATION,
    LEAST_REGULARISATION,
    Anderson,
)
from .mixing import MEMORY, entropic


class BatchedAnderson(Anderson):
    """For sweeps of B problems. The numbers and rules are those of `TorchAnderson`.

    steps, images: differences of consecutive ones [B, MEMORY, m]; last_step, last_image, previous_image [B, m].
    count: differences taken since the memory was empty.
    """

    memory = (
        "count", "regularisation", "best_dual", "best_residual", "extrapolated", "gram", "sums", "steps", "images",
        "last_step", "last_image", "previous_image",
    )  # fmt: skip

    mass: torch.Tensor

    def __init__(self, sweeps: Sweeps, *, mass: torch.Tensor):
        super().__init__(sweeps, mass=mass)
        weight = sweeps.y.weight
        count, m = weight.shape
        self.steps, self.images = weight.new_zeros(2, count, MEMORY, m)
        self.last_step, self.last_image, self.previous_image = weight.new_zeros(3, count, m)
        self.gram, self.sums = weight.new_zeros(count, MEMORY, MEMORY), weight.new_zeros(count, MEMORY)
        self._problem, self._slots = (torch.arange(size, device=weight.device) for size in (count, MEMORY))
        self.start()

    def start(self) -> None:
        self.count = torch.full_like(self._problem, -1)
        self.regularisation = torch.full_like(self.sums[:, 0], LEAST_REGULARISATION)
        self.best_dual = torch.full_like(self.sums[:, 0], -math.inf)
        self.best_residual = torch.full_like(self.sums[:, 0], math.inf)
        self.extrapolated = torch.zeros_like(self.count, dtype=torch.bool)

    def record(self) -> None:
        x, y = self.sweeps.x, self.sweeps.y
        step = torch.where(y.weight > 0, y.potential - y.used, 0.0)
        newest, at = step - self.last_step, (self._problem, self._slot)  # meaningless where it is the first
        self.steps[at], self.images[at] = newest, y.potential - self.last_image
        weighted = torch.stack([y.weight * newest, y.weight * step], 2)  # [B, m, 2]
        products = torch.bmm(self.steps, weighted).mT.reshape(len(step), 2 * MEMORY)
        sum_newest, sum_step = weighted.sum(1).unbind(1)
        dual = (x.weight * entropic(x.potential, x.damping)).sum(1) / x.damping
        dual += (y.weight * entropic(y.used, y.damping)).sum(1)
        head = torch.stack([y.residual[:, 0], dual, sum_step, sum_newest], 1)
        self.numbers = torch.cat([head, products], 1)
        self.last_step, self.previous_image, self.last_image = step, self.last_image, y.potential.clone()
        self.count = self.count + 1

    @property
    def _slot(self) -> torch.Tensor:
        """[B]: of the next difference."""
        return self.count.clamp_min(0) % MEMORY

    def extrapolate(self, *, plain: bool | np.ndarray = False) -> None:
        head, with_newest, with_step = (self.numbers / self.mass[:, None]).split([4, MEMORY, MEMORY], 1)
        residual, dual, sum_step, sum_newest = head.unbind(1)
        rejected = self.extrapolated & self._is_worse(dual, residual)
        self.best_dual = torch.where(rejected, self.best_dual, torch.fmax(self.best_dual, dual))
        self.best_residual = torch.where(rejected, self.best_residual, residual)
        stronger = (1000 * self.regularisation).clamp(FIRST_AFTER_REJECTION, LARGEST_REGULARISATION)
        weaker = (self.regularisation / 3).clamp_min(LEAST_REGULARISATION)
        self.regularisation = torch.where(rejected, stronger, weaker)
        newest = (self.count - 1).clamp_min(0) % MEMORY
        if self.free_constant:
            self.sums[self._problem, newest] = sum_newest
            with_newest = with_newest - sum_newest[:, None] * self.sums
            with_step = with_step - sum_step[:, None] * self.sums
        self.gram[self._problem, newest] = self.gram[self._problem, :, newest] = with_newest
        coefficients = self._coefficients(with_step)
        unmixed = rejected | torch.as_tensor(plain, device=rejected.device)
        coefficients = torch.where(unmixed[:, None], 0.0, coefficients)
        self.extrapolated = (coefficients != 0).any(1)
        coefficients = coefficients[:, :, None]
        change = torch.where(coefficients != 0, coefficients * self.images, 0.0).sum(1)  # unused slots hold anything
        y = self.sweeps.y
        source = torch.where(rejected[:, None], self.previous_image, self.last_image)
        self.sweeps.take_potential(y, source - torch.where(y.weight > 0, change, 0.0))
        self.count = torch.where(rejected, -1, self.count)

    def _is_worse(self, dual: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        fall = self.best_dual - dual
        is_kept = fall <= DUAL_SLACK * residual.clamp_max(1.0).square()  # nan is not
        return ~(is_kept | ((fall <= DUAL_ROUNDING) & (residual <= self.best_residual)))

    def _coefficients(self, with_step: torch.Tensor) -> torch.Tensor:
        """[B, MEMORY], of the images' differences in the next g; zero where there are none to mix, or no solution."""
        filled = self._slots < self.count[:, None]
        square = self.gram.diagonal(dim1=1, dim2=2)
        is_sound = ((square > 0) & (square < math.inf) | ~filled).all(1, keepdim=True)
        used = filled & is_sound
        length = torch.where(used, square, 1.0).sqrt()
        pairs = used[:, :, None] & used[:, None]
        normal = torch.where(pairs, self.gram / (length[:, :, None] * length[:, None]), 0.0)
        normal = normal + torch.diag_embed(torch.where(used, self.regularisation[:, None], 1.0))
        factor, failed = torch.linalg.cholesky_ex(normal)
        right = torch.where(used, with_step / length, 0.0)
        solution = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0] / length
        is_sound = (failed == 0) & torch.isfinite(solution).all(1)
        return torch.where(used & is_sound[:, None], solution, 0.0)

"""Anderson acceleration of alternating updates, with the exact dual value as its safeguard."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch

from ..sweeps.sweeps import Sweeps
from .mixing import MEMORY, History

LEAST_REGULARISATION = 1e-10  # of the normal equations, whose columns have unit length
FIRST_AFTER_REJECTION, LARGEST_REGULARISATION = 1e-6, 0.1
DUAL_SLACK = 10.0  # times residual^2: the dual value of a good step may fall by that much
DUAL_ROUNDING = 1e-5  # units of eps: smaller falls may be float32's


class Anderson(ABC):
    """Type-II Anderson mixing of the map g -> G(F(g)) of one problem, or of each of a batch, at one eps after another.

    After each pair of half-steps (f from g, then g from f) `record` takes it in, and `extrapolate` replaces the image
    G(F(g)) by the affine combination of the last images whose residual G(F(g)) - g is least in the norm weighted by b.
    An extrapolated g whose dual value turns out lower than the best is rejected: g returns to the last plain image and
    the memory is cleared. F(g) is exact for g, so that the dual value of (F(g), g) is the semi-dual's own, and plain
    steps never lower it. The last iteration of all, which no other judges, starts from a plain image.

    numbers: of the last pair, as of `History.record`; float64, on the device. mass: of b. Of a batch numbers are
    [B, ...], mass is [B], and memory names the tensors [B, ...] that are kept between iterations.

    Source: Walker and Ni 2011; for Sinkhorn's map, Thibault et al. 2017 (1711.01851) and Chizat et al. 2018.
    """

    numbers: torch.Tensor
    memory: tuple[str, ...] = ()

    def __init__(self, sweeps: Sweeps, *, mass: float | torch.Tensor):
        self.sweeps, self.mass = sweeps, mass
        self.free_constant = sweeps.x.damping == 1.0 == sweeps.y.damping

    @abstractmethod
    def start(self) -> None:
        """At another epsilon, or from other potentials."""

    @abstractmethod
    def record(self) -> None:
        """Take in the last pair of half-steps."""

    @abstractmethod
    def extrapolate(self, *, plain: bool | np.ndarray = False) -> None:
        """Set the next g; plain, [B] of a batch: to an image, not to a combination of several."""

    def residuals(self) -> torch.Tensor:
        """Of the recorded pair, over the mass: a scalar, [B] of a batch."""
        return self.numbers[..., 0] / self.mass

    def remember(self, other: Anderson, index: torch.Tensor) -> None:
        """Go on from what another mixer kept of the problems at `index` of its batch, which are those of this one."""
        for name in self.memory:
            getattr(self, name).copy_(getattr(other, name)[index])


def anderson(sweeps: Sweeps, *, mass: float | torch.Tensor) -> Anderson:
    """For the device of the sweeps. mass: of b, [B] of a batch."""
    if sweeps.y.weight.device.type == "cpu":
        if isinstance(mass, float):
            return TorchAnderson(sweeps, mass=mass)
        from .batched_mixing import BatchedAnderson  # which is an `Anderson`

        return BatchedAnderson(sweeps, mass=mass)
    from ..sweeps.triton_sweeps import TritonSweeps
    from .triton_mixing import TritonAnderson  # Triton is there only where a GPU is

    assert isinstance(sweeps, TritonSweeps)
    return TritonAnderson(sweeps, mass=mass)


class TorchAnderson(Anderson):
    """For sweeps on the CPU."""

    def __init__(self, sweeps: Sweeps, *, mass: float):
        super().__init__(sweeps, mass=mass)
        self.history = History(sweeps)
        self.gram = [[0.0] * MEMORY for _ in range(MEMORY)]  # of the differences, by slot
        self.sums = [0.0] * MEMORY
        self.start()

    def start(self) -> None:
        self.regularisation = LEAST_REGULARISATION
        self.best_dual, self.best_residual = -math.inf, math.inf
        self.extrapolated = False
        self._forget()

    def _forget(self) -> None:
        self.count = -1  # differences taken since the memory was empty

    def record(self) -> None:
        slot = self.count % MEMORY if self.count >= 0 else None
        self.count += 1
        self.numbers = self.history.record(slot)

    def extrapolate(self, *, plain: bool | np.ndarray = False) -> None:
        residual, dual, sum_step, sum_newest, *products = (self.numbers / self.mass).tolist()
        if self.extrapolated and self._is_worse(dual, residual):
            self.sweeps.take_potential(self.sweeps.y, self.history.previous_image)
            self._forget()
            self.regularisation = min(max(1000 * self.regularisation, FIRST_AFTER_REJECTION), LARGEST_REGULARISATION)
            self.extrapolated = False
            return
        self.best_dual = max(self.best_dual, dual)
        self.best_residual = residual
        self.regularisation = max(self.regularisation / 3, LEAST_REGULARISATION)
        with_newest, with_step = products[:MEMORY], products[MEMORY:]
        if self.free_constant and self.count > 0:
            self.sums[(self.count - 1) % MEMORY] = sum_newest
            with_newest = [product - sum_newest * other for product, other in zip(with_newest, self.sums, strict=True)]
            with_step = [product - sum_step * other for product, other in zip(with_step, self.sums, strict=True)]
        coefficients = None if plain else self._coefficients(with_newest, with_step)
        self.extrapolated = coefficients is not None
        if coefficients is not None:
            self.history.mix(coefficients)

    def _is_worse(self, dual: float, residual: float) -> bool:
        fall = self.best_dual - dual
        if not fall <= DUAL_SLACK * min(residual, 1.0) ** 2:  # nan is worse
            return not fall <= DUAL_ROUNDING or residual > self.best_residual
        return False

    def _coefficients(self, with_newest: list[float], with_step: list[float]) -> list[float] | None:
        """Of the images' differences in the next g [MEMORY], from the products of the newest difference of steps and of
        the step with the differences; None if there is no memory to mix."""
        filled = min(self.count, MEMORY)
        if filled == 0:
            return None
        newest = (self.count - 1) % MEMORY
        for k in range(filled):
            self.gram[newest][k] = self.gram[k][newest] = with_newest[k]
        if not all(0.0 < self.gram[k][k] < math.inf for k in range(filled)):
            return None
        length = [math.sqrt(self.gram[k][k]) for k in range(filled)]
        normal = [[self.gram[i][j] / (length[i] * length[j]) for j in range(filled)] for i in range(filled)]
        for k in range(filled):
            normal[k][k] += self.regularisation
        scaled = _solution(normal, [with_step[k] / length[k] for k in range(filled)])
        if scaled is None or not all(map(math.isfinite, scaled)):
            return None
        return [s / unit for s, unit in zip(scaled, length, strict=True)] + [0.0] * (MEMORY - filled)


def _solution(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Of a positive definite system of a few equations, by elimination in its upper half; None if rounding left it
    indefinite. Overwrites both.

    In Python: numpy takes as long to start as five equations take to solve.
    """
    n = len(right)
    for k, pivot in enumerate(matrix):
        if not pivot[k] > 0.0:
            return None
        for i in range(k + 1, n):
            factor, row = pivot[i] / pivot[k], matrix[i]
            for j in range(i, n):
                row[j] -= factor * pivot[j]
            right[i] -= factor * right[k]
    for k in reversed(range(n)):
        for j in range(k + 1, n):
            right[k] -= matrix[k][j] * right[j]
        right[k] /= matrix[k][k]
    return right

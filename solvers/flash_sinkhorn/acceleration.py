"""Anderson acceleration of alternating updates, with the exact dual value as its safeguard."""

from __future__ import annotations

import math

import numpy as np
import torch

from .mixing import MEMORY, History, TorchHistory
from .sweeps import Sweeps

LEAST_REGULARISATION = 1e-10  # of the normal equations, whose columns have unit length
FIRST_AFTER_REJECTION, LARGEST_REGULARISATION = 1e-6, 0.1
DUAL_SLACK = 10.0  # times residual^2: the dual value of a good step may fall by that much
DUAL_ROUNDING = 1e-5  # units of eps: smaller falls may be float32's


class Anderson:
    """Type-II Anderson mixing of the map g -> G(F(g)) of one problem at one eps.

    After each pair of half-steps (f from g, then g from f) `measure` queues, on the device, all that the host must know
    of it, and `extrapolate` replaces the image G(F(g)) by the affine combination of the last images whose residual
    G(F(g)) - g is least in the norm weighted by b. An extrapolated g whose dual value turns out lower than the best is
    rejected: g returns to the last plain image and the memory is cleared. F(g) is exact for g, so that the dual value
    of (F(g), g) is the semi-dual's own, and plain steps never lower it.

    Source: Walker and Ni 2011; for Sinkhorn's map, Thibault et al. 2017 (1711.01851) and Chizat et al. 2018.
    """

    def __init__(self, sweeps: Sweeps, *, mass: float):
        self.sweeps, self.mass = sweeps, mass
        self.free_constant = sweeps.x.damping == 1.0 == sweeps.y.damping
        self.history = _history(sweeps)
        self.gram = np.zeros((MEMORY, MEMORY))
        self.sums = np.zeros(MEMORY)  # of the differences, by slot
        self.regularisation = LEAST_REGULARISATION
        self.best_dual, self.best_residual = -math.inf, math.inf
        self.extrapolated = False
        self._forget()

    def _forget(self) -> None:
        self.count = -1  # differences taken since the memory was empty

    def measure(self) -> torch.Tensor:
        """What `extrapolate` must know of the last pair of half-steps, on the device: see `History.record`."""
        slot = self.count % MEMORY if self.count >= 0 else None
        self.count += 1
        return self.history.record(slot)

    def extrapolate(self, residual: float, measured: list[float]) -> None:
        """Set the next g, from `measure`'s numbers and the residual of the pair that they belong to."""
        dual, sum_step, sum_newest = np.array(measured[:3]) / self.mass
        if self.extrapolated and self._is_worse(dual, residual):
            self.sweeps.take_potential(self.sweeps.y, self.history.previous_image.clone())
            self._forget()
            self.regularisation = min(max(1000 * self.regularisation, FIRST_AFTER_REJECTION), LARGEST_REGULARISATION)
            self.extrapolated = False
            return
        self.best_dual = max(self.best_dual, dual)
        self.best_residual = residual
        self.regularisation = max(self.regularisation / 3, LEAST_REGULARISATION)
        products = np.reshape(measured[3:], (2, MEMORY))
        if self.free_constant and self.count > 0:
            self.sums[(self.count - 1) % MEMORY] = sum_newest
            products = products - self.mass * np.outer([sum_newest, sum_step], self.sums)
        coefficients = self._coefficients(products)
        self.extrapolated = coefficients is not None
        if coefficients is not None:
            self.history.mix(coefficients)

    def _is_worse(self, dual: float, residual: float) -> bool:
        fall = self.best_dual - dual
        if not fall <= DUAL_SLACK * min(residual, 1.0) ** 2:  # nan is worse
            return not fall <= DUAL_ROUNDING or residual > self.best_residual
        return False

    def _coefficients(self, products: np.ndarray) -> np.ndarray | None:
        """Of the images' differences in the next g [MEMORY]; None if there is no memory to mix."""
        filled = min(self.count, MEMORY)
        if filled == 0:
            return None
        slot = (self.count - 1) % MEMORY
        self.gram[slot], self.gram[:, slot] = products[0], products[0]
        gram, right = self.gram[:filled, :filled], products[1, :filled]
        length = np.sqrt(np.diag(gram))
        if not (np.isfinite(gram).all() and length.min() > 0):
            return None
        normal = gram / np.outer(length, length) + self.regularisation * np.eye(filled)
        coefficients = np.zeros(MEMORY)
        coefficients[:filled] = np.linalg.solve(normal, right / length) / length
        return coefficients if np.isfinite(coefficients).all() else None


def _history(sweeps: Sweeps) -> History:
    if sweeps.y.weight.device.type == "cpu":
        return TorchHistory(sweeps)
    from .triton_mixing import TritonHistory  # Triton is there only where a GPU is
    from .triton_sweeps import TritonSweeps

    assert isinstance(sweeps, TritonSweeps)
    return TritonHistory(sweeps)

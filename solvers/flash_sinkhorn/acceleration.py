"""Anderson acceleration of alternating updates, with the exact dual value as its safeguard."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch

from .sweeps import Cloud, Sweeps

MEMORY = 5  # differences kept; eight gain nothing before residuals of 1e-5
LEAST_REGULARISATION = 1e-10  # of the normal equations, whose columns have unit length
FIRST_AFTER_REJECTION, LARGEST_REGULARISATION = 1e-6, 0.1
DUAL_SLACK = 10.0  # times residual^2: the dual value of a good step may fall by that much
DUAL_ROUNDING = 1e-5  # units of eps: smaller falls may be float32's

C = TypeVar("C", bound=Cloud)


class Anderson:
    """Type-II Anderson mixing of the map g -> G(F(g)) of one problem at one eps.

    After each pair of half-steps (f from g, then g from f) `measure` queues, on the device, all that the host must know
    of it, and `extrapolate` replaces the image G(F(g)) by the affine combination of the last images whose residual
    G(F(g)) - g is least in the norm weighted by b. An extrapolated g whose dual value turns out lower than the best is
    rejected: g returns to the last plain image and the memory is cleared. F(g) is exact for g, so that the dual value
    of (F(g), g) is the semi-dual's own, and plain steps never lower it.

    Source: Walker and Ni 2011; for Sinkhorn's map, Thibault et al. 2017 (1711.01851) and Chizat et al. 2018.
    """

    def __init__(self, sweeps: Sweeps[C], *, mass: float):
        self.sweeps, self.mass = sweeps, mass
        y = sweeps.y
        self.free_constant = sweeps.x.damping == 1.0 == y.damping
        self.root_weight = y.weight.sqrt()
        self.steps = y.weight.new_zeros(MEMORY, len(y.weight))  # differences of weighted residuals
        self.images = torch.zeros_like(self.steps)  # differences of images
        self.gram = np.zeros((MEMORY, MEMORY))
        self.regularisation = LEAST_REGULARISATION
        self.best_dual, self.best_residual = -math.inf, math.inf
        self.fallback: torch.Tensor | None = None  # the image that the last extrapolation started from
        self.n_rejected = 0
        self._forget()

    def _forget(self) -> None:
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None
        self.count = 0  # differences taken since the memory was empty

    def measure(self) -> torch.Tensor:
        """float64 [1 + 2 * MEMORY] on the device: dual value of the pair as swept, products of the newest difference
        and of the newest residual with all differences."""
        y = self.sweeps.y
        step = y.potential - y.used
        if self.free_constant:
            step -= torch.dot(y.weight, step)
        step *= self.root_weight
        if self.last is not None:
            slot = self.count % MEMORY
            torch.sub(step, self.last[0], out=self.steps[slot])
            torch.sub(y.potential, self.last[1], out=self.images[slot])
            self.count += 1
            products = self.steps @ torch.stack([self.steps[slot], step], 1)
        else:
            products = self.steps.new_zeros(MEMORY, 2)
        self.last = step, y.potential.clone()
        return torch.cat([self._dual()[None], products.T.flatten()])

    def _dual(self) -> torch.Tensor:
        """Dual value over eps, up to a constant, of the pair (F(g), g).

        With w = -rho (exp(-f / rho) - 1), or f itself if balanced, it is <a, w(f)> + <b, w(g)> - eps sum P, and of
        f = F(g) the row sums are a exp(-f / rho): the last term is eps / rho_x <a, w(f)> and a constant.
        """
        x, y = self.sweeps.x, self.sweeps.y
        value = torch.dot(x.weight, _entropic(x.potential, x.damping)) / x.damping
        return value + torch.dot(y.weight, _entropic(y.used, y.damping))

    def extrapolate(self, residual: float, measured: list[float]) -> None:
        """Set the next g, from `measure`'s numbers and the residual of the pair that they belong to."""
        dual = measured[0] / self.mass
        if self.fallback is not None and self._is_worse(dual, residual):
            self.sweeps.take_potential(self.sweeps.y, self.fallback)
            self._forget()
            self.regularisation = min(max(1000 * self.regularisation, FIRST_AFTER_REJECTION), LARGEST_REGULARISATION)
            self.fallback = None
            self.n_rejected += 1
            return
        assert self.last is not None
        self.best_dual = max(self.best_dual, dual)
        self.best_residual = residual
        self.regularisation = max(self.regularisation / 3, LEAST_REGULARISATION)
        image, self.fallback = self.last[1], None
        coefficients = self._coefficients(np.reshape(measured[1:], (2, MEMORY)))
        if coefficients is None:
            return
        self.fallback = image
        weights = torch.from_numpy(coefficients).to(image.device)
        y = self.sweeps.y
        mixed = torch.addmv(image, self.images.T, weights, alpha=-1.0)
        self.sweeps.take_potential(y, torch.where(y.weight > 0, mixed, image))

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


def _entropic(potential: torch.Tensor, damping: float) -> torch.Tensor:
    """What a potential adds to the dual value a unit of weight: u ln 2 = f / eps itself, or -rho (exp(-f / rho) - 1)
    over eps of a relaxed marginal."""
    in_eps = potential * math.log(2)
    if damping == 1.0:
        return in_eps
    eps_over_rho = (1.0 - damping) / damping
    return -torch.expm1(-eps_over_rho * in_eps) / eps_over_rho

"""Anderson mixing of a fixed-point map of potentials."""

from __future__ import annotations

import torch
from torch import Tensor

MEMORY = 5  # differences kept; three cost a few passes more, eight save none
LEAST_REGULARISATION = 1e-10  # of the normal equations, whose columns have unit length
FIRST_AFTER_REJECTION, LARGEST_REGULARISATION = 1e-6, 0.1


class Anderson:
    """Type-II mixing of potentials [m] in the norm weighted by `weight` [m], which sums to one.

    Constants are no part of a step: potentials are defined up to one. memory 0: no mixing. Never waits for the device.

    Source: Walker and Ni 2011.
    """

    def __init__(self, weight: Tensor, *, memory: int = MEMORY):
        self.weight = weight
        self.steps, self.images = weight.new_zeros(2, memory, len(weight))  # differences of consecutive ones, a ring
        self.products = torch.eye(memory, dtype=weight.dtype, device=weight.device)  # of the differences of steps
        self.regularisation = LEAST_REGULARISATION
        self.forget()

    def forget(self) -> None:
        """Start a new memory."""
        self.filled, self.slot = 0, 0
        self.last: tuple[Tensor, Tensor] | None = None

    def reject(self) -> None:
        """Start a new memory, and mix more carefully for a while."""
        self.forget()
        self.regularisation = min(max(1000 * self.regularisation, FIRST_AFTER_REJECTION), LARGEST_REGULARISATION)

    def next(self, at: Tensor, image: Tensor) -> Tensor:
        """[m]: where to go on from, having come from `at` to `image`; the image itself while there is no memory."""
        memory = len(self.steps)
        if not memory:
            return image
        self.regularisation = max(self.regularisation / 3, LEAST_REGULARISATION)
        step = image - at
        step = step - self.weight @ step
        if self.last is not None:
            slot, self.slot = self.slot, (self.slot + 1) % memory
            self.filled = min(self.filled + 1, memory)
            torch.sub(step, self.last[0], out=self.steps[slot])
            torch.sub(image, self.last[1], out=self.images[slot])
            newest = self.steps @ (self.weight * self.steps[slot])
            self.products[slot], self.products[:, slot] = newest, newest
        self.last = step, image
        if not self.filled:
            return image
        steps, images, products = (z[: self.filled] for z in (self.steps, self.images, self.products))
        products = products[:, : self.filled]
        length = products.diagonal().sqrt().clamp(min=torch.finfo(step.dtype).tiny)
        normal = products / (length * length[:, None])
        normal.diagonal().add_(self.regularisation)
        coefficients = torch.linalg.solve_ex(normal, steps @ (self.weight * step) / length)[0] / length
        mixed = image - coefficients @ images
        mixed = mixed - self.weight @ (mixed - image)
        return torch.where(mixed.isfinite().all(), mixed, image)

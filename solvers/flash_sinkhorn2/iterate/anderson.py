"""Anderson mixing of a fixed-point map of potentials."""

from __future__ import annotations

from typing import Any

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
        self.memory = memory
        self.regularisation = LEAST_REGULARISATION
        self._history: Any
        if weight.is_cuda and memory:
            from .triton_history import TritonHistory  # Triton need not be there on machines without a GPU

            self._history = TritonHistory(weight, memory)
        else:
            self._history = History(weight, memory)
        self.forget()

    def forget(self) -> None:
        """Start a new memory."""
        self.taken = -1  # differences, since the memory was empty

    def reject(self) -> None:
        """Start a new memory, and mix more carefully for a while."""
        self.forget()
        self.regularisation = min(max(1000 * self.regularisation, FIRST_AFTER_REJECTION), LARGEST_REGULARISATION)

    @property
    def filled(self) -> int:
        """Differences in the memory."""
        return min(max(self.taken, 0), self.memory)

    def next(self, at: Tensor, image: Tensor) -> Tensor:
        """[m]: where to go on from, having come from `at` to `image`; the image itself while there is no memory."""
        if not self.memory:
            return image
        self.regularisation = max(self.regularisation / 3, LEAST_REGULARISATION)
        slot = self.taken % self.memory if self.taken >= 0 else None
        self.taken += 1
        self._history.record(at, image, slot, self.filled, self.regularisation)
        mixed: Tensor = self._history.mixed() if self.filled else image
        return mixed


class History:
    """Differences of consecutive steps and images in `memory` slots, and products of the former; on the CPU."""

    def __init__(self, weight: Tensor, memory: int):
        self.weight = weight
        self.steps, self.images = weight.new_zeros(2, memory, len(weight))
        self.products = torch.eye(memory, dtype=weight.dtype, device=weight.device)
        self.step = self.image = weight  # the last ones

    def record(self, at: Tensor, image: Tensor, slot: int | None, filled: int, regularisation: float) -> None:
        """The step from `at` to its image; its differences from the last one go to the slot, None if it is the first.
        `filled` slots are to be mixed, with that regularisation."""
        step = image - at
        step = step - self.weight @ step
        if slot is not None:
            torch.sub(step, self.step, out=self.steps[slot])
            torch.sub(image, self.image, out=self.images[slot])
            newest = self.steps @ (self.weight * self.steps[slot])
            self.products[slot], self.products[:, slot] = newest, newest
        self.step, self.image, self.filled, self.regularisation = step, image, filled, regularisation

    def mixed(self) -> Tensor:
        """[m]: the image less differences, with the mean of the image; the image itself where that is not finite."""
        image, step = self.image, self.step
        steps, images, products = (z[: self.filled] for z in (self.steps, self.images, self.products))
        products = products[:, : self.filled]
        length = products.diagonal().sqrt().clamp(min=torch.finfo(step.dtype).tiny)
        normal = products / (length * length[:, None])
        normal.diagonal().add_(self.regularisation)
        coefficients = torch.linalg.solve_ex(normal, steps @ (self.weight * step) / length)[0] / length
        mixed = image - coefficients @ images
        mixed = mixed - self.weight @ (mixed - image)
        return torch.where(mixed.isfinite().all(), mixed, image)

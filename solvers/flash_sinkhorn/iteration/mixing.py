"""The history that Anderson mixing keeps on the CPU: differences of steps and images of g, and numbers of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..sweeps.sweeps import Sweeps

MEMORY = 5  # differences kept; eight gain nothing before residuals of 1e-5


class History:
    """Of the map g -> G(F(g)) of one problem: a step is G(F(g)) - g, an image G(F(g)).

    Differences of consecutive ones are kept in MEMORY slots; a slot that was never written holds zeros.
    """

    def __init__(self, sweeps: Sweeps):
        self.sweeps = sweeps
        weight = sweeps.y.weight
        self.steps, self.images = weight.new_zeros(2, MEMORY, len(weight))
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # the last two (step, image)

    @property
    def previous_image(self) -> torch.Tensor:
        """The image before the newest."""
        return self._pairs[0][1]

    def record(self, slot: int | None) -> torch.Tensor:
        """Take in the sweeps' last pair of half-steps, and write its differences to the slot (None: it is the first).

        float64 [4 + 2 * MEMORY], sums weighted by b: the residual of (F(g), g); its dual value over eps, up to a
        constant; the step; the newest difference of steps; and the products of that difference, and of the step, with
        the differences in all slots. The last three are meaningless without a slot, products with an empty slot too.
        """
        y = self.sweeps.y
        step = torch.where(y.weight > 0, y.potential - y.used, 0.0)
        self._pairs = [*self._pairs[-1:], (step, y.potential.clone())]
        weighted = y.weight * step
        head = [y.residual[0], self._dual(), weighted.sum()]
        if slot is None:
            return torch.stack([*head, *weighted.new_zeros(1 + 2 * MEMORY)])
        (old_step, old_image), (_, image) = self._pairs
        self.steps[slot], self.images[slot] = step - old_step, image - old_image
        newest = y.weight * self.steps[slot]
        return torch.cat([torch.stack([*head, newest.sum()]), self.steps @ newest, self.steps @ weighted])

    def mix(self, coefficients: Sequence[float]) -> None:
        """Make the newest image minus sum_k coefficients_k (difference of images)_k the sweeps' g, where b > 0."""
        y = self.sweeps.y
        change = torch.zeros_like(y.weight)
        for coefficient, difference in zip(coefficients, self.images, strict=True):
            if coefficient:  # a slot that is not in use may hold anything
                change += coefficient * difference
        self.sweeps.take_potential(y, self._pairs[-1][1] - torch.where(y.weight > 0, change, 0.0))

    def _dual(self) -> torch.Tensor:
        """With w = -rho (exp(-f / rho) - 1), or f itself if balanced, it is <a, w(f)> + <b, w(g)> - eps sum P, and of
        f = F(g) the row sums are a exp(-f / rho): the last term is eps / rho_x <a, w(f)> and a constant."""
        x, y = self.sweeps.x, self.sweeps.y
        of_x = (x.weight * entropic(x.potential, x.damping)).sum() / x.damping
        return of_x + (y.weight * entropic(y.used, y.damping)).sum()


def entropic(potential: torch.Tensor, damping: float) -> torch.Tensor:
    """What a potential adds to the dual value a unit of weight: u ln 2 = f / eps itself, or -rho (exp(-f / rho) - 1)
    over eps of a relaxed marginal."""
    in_eps = potential * math.log(2)
    if damping == 1.0:
        return in_eps
    eps_over_rho = (1.0 - damping) / damping
    return -torch.expm1(-eps_over_rho * in_eps) / eps_over_rho

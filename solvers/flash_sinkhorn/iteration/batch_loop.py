"""Iterations of a batch: all of its problems together, each until its own residual is met."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ..inputs.checks import Inputs
from ..sweeps.sweeps import ROUNDINGS, Sweeps
from ..sweeps.tiles import LOG2_E, Precision
from .acceleration import Anderson, anderson
from .loop import FIRST_LOOKS, Limits, Method, looks_every, sweeps_of
from .progress import Progress

# The share of problems that are done before the others go on alone: that takes a GPU's host a few launches.
DONE_SHARE = {"cpu": 1 / 8, "cuda": 1 / 2}


@dataclass
class Part:
    """Sweeps of those `problems` of a batch that still run, and others that were done not long ago."""

    inputs: Inputs
    sweeps: Sweeps
    problems: np.ndarray
    mixer: Anderson | None = None


class Together(ABC):
    """Sweeps of B problems in one precision with their potentials, at one eps, and what was done so far.

    inputs: x [B, n, d] and so on, one unit for all. Arrays [B]: n_iterations, n_passes, residual of the last look,
    converged and stalled, as of `Loop`, and made_exact: whether exact sweeps took over.
    """

    passes_each: int  # sweeps of an iteration

    def __init__(self, inputs: Inputs, method: Method, precision: Precision):
        self.inputs, self.method, self.precision = inputs, method, precision
        self.eps: float | None = None
        count = len(inputs.x)
        self.n_iterations, self.n_passes, self.residual = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
        self.converged, self.stalled = np.zeros(count, bool), np.zeros(count, bool)
        self.made_exact = np.zeros(count, bool)
        self.sweeps = self._sweeps_of(inputs)

    @property
    @abstractmethod
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What of the sweeps' state results are made of, [B, points] each."""

    @abstractmethod
    def _ended(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of problems that end here."""

    @abstractmethod
    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results [B, n] and [B, m] as they are now, float64, for weights over their mass."""

    @abstractmethod
    def _update(self, part: Part) -> None:
        """One iteration, up to its residuals."""

    @abstractmethod
    def _residuals(self, part: Part) -> torch.Tensor:
        """Of the part's problems, over their mass."""

    @abstractmethod
    def _go_on(self, part: Part, last: np.ndarray) -> None:
        """The rest of the iteration; last: whether the next one is, of the part's problems."""

    @abstractmethod
    def _progress(self, roundings: Callable[[], Any]) -> Any:
        """A new rule of when problems have stalled, with the `has_stalled` of `Progress`."""

    def _mixer(self, sweeps: Sweeps) -> Anderson | None:
        return None

    def on(self, inputs: Inputs) -> Self:
        """Another one, of these."""
        return type(self)(inputs, self.method, self.precision)

    def set_epsilon(self, eps: float) -> None:
        """Keep f and g, and go on with them at this eps."""
        self.method.set_epsilon(self.sweeps, eps, 1.0 if self.eps is None else self.eps / eps)
        self.eps = eps

    def restart(self, eps: float) -> None:
        """From f = g = 0, at this eps."""
        for cloud in (self.sweeps.x, self.sweeps.y):
            cloud.potential.zero_()
        self.set_epsilon(eps)

    def suffices(self, tol: np.ndarray) -> np.ndarray:
        """`Sweeps.suffices` of each problem."""
        if not self.sweeps.improvable:
            return np.ones(len(tol), bool)
        return (not self.sweeps.rounded) & (tol >= ROUNDINGS * self.sweeps.roundings().cpu().numpy())

    def of(self, problems: np.ndarray, precision: Precision) -> Self:
        """The same of some of the problems, in that precision."""
        assert self.eps is not None
        some = type(self)(taken(self.inputs, self._index(problems)), self.method, precision)
        some._copy(slice(None), self, problems)
        some.made_exact |= precision is not self.precision
        some.set_epsilon(self.eps)
        return some

    def put(self, problems: np.ndarray, some: Together) -> None:
        """Take in what became of them."""
        self._copy(problems, some, slice(None))

    def _copy(self, at: Any, other: Together, source: Any) -> None:
        for name in ("n_iterations", "n_passes", "residual", "converged", "stalled", "made_exact"):
            getattr(self, name)[at] = getattr(other, name)[source]
        for mine, theirs in zip(self.kept, other.kept, strict=True):
            mine[self._index(at)] = theirs[self._index(source)]

    def iterate_to(self, tol: Any, limits: Limits, *, leaves: Callable[[list[np.ndarray]], Any] | None = None) -> Any:
        """At least one iteration of each problem that has not had as many as it may, then on until its residual is at
        most its tol, it has had so many, or rounding lets the residual fall no further.

        tol: a number, or an array [B]. leaves: which problems are to end anyhow, from the residuals [B] at all looks so
        far, nan where none was taken. Returns the indices of those that did.
        """
        count = len(self.n_iterations)
        may = np.broadcast_to(limits.max_iterations, count)
        running, left = may > self.n_iterations, np.zeros(count, bool)
        part = Part(self.inputs, self.sweeps, np.arange(count), self._mixer(self.sweeps))
        kept = [tensor.clone() for tensor in self.kept]
        progress = self._progress(lambda: self._spread(part, self._roundings(part)))
        look_every, looks, done = looks_every(self.sweeps), [], 0
        last = self._last(may - 1, limits) & running
        while running.any():
            self._update(part)
            done += 1
            if last.any() or done <= FIRST_LOOKS or done % look_every == 0:
                residual = np.where(running, self._spread(part, self._residuals(part)), np.nan)
                looks.append(residual)
                converged = residual <= tol
                stalled = running & ~converged & progress.has_stalled(done, residual)
                leaving = running & ~(converged | stalled | last) & (False if leaves is None else leaves(looks))
                self.residual[running], self.converged[running] = residual[running], converged[running]
                self.stalled[running], left = stalled[running], left | leaving
                ended = converged | stalled | last | leaving
                self.n_iterations[ended] += done
                self.n_passes[ended] += done * self.passes_each
                self._keep(kept, part, ended)
                running = running & ~ended
                if not running.any():
                    break
            last = self._last(may - done - 1, limits) & running
            self._go_on(part, last[part.problems])
            part = self._narrowed(part, running)
        for own, final in zip(self.kept, kept, strict=True):
            own.copy_(final)
        return np.flatnonzero(left)

    def _last(self, most: np.ndarray, limits: Limits) -> np.ndarray:
        """Which problems have had so many iterations, or no more time."""
        return (self.n_iterations >= most) | limits.out_of_time

    def _keep(self, kept: list[torch.Tensor], part: Part, ended: np.ndarray) -> None:
        rows = np.flatnonzero(ended[part.problems])
        if len(rows):
            at, source = self._index(part.problems[rows]), self._index(rows)
            for tensor, own in zip(kept, self._ended(part), strict=True):
                tensor[at] = own[source]

    def _narrowed(self, part: Part, running: np.ndarray) -> Part:
        """Without the problems that are done, where these are many."""
        rows = np.flatnonzero(running[part.problems])
        size = len(part.problems)
        if size - len(rows) < max(1.0, DONE_SHARE[self.inputs.x.device.type] * size):
            return part
        assert self.eps is not None
        index = self._index(rows)
        inputs = taken(part.inputs, index)
        sweeps = self._sweeps_of(inputs)
        for cloud, old in ((sweeps.x, part.sweeps.x), (sweeps.y, part.sweeps.y)):
            cloud.potential.copy_(old.potential[index])
        self.method.set_epsilon(sweeps, self.eps, 1.0)
        mixer = self._mixer(sweeps)
        if mixer is not None and part.mixer is not None:
            mixer.remember(part.mixer, index)
        return Part(inputs, sweeps, part.problems[rows], mixer)

    def _sweeps_of(self, inputs: Inputs) -> Sweeps:
        return sweeps_of(inputs, cost_scale=self.method.cost_scale, precision=self.precision)

    def _roundings(self, part: Part) -> torch.Tensor:
        """Without limit where exact sweeps can take over, so that there a plateau is reason enough."""
        return torch.full((len(part.problems),), math.inf) if part.sweeps.improvable else part.sweeps.roundings()

    def _spread(self, part: Part, values: torch.Tensor) -> np.ndarray:
        """Of all problems, nan where the part has none."""
        spread = np.full(len(self.n_iterations), np.nan)
        spread[part.problems] = values.cpu().numpy()
        return spread

    def _index(self, problems: Any) -> Any:
        return problems if isinstance(problems, slice) else torch.as_tensor(problems, device=self.inputs.x.device)


class BatchLoop(Together):
    """`Loop` of a batch: alternating updates, mixed."""

    passes_each = 2

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """f and g, base 2."""
        return self.sweeps.x.potential, self.sweeps.y.potential

    def _ended(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        return part.sweeps.x.potential, part.sweeps.y.used

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """f and g."""
        assert self.eps is not None
        x, y, unit = self.sweeps.x, self.sweeps.y, self.eps / LOG2_E
        return x.potential[:, : x.n] * unit, y.potential[:, : y.n] * unit

    def _mixer(self, sweeps: Sweeps) -> Anderson:
        return anderson(sweeps, mass=sweeps.y.weight.sum(-1))

    def _update(self, part: Part) -> None:
        x, y = part.sweeps.x, part.sweeps.y
        part.sweeps.half_step(x, y)
        part.sweeps.half_step(y, x)
        assert part.mixer is not None
        part.mixer.record()

    def _residuals(self, part: Part) -> torch.Tensor:
        assert part.mixer is not None
        return part.mixer.residuals()

    def _go_on(self, part: Part, last: np.ndarray) -> None:
        assert part.mixer is not None
        part.mixer.extrapolate(plain=last)

    def _progress(self, roundings: Callable[[], Any]) -> Progress:
        return Progress(roundings)


def taken(inputs: Inputs, index: torch.Tensor) -> Inputs:
    """Of some problems of a batch."""
    names = ("x", "y", "a", "b", "centre")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[index] for name in names})

"""The iterations of one problem: one eps after another, a fixed number of them or until the residual is met."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from ..inputs.checks import Inputs
from ..sweeps.blocked_batches import BlockedBatch
from ..sweeps.blocked_sweeps import BlockedSweeps
from ..sweeps.sweeps import Cloud, Sweeps
from ..sweeps.tiles import LOG2_E, Precision
from .acceleration import Anderson, anderson
from .progress import Progress

CHEAP_PAIRS = (1 << 24, 4), (1 << 27, 2)  # below so many, residuals are read every so many iterations
FIRST_LOOKS = 2  # iterations after which the residual is always read: they show whether a start is good


class Updates(StrEnum):
    """alternating: f from g, then g from the new f. symmetric: both from the old pair, averaged with it."""

    ALTERNATING = "alternating"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class Check:
    """One residual read back, of the potentials that the last sweep started from, `passes` sweeps and `seconds` into
    the solve, at `eps`."""

    iteration: int
    passes: float
    seconds: float
    eps: float
    precision: Precision
    residual: float


@dataclass(frozen=True)
class Method:
    """How a problem is iterated. rho_x, rho_y: None is a balanced marginal."""

    cost_scale: float
    rho_x: float | None
    rho_y: float | None
    updates: Updates
    acceleration: bool

    @property
    def balanced(self) -> bool:
        """Whether both marginals are."""
        return self.rho_x is None and self.rho_y is None

    def set_epsilon(self, sweeps: Sweeps, eps: float, ratio: float) -> None:
        """`Sweeps.set_epsilon`, and the damping that follows."""
        sweeps.set_epsilon(eps, ratio)
        for cloud, rho in ((sweeps.x, self.rho_x), (sweeps.y, self.rho_y)):
            cloud.damping = 1.0 if rho is None else rho / (rho + eps)


@dataclass(frozen=True)
class Limits:
    """max_iterations in all, or of each problem of a batch; deadline: a time of `time.perf_counter`, or None."""

    max_iterations: int | np.ndarray
    deadline: float | None

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline


def sweeps_of(inputs: Inputs, *, cost_scale: float, precision: Precision) -> Sweeps:
    """Of one problem, or of a batch, on its device."""
    if inputs.x.device.type == "cpu":
        blocked = BlockedBatch if inputs.x.ndim == 3 else BlockedSweeps
        return blocked(inputs, cost_scale=cost_scale)
    from ..sweeps.triton_sweeps import TritonSweeps  # Triton is there only where a GPU is

    return TritonSweeps(inputs, cost_scale=cost_scale, precision=precision)


def looks_every(sweeps: Sweeps) -> int:
    """How many iterations apart residuals are read back: a look makes the GPU wait for the host."""
    if sweeps.x.weight.device.type == "cpu":
        return 1
    weight = sweeps.x.weight
    pairs = sweeps.x.n * sweeps.y.n * (len(weight) if weight.ndim == 2 else 1)
    return next((every for limit, every in CHEAP_PAIRS if pairs < limit), 1)


@dataclass
class Loop:
    """Sweeps of one problem in one precision with the potentials in them, and what was done so far.

    n_passes: sweeps over all pairs. residual: of the last check, None before any. converged: whether that met the
    tolerance; stalled: whether it ended iterations because more would not have met it.
    """

    inputs: Inputs
    method: Method
    precision: Precision
    started: float = field(default_factory=time.perf_counter)
    eps: float | None = None
    n_iterations: int = 0
    n_passes: float = 0.0
    residual: float | None = None
    converged: bool = False
    stalled: bool = False
    trace: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sweeps = self._make_sweeps()
        self.look_every = looks_every(self.sweeps)
        self._mixer: Anderson | None = None  # of these sweeps

    def _make_sweeps(self) -> Sweeps:
        return sweeps_of(self.inputs, cost_scale=self.method.cost_scale, precision=self.precision)

    def on(self, inputs: Inputs) -> Loop:
        """Another one, of these."""
        return Loop(inputs, self.method, self.precision)

    def set_epsilon(self, eps: float) -> None:
        """Keep f and g, and go on with them at this eps."""
        self.method.set_epsilon(self.sweeps, eps, 1.0 if self.eps is None else self.eps / eps)
        self.eps = eps

    def restart(self, eps: float) -> None:
        """From f = g = 0, at this eps."""
        for cloud in (self.sweeps.x, self.sweeps.y):
            cloud.potential.zero_()
        self.set_epsilon(eps)

    def make_exact(self) -> None:
        """Go on with the clouds as given, from the potentials of the rounded ones."""
        assert self.eps is not None
        rounded, self.precision = self.sweeps, Precision.EXACT
        self.sweeps, self._mixer = self._make_sweeps(), None
        self.sweeps.take_potentials(rounded)
        self.set_epsilon(self.eps)

    def iterate(self) -> None:
        """One update of both potentials."""
        sweeps = self.sweeps
        if self.method.updates is Updates.ALTERNATING:
            sweeps.half_step(sweeps.x, sweeps.y)
            sweeps.half_step(sweeps.y, sweeps.x)
        else:
            sweeps.symmetric_step()
        self.n_iterations += 1
        self.n_passes += 2

    def iterate_to(self, tol: float, limits: Limits) -> None:
        """At least one iteration, then on until a sweep finds the residual of what it started from <= tol, the limits
        are reached, or rounding lets it fall no further (`Progress`).

        The updates of that last sweep are taken back, so that `residual` is that of the potentials left in the sweeps.
        """
        for _ in self.checks(tol, limits):
            pass

    def checks(self, tol: float, limits: Limits) -> Iterator[float]:
        """`iterate_to`, stopping at each residual that is read back.

        Of alternating updates the rows' half-step met the rows' marginal exactly, and the columns' measures the rest.
        """
        mixer, progress, start = self._started_mixer(), Progress(self._rounding), self.n_iterations
        last = self._is_last(limits)
        while True:
            self.iterate()
            if mixer:
                mixer.record()
            done = self.n_iterations - start
            if last or done <= FIRST_LOOKS or done % self.look_every == 0:
                residual = mixer.residuals().item() if mixer else self._measured_residual()
                self._record(residual)
                self.converged = residual <= tol
                self.stalled = not self.converged and progress.has_stalled(done, residual)
                if self.converged or last or self.stalled:
                    for cloud, _ in self._measured():
                        cloud.potential.copy_(cloud.used)
                    yield residual
                    return
                yield residual
            last = self._is_last(limits)
            if mixer:
                mixer.extrapolate(plain=last)

    def _is_last(self, limits: Limits) -> bool:
        """Whether the next iteration is."""
        return bool(self.n_iterations + 1 >= limits.max_iterations) or limits.out_of_time

    def _rounding(self) -> float:
        """Of the sweeps; without limit where exact ones can take over, so that there a plateau is reason enough."""
        return math.inf if self.sweeps.improvable else self.sweeps.rounding()

    def _started_mixer(self) -> Anderson | None:
        if not self.method.acceleration or self.method.updates is not Updates.ALTERNATING:
            return None
        if self._mixer is None:
            self._mixer = anderson(self.sweeps, mass=self.inputs.mass_y)
        else:
            self._mixer.start()
        return self._mixer

    def _measured(self) -> list[tuple[Cloud, float]]:
        """The sides whose residual counts, with their mass."""
        x, y = (self.sweeps.x, self.inputs.mass_x), (self.sweeps.y, self.inputs.mass_y)
        return [y] if self.method.updates is Updates.ALTERNATING else [x, y]

    def _measured_residual(self) -> float:
        return max(cloud.residual.item() / mass for cloud, mass in self._measured())

    def potentials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """f [n] and g [m] as they are now, float64, for the weights as given."""
        assert self.eps is not None
        unit, mass = self.eps / LOG2_E, self.eps * math.log(self.inputs.mass) / 2  # sweeps see weights over their mass
        x, y = self.sweeps.x, self.sweeps.y
        return x.potential[: x.n] * unit - mass, y.potential[: y.n] * unit - mass

    def _record(self, residual: float) -> None:
        assert self.eps is not None
        seconds = time.perf_counter() - self.started
        self.trace.append(Check(self.n_iterations, self.n_passes, seconds, self.eps, self.precision, residual))
        self.residual = residual

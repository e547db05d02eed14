"""The published method end to end: coarse stage, lift, sampled check with its return, block-sparse stage."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import checked_inputs, positive, whole

from ..geometry import TiledCloud, from_tiles
from ..screen import Mask
from ..solver import check_dimension, sorted_clouds
from .check import SampledCheck
from .coarse import SMALL, Coarse
from .mask import screened
from .updates import AVERAGED, WHOLE, updated

FIRST_CHECKS, CHECK_EVERY = (1, 2, 4, 8), 16  # updates
NEAR = 2.0  # times the tolerance: checked after every update, and with previews
PREVIEWS = (0, 2, 128)  # updates after which a whole update is tried whatever the score
WINDOW, LEAST_PROGRESS, SLOW_WINDOWS = 64, 0.01, 3  # of updates; the score must fall by that much, or so often not


@dataclass(frozen=True)
class Trial:
    """A checked pair of potentials. stage: "lift", "averaged", or "preview" of one whole update; `updates` over the
    points before; residual: the check's estimate; seconds of `time.perf_counter`."""

    stage: str
    updates: int
    residual: float
    seconds: float


@dataclass(frozen=True)
class Published:
    """Potentials f [n], g [m] float64 as in `Result`, of the pair that the check accepted, or else of the best one.

    residual: sampled, of that pair; converged: whether the check accepted it, which is no bound. coarse_returns: how
    often a check sent the solver back to the cells, 0 to 2; coarse_updates on them. n_iterations: updates over the
    points. n_passes: two an update, and all else as the part that its pairs are of the last mask's. kept_pairs: of that
    mask, a point of x. n_screens: masks made, one an update. trace: checks, the last one of the pair returned.
    """

    f: Tensor
    g: Tensor
    eps: float
    cost_scale: float
    residual: float
    converged: bool
    coarse_returns: int
    coarse_updates: int
    n_iterations: int
    n_passes: float
    kept_pairs: float
    n_screens: int
    trace: tuple[Trial, ...]
    started: float


@torch.no_grad()
def solve_published(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    tol: float = 1e-2,
    max_iterations: int = 2048,
    max_seconds: float | None = None,
    tile: int = 32,
) -> Published:
    """FlashSinkhorn 2 as published (arXiv 2610.02395), on kd tiles and with coordinates as given.

    Arguments, units and errors as those of `solve`; max_iterations: updates over the points. `tol` is on what the check
    estimates.
    """
    started = time.perf_counter()
    eps, cost_scale, tol = positive("eps", eps), positive("cost_scale", cost_scale), positive("tol", tol)
    max_iterations, tile = whole("max_iterations", max_iterations), whole("tile", tile)
    max_seconds = None if max_seconds is None else positive("max_seconds", max_seconds)
    check_dimension(x)
    inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale)
    of_x, of_y, _ = sorted_clouds(inputs, eps=eps, cost_scale=cost_scale, tol=tol, tile=tile)
    k = cost_scale * math.log2(math.e) / eps
    of_rows, of_cols = (w.double() / w.double().sum() for w in (inputs.a, inputs.b))
    check = SampledCheck(inputs.x, inputs.y, of_rows, of_cols, k, tol=tol)  # on coordinates as given
    deadline = math.inf if max_seconds is None else started + max_seconds
    run = _Run(of_x, of_y, k, check, tol, max_iterations, deadline)
    run.solve()
    u, v = run.best
    scale, shift = eps * math.log(2.0), eps * math.log(inputs.mass) / 2
    kept = float(len(run.mask.cols)) * tile**2 if run.mask else float(of_x.tree.n) * of_y.tree.n
    return Published(
        f=scale * u - shift,
        g=scale * v - shift,
        eps=eps,
        cost_scale=cost_scale,
        residual=run.trace[-1].residual,
        converged=run.accepted,
        coarse_returns=run.coarse_returns,
        coarse_updates=run.coarse.updates,
        n_iterations=run.updates + (run.coarse.updates if run.small else 0),
        n_passes=2 * run.n_screens + (run.coarse.pairs_done + check.pairs_done) / kept,
        kept_pairs=kept / of_x.tree.n,
        n_screens=run.n_screens,
        trace=tuple(run.trace),
        started=started,
    )


class _Run:
    def __init__(
        self, x: TiledCloud, y: TiledCloud, k: float, check: SampledCheck, tol: float, most: int, deadline: float
    ):
        self.x, self.y, self.k, self.check, self.tol = x, y, k, check, tol
        self.most, self.deadline = most, deadline
        self.small = max(x.tree.n, y.tree.n) <= SMALL  # then cells are the points
        self.coarse = Coarse(x, y, k, most=most if self.small else 2**62)
        self.mask: Mask | None = None
        self.accepted, self.score, self.best_score = False, math.inf, math.inf
        self.updates = self.n_screens = self.coarse_returns = 0
        self.trace: list[Trial] = []
        self.best: tuple[Tensor, Tensor]
        self.best_trial: Trial

    def solve(self) -> None:
        u, v = self._coarse_stage()
        if not self.accepted:
            self._fine_stage(u, v)
        if not self.accepted and self.trace[-1] is not self.best_trial:
            self.trace.append(self.best_trial)

    def _coarse_stage(self) -> tuple[Tensor, Tensor]:
        self.coarse.anneal()
        u, v = self.coarse.lifted(self.x, self.y)
        for back in (self.coarse.more, lambda: self.coarse.settle(self.tol)):
            if self._try("lift", u, v) or self._late() or self.coarse.updates >= self.coarse.most:
                return u, v
            back()
            self.coarse_returns += 1
            u, v = self.coarse.lifted(self.x, self.y)
        self._try("lift", u, v)
        return u, v

    def _fine_stage(self, u: Tensor, v: Tensor) -> None:
        window, slow = math.inf, 0
        spent = self.coarse.updates if self.small else 0
        while not self.accepted and not self._late() and spent + self.updates < self.most:
            if self._previews() and self._try("preview", *self._updated(u, v, WHOLE)):
                return
            u, v = self._updated(u, v, AVERAGED)
            self.updates += 1
            if not self._checks():
                continue
            self._try("averaged", u, v)
            if self.updates % WINDOW == 0:
                slow = slow + 1 if self.score > (1 - LEAST_PROGRESS) * window else 0
                window = self.score
                if slow == SLOW_WINDOWS or not math.isfinite(window):
                    return

    def _checks(self) -> bool:
        near = self.score <= NEAR * self.tol
        return near or self.updates in FIRST_CHECKS or self.updates % CHECK_EVERY == 0 or self.updates == self.most

    def _previews(self) -> bool:
        near = self.score <= NEAR * self.tol
        return self.updates in PREVIEWS or (near and self.updates % CHECK_EVERY == 0)

    def _updated(self, u: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor]:
        self.mask = screened(self.x, self.y, u, v, self.k, tol=self.tol)
        self.n_screens += 1
        u, v, _ = updated(self.x, self.y, self.mask, u, v, self.k, share)
        return u, v

    def _try(self, stage: str, u: Tensor, v: Tensor) -> bool:
        """Whether the check accepts them; the best so far are kept, in the order given."""
        u, v = from_tiles(self.x, u), from_tiles(self.y, v)
        verdict = self.check(u, v)
        self.accepted, trial = verdict.accepted, Trial(stage, self.updates, verdict.residual, time.perf_counter())
        self.trace.append(trial)
        if stage != "preview":
            self.score = verdict.score
        if verdict.accepted or verdict.score < self.best_score or len(self.trace) == 1:
            self.best_score, self.best, self.best_trial = verdict.score, (u, v), trial
        return verdict.accepted

    def _late(self) -> bool:
        return time.perf_counter() > self.deadline

"""Iterations of one problem at one eps, until the residual of the whole plan is met."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from solvers.flash_sinkhorn.iteration.progress import Progress

from ..sweep import Pass
from .anderson import MEMORY, Anderson
from .passes import Passes
from .updates import Correction, corrected, lite, plain

DUAL_SLACK = 10.0  # times residual^2, in eps: the dual value of a good step may fall by that much
DUAL_ROUNDING = 1e-12  # relative
OMITTED_SHARE = 0.25  # of the tolerance, or of the residual while that is larger: what tile pairs left out may hold
SCREEN_SLACK = 8.0  # a mask is chosen for so much less at least, so that it stays valid while potentials move
LASTING_SLACK = 1e3
SLACK_GROWTH, MOST_SLACK = 16.0, 1e5  # where they move far: pairs kept grow with the logarithm only
SHORT_LIFE = 4  # passes
MOST_OMITTED = 0.5  # above, a half-step says nothing of the dual value
FAR_OMITTED = 1e4  # and above, nothing of the rows either: bounds are not that far off
ROUNDING = 2.0**-19  # of a residual, by exponentials and sums of float32: sixteen of its roundings


@dataclass(frozen=True)
class Options:
    """correction; memory of Anderson mixing, 0 for none; max_passes: a pass is all row or all column sums once;
    deadline: a time of `time.perf_counter`, or None; lasting: masks are chosen for the tolerance at once and with much
    slack, as where choosing costs more than passes do; thinning: masks lose what measured sums say they can;
    limits_pairs: TooManyPairs instead of a first mask that leaves no room for partial sums."""

    correction: Correction = Correction.FULL
    memory: int = MEMORY
    max_passes: int = 1000
    deadline: float | None = None
    lasting: bool = True
    thinning: bool = True
    limits_pairs: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return self.deadline is not None and time.perf_counter() > self.deadline


@dataclass(frozen=True)
class Check:
    """One residual, `passes` passes into the iterations, at `seconds` of `time.perf_counter`. omitted: as in `Outcome`;
    dual: in units of eps."""

    passes: int
    residual: float
    omitted: float
    dual: float
    seconds: float


@dataclass(eq=False)
class Outcome:
    """Potentials u [N], v [M] in base 2, and what is known of their plan.

    residual: sum_j |sum_i P_ij - b_j| over kept tile pairs, whose row sums are exact; omitted: bound of what the others
    add to it, or to the rows' residual. converged: whether their sum is within the tolerance; stalled: whether
    iterations ended because rounding lets it fall no further. Not converged, they are the best of the last mask.
    """

    u: Tensor
    v: Tensor
    residual: float
    omitted: float
    converged: bool
    n_passes: int
    n_rejected: int
    trace: list[Check] = field(default_factory=list)
    stalled: bool = False


def iterate(
    passes: Passes, u: Tensor, v: Tensor, *, tol: float, options: Options | None = None, robust: bool = True
) -> Outcome:
    """From potentials u [N], v [M] (base 2, kd order, finite) to a residual of at most tol, or the limits, or where
    rounding lets it fall no further. robust: whether rows may sum to anything, so that first passes run with each
    row's maximum.

    A row half-step, a column half-step, mixing; the residual is read once in two passes, and the deadline before each
    once there is a residual. Of corrected half-steps the dual value never falls, and a mixed v which lowers it is taken
    back. Raises ValueError on tol <= 0, ArithmeticError on potentials that are not finite.
    """
    if not tol > 0:
        raise ValueError(f"tol is {tol}: give a positive residual")
    return _Iterations(passes, u, v, tol, options or Options(), robust).run()


class _Iterations:
    def __init__(self, passes: Passes, u: Tensor, v: Tensor, tol: float, options: Options, robust: bool):
        self.passes, self.tol, self.options = passes, tol, options
        self.u, self.v = u, v
        self.weightless = passes.y.weight == 0
        self.mixer = Anderson(passes.y.weight, memory=options.memory)
        self.unmixed: tuple[Tensor, Tensor] | None = None  # where the last half-steps led, if v was mixed from there
        self.best: Outcome | None = None  # of this mask
        self.progress = Progress(lambda: ROUNDING)
        self.best_dual, self.residual, self.omitted, self.mass = -math.inf, 1.0, 0.0, 1.0
        self.robust = robust
        self.n_passes = self.n_rejected = 0
        self.least_slack = LASTING_SLACK if options.lasting else SCREEN_SLACK
        self.slack, self.refreshed_at = self.least_slack, -SHORT_LIFE - 1
        self.is_fresh = True  # whether the mask was chosen at these potentials
        self.trace: list[Check] = []

    def run(self) -> Outcome:
        while True:
            before = self.u, self.v
            dual, left_out = self._row_half_step()
            if self.unmixed is not None and self._is_worse(dual):
                self._take_back(self.unmixed)
                continue
            share = OMITTED_SHARE * max(self.tol, min(self.residual, 1.0))
            if not left_out <= FAR_OMITTED and not self.is_fresh:  # v moved so far that rows missed what matters
                self.u, self.v = before
                self._refresh(share)
                self.robust = True
                continue
            if not math.isfinite(dual):
                raise ArithmeticError(
                    f"the dual value is {dual} after {self.n_passes} passes: start from finite potentials, or choose "
                    "a larger eps"
                )
            if self.best is not None and self.options.is_late:
                return self._ended(self.best)
            # without pairs the dual value is too large, by -log(1 - what rows leave out)
            if left_out <= MOST_OMITTED:
                self.best_dual = max(self.best_dual, dual - 2 * left_out)
            if not left_out <= share:
                self._refresh(share)
            trusted = self.residual
            found = self._column_pass()
            checked = self._checked(dual)
            if checked.converged or checked.stalled or self._is_last:
                return self._ended(checked if checked.converged else self.best or checked, stalled=checked.stalled)
            if self.mass - 1 > MOST_OMITTED:  # rows had lost what matters: take their half-step again
                del found
                self.residual = trusted
                if self.robust and self.unmixed is not None:  # and again: unmixed
                    self._take_back(self.unmixed)
                    self._refresh(share)
                self.robust = True
                continue
            at, plain_v = self.v, self._column_half_step(found)
            del found  # its partial sums are large, and the next pass has its own
            self.v = self.mixer.next(at, plain_v)
            self.unmixed = (self.u, plain_v) if self.mixer.filled else None
            self.robust = self.is_fresh = False

    def _take_back(self, unmixed: tuple[Tensor, Tensor]) -> None:
        """Go on from there, and mix more carefully."""
        (self.u, self.v), self.unmixed, self.robust, self.is_fresh = unmixed, None, True, False
        self.mixer.reject()
        self.n_rejected += 1

    def _checked(self, dual: float) -> Outcome:
        """The potentials at this check, which may be the best of the mask."""
        total = self.residual + self.omitted
        self.trace.append(Check(self.n_passes, self.residual, self.omitted, dual, time.perf_counter()))
        converged = total <= self.tol
        stalled = not converged and self.progress.has_stalled(len(self.trace), total)
        found = Outcome(self.u, self.v, self.residual, self.omitted, converged, 0, 0, stalled=stalled)
        if self.best is None or total <= self.best.residual + self.best.omitted:
            self.best = found
        return found

    def _ended(self, found: Outcome, *, stalled: bool = False) -> Outcome:
        return replace(found, n_passes=self.n_passes, n_rejected=self.n_rejected, trace=self.trace, stalled=stalled)

    def _refresh(self, share: float) -> None:
        """The sooner the last mask became invalid, the more slack the next one has."""
        lasted = self.n_passes - self.refreshed_at
        if self.options.lasting:
            share = min(share, OMITTED_SHARE * self.tol)
        factor = SLACK_GROWTH if lasted <= SHORT_LIFE else 1.0 / SLACK_GROWTH
        self.slack = min(max(self.slack * factor, self.least_slack), MOST_SLACK)
        self.passes.refresh(self.u, self.v, share / self.slack)
        self.refreshed_at, self.best, self.is_fresh = self.n_passes, None, True

    def _row_half_step(self) -> tuple[float, float]:
        """Dual value in eps after it, for of exact rows sum P is one; and what tile pairs left out hold at most."""
        passes, full = self.passes, self.options.correction is Correction.FULL
        found = passes.row_pass(self.u, self.v, robust=self.robust, partial=full)
        self.n_passes += 1
        if full and found.partial is not None:
            self.u, self.v = corrected(passes.x, passes.y, passes.coarse, self.u, self.v, found)
        else:
            self.u = plain(passes.x, self.u, found)
        dual = passes.x.weight @ self.u + passes.y.weight @ self.v
        in_bits, left_out = torch.stack([dual, passes.omitted(self.u, self.v)]).tolist()
        return math.log(2.0) * in_bits, left_out

    def _is_worse(self, dual: float) -> bool:
        slack = DUAL_SLACK * min(self.residual, 1.0) ** 2 + DUAL_ROUNDING * abs(self.best_dual)
        return not dual >= self.best_dual - slack  # nan is worse

    def _column_pass(self) -> Pass:
        """Also the residual. Rows summed to one over what was kept then, so they miss nothing and have, all together,
        the plan's mass less one too much: no more than columns are off, whatever is kept now."""
        passes, partial = self.passes, self.options.correction is not Correction.NONE
        found = passes.column_pass(self.u, self.v, robust=self.robust, partial=partial)
        self.n_passes += 1
        off = (found.log2_sums.exp2() - 1.0).mul_(passes.y.weight).masked_fill_(self.weightless, 0.0)
        numbers = torch.stack([off.abs().sum(), off.sum() + 1.0, passes.omitted(self.u, self.v)])
        residual, mass, self.omitted = numbers.tolist()
        self.residual, self.mass = residual + passes.raised, mass - passes.raised  # raised sums are below one
        return found

    def _column_half_step(self, found: Pass) -> Tensor:
        """v, unmixed; u moves along where the correction moves it, for the next row pass."""
        passes = self.passes
        if found.partial is None:
            return plain(passes.y, self.v, found)
        if self.options.correction is Correction.FULL:
            v, self.u = corrected(passes.y, passes.x, passes.coarse.mirrored, self.v, self.u, found)
            return v
        if self.options.correction is Correction.LITE:
            return lite(passes.x, passes.y, passes.coarse, self.v, found)
        return plain(passes.y, self.v, found)

    @property
    def _is_last(self) -> bool:
        return self.options.is_late or self.n_passes + 2 > self.options.max_passes

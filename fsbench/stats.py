"""Sample statistics: median, quartiles, and whether two sets of samples differ. Never best-of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Quartiles:
    q25: float
    median: float
    q75: float


def quartiles(samples: Sequence[float]) -> Quartiles:
    """Quartiles of at least one sample, linearly interpolated. ValueError if there is none."""
    if len(samples) == 0:
        raise ValueError("samples is empty: there is nothing to summarise")
    return Quartiles(*(float(q) for q in np.quantile(np.asarray(samples, float), (0.25, 0.5, 0.75))))


def compare(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Ratio of medians new / old, and the two-sided Mann-Whitney p-value that they come from one distribution."""
    from scipy.stats import mannwhitneyu  # here: half a second that most commands need not pay

    ratio = quartiles(new).median / quartiles(old).median
    return ratio, float(mannwhitneyu(new, old, alternative="two-sided").pvalue)


def aa_spread(repeats: Sequence[Sequence[float]]) -> float:
    """Largest relative difference between the medians of repeated runs of the same cell; 0 for one run."""
    medians = [quartiles(samples).median for samples in repeats]
    return max(medians) / min(medians) - 1

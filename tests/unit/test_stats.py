"""Sample statistics."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fsbench import stats


def test_quartiles_of_known_samples() -> None:
    assert stats.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == stats.Quartiles(2.0, 3.0, 4.0)
    assert stats.quartiles([0.5]) == stats.Quartiles(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="samples is empty"):
        stats.quartiles([])


def test_one_slow_outlier_does_not_move_the_median() -> None:
    assert stats.quartiles([1.0, 1.0, 1.0, 1.0, 100.0]).median == 1.0


def test_compare_tells_a_real_change_from_noise() -> None:
    rng = np.random.default_rng(0)
    old = 1 + 0.01 * rng.standard_normal(30)
    ratio, p = stats.compare(old, 1.1 * (1 + 0.01 * rng.standard_normal(30)))
    assert ratio == pytest.approx(1.1, rel=0.01) and p < 1e-6
    ratio, p = stats.compare(old, 1 + 0.01 * rng.standard_normal(30))
    assert ratio == pytest.approx(1.0, rel=0.01) and p > 0.01
    assert stats.compare(old, old[::-1])[1] == pytest.approx(1.0)


def test_aa_spread_is_the_widest_gap_of_medians() -> None:
    assert stats.aa_spread([[1.0, 1.0, 9.0], [1.03, 1.03], [1.01]]) == pytest.approx(0.03)
    assert stats.aa_spread([[2.0]]) == 0.0


def test_import_is_light() -> None:
    code = "import sys, fsbench.stats; sys.exit(any(name in sys.modules for name in ('scipy', 'torch', 'jax')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

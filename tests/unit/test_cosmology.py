"""Growth and linear power against independent integrals, and against limits that Eisenstein & Hu publish."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad

from fsbench.problems import cosmology


@pytest.mark.parametrize("a", [0.02, 0.05, 0.3, 1.0])
def test_growth_is_its_integral(a: float) -> None:
    """D ~ H int da / (a H)^3 (Heath 1977), and its derivative."""

    def unnormalised(a: float) -> float:
        return cosmology.expansion(a) * quad(lambda s: (s * cosmology.expansion(s)) ** -3, 0, a)[0]

    assert cosmology.growth(a) == pytest.approx(unnormalised(a) / unnormalised(1.0), rel=1e-8)
    step = 1e-5
    slope = np.log(cosmology.growth(a * (1 + step)) / cosmology.growth(a * (1 - step))) / (2 * step)
    assert cosmology.growth_rate(a) == pytest.approx(slope, rel=1e-6)
    # a^3 E dD/da
    derivative = cosmology.growth(a) * slope / a
    assert cosmology.growth_momentum(a) == pytest.approx(a**3 * cosmology.expansion(a) * derivative, rel=1e-6)


def test_power_has_its_sigma_8_and_its_tilt() -> None:
    def integrand(log_k: float) -> float:
        k = np.exp(log_k)
        x = 8 * k
        window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
        return float(k**3 * cosmology.linear_power(k) * window**2 / (2 * np.pi**2))

    variance = quad(integrand, np.log(1e-4), np.log(20), limit=500)[0]
    assert np.sqrt(variance) == pytest.approx(0.8111, rel=1e-4)
    k = np.array([1e-6, 2e-6])
    assert cosmology.transfer(k) == pytest.approx([1, 1], abs=1e-3)
    low = cosmology.linear_power(k)
    assert np.log(low[1] / low[0]) / np.log(2) == pytest.approx(0.9649, abs=2e-3)


def test_without_baryons_the_transfer_function_is_its_published_fit() -> None:
    """Equation 29: L / (L + C q^2) with L = ln(2e + 1.8 q), C = 14.2 + 731 / (1 + 62.5 q), good to about 5 %."""
    k = np.geomspace(1e-3, 10, 50)
    q = k * cosmology.HUBBLE * (2.7255 / 2.7) ** 2 / (cosmology.OMEGA_MATTER * cosmology.HUBBLE**2)
    log = np.log(2 * np.e + 1.8 * q)
    fit = log / (log + (14.2 + 731 / (1 + 62.5 * q)) * q**2)
    np.testing.assert_allclose(cosmology.transfer(k, baryon_fraction=1e-6), fit, rtol=0.05)


def test_sound_horizon_is_its_published_fit() -> None:
    """Equation 26, good to 2 %; and the acoustic peaks have its wavelength."""
    matter, baryon = (omega * cosmology.HUBBLE**2 for omega in (cosmology.OMEGA_MATTER, cosmology.OMEGA_BARYON))
    fit = 44.5 * np.log(9.83 / matter) / np.sqrt(1 + 10 * baryon**0.75)
    assert cosmology.sound_horizon() == pytest.approx(fit, rel=0.02)
    k = np.linspace(0.05, 0.3, 2001)
    smooth = np.polynomial.Polynomial.fit(k, np.log(cosmology.linear_power(k)), 4)
    wiggles = np.log(cosmology.linear_power(k)) - smooth(k)
    tops = k[1:-1][(np.diff(wiggles)[:-1] > 0) & (np.diff(wiggles)[1:] < 0)]
    expected = 2 * np.pi / (cosmology.sound_horizon() * cosmology.HUBBLE)  # h/Mpc
    assert len(tops) >= 3 and np.diff(tops).mean() == pytest.approx(expected, rel=0.1)

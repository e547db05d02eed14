"""Flat LCDM with the parameters of Planck 2018: growth of structure, and the linear power spectrum of matter.

Wavenumbers in h/Mpc, power in (Mpc/h)^3, a is the scale factor (1 today), times in units of 1 / H_0.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy.special import hyp2f1

HUBBLE = 0.6736  # in 100 km/s/Mpc
OMEGA_MATTER = 0.3153
OMEGA_BARYON = 0.0493
SPECTRAL_INDEX = 0.9649
SIGMA_8 = 0.8111
_CMB_KELVIN = 2.7255


def expansion(a: float) -> float:
    """H(a) / H_0, without radiation."""
    return math.sqrt(OMEGA_MATTER / a**3 + 1 - OMEGA_MATTER)


def growth(a: float) -> float:
    """D(a), the linear growth of density contrasts, one today."""
    return _unnormalised_growth(a) / _unnormalised_growth(1.0)


def growth_rate(a: float) -> float:
    """f = dln D / dln a."""
    x = _dark_energy_ratio(a)
    # d/dx 2F1(1/3, 1; 11/6; x) = (2/11) 2F1(4/3, 2; 17/6; x)
    return float(1 + 3 * x * (2 / 11) * hyp2f1(4 / 3, 2, 17 / 6, x) / hyp2f1(1 / 3, 1, 11 / 6, x))


def growth_momentum(a: float) -> float:
    """a^3 E(a) dD/da: the comoving momentum a^2 dx/dt of the growing mode, in units of its displacement today."""
    return a**2 * expansion(a) * growth(a) * growth_rate(a)


def _dark_energy_ratio(a: float) -> float:
    return -(1 - OMEGA_MATTER) / OMEGA_MATTER * a**3


def _unnormalised_growth(a: float) -> float:
    return float(a * hyp2f1(1 / 3, 1, 11 / 6, _dark_energy_ratio(a)))


def linear_power(k: np.ndarray) -> np.ndarray:
    """The linear power spectrum today at k > 0, normalised to sigma_8."""
    return _amplitude() * _unnormalised_power(k)


def _unnormalised_power(k: np.ndarray) -> np.ndarray:
    return k**SPECTRAL_INDEX * transfer(k) ** 2


@cache
def _amplitude() -> float:
    """From the variance in spheres of 8 Mpc/h, trapezoids in log k."""
    log_k = np.linspace(math.log(1e-5), math.log(1e2), 20_001)
    k = np.exp(log_k)
    x = 8 * k
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    window[x < 1e-2] = 1 - x[x < 1e-2] ** 2 / 10  # the formula above cancels
    variance = np.trapezoid(k**3 * _unnormalised_power(k) * window**2 / (2 * np.pi**2), log_k)
    return SIGMA_8**2 / float(variance)


def transfer(k: np.ndarray, *, baryon_fraction: float = OMEGA_BARYON / OMEGA_MATTER) -> np.ndarray:
    """Transfer function of matter, one at small k. Source: Eisenstein & Hu 1998 (astro-ph/9709112), section 3."""
    f_b, f_c = baryon_fraction, 1 - baryon_fraction
    matter = OMEGA_MATTER * HUBBLE**2
    baryon = f_b * matter
    theta = _CMB_KELVIN / 2.7
    z_eq = 2.5e4 * matter / theta**4
    k_eq = 7.46e-2 * matter / theta**2  # 1/Mpc
    z_drag = _drag_redshift(matter, baryon)
    r_drag = 31.5 * baryon / theta**4 * 1000 / z_drag
    sound = sound_horizon(baryon_fraction=baryon_fraction)
    silk = 1.6 * baryon**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)  # 1/Mpc

    k = np.asarray(k) * HUBBLE  # 1/Mpc from here on
    q = k / (13.41 * k_eq)
    ks = k * sound
    a_1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)
    a_2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
    alpha_c = a_1**-f_b * a_2 ** -(f_b**3)
    b_1 = 0.944 / (1 + (458 * matter) ** -0.708)
    b_2 = (0.395 * matter) ** -0.0266
    beta_c = 1 / (1 + b_1 * (f_c**b_2 - 1))
    share = 1 / (1 + (ks / 5.4) ** 4)
    cold = share * _pressureless(q, 1.0, beta_c) + (1 - share) * _pressureless(q, alpha_c, beta_c)

    y = (1 + z_eq) / (1 + z_drag)
    root = math.sqrt(1 + y)
    suppression = y * (-6 * root + (2 + 3 * y) * math.log((root + 1) / (root - 1)))
    alpha_b = 2.07 * k_eq * sound * (1 + r_drag) ** -0.75 * suppression
    beta_b = 0.5 + f_b + (3 - 2 * f_b) * math.sqrt((17.2 * matter) ** 2 + 1)
    node = 8.41 * matter**0.435
    shifted = ks / (1 + (node / ks) ** 3) ** (1 / 3)
    baryonic = _pressureless(q, 1.0, 1.0) / (1 + (ks / 5.2) ** 2)
    baryonic += alpha_b / (1 + (beta_b / ks) ** 3) * np.exp(-((k / silk) ** 1.4))
    return f_b * baryonic * np.sinc(shifted / np.pi) + f_c * cold


def sound_horizon(*, baryon_fraction: float = OMEGA_BARYON / OMEGA_MATTER) -> float:
    """Comoving sound horizon at the drag epoch in Mpc. Source: as `transfer`, equation 6."""
    matter = OMEGA_MATTER * HUBBLE**2
    baryon = baryon_fraction * matter
    theta = _CMB_KELVIN / 2.7
    k_eq = 7.46e-2 * matter / theta**2
    r_eq = 31.5 * baryon / theta**4 * 1000 / (2.5e4 * matter / theta**4)
    r_drag = 31.5 * baryon / theta**4 * 1000 / _drag_redshift(matter, baryon)
    ratio = (math.sqrt(1 + r_drag) + math.sqrt(r_drag + r_eq)) / (1 + math.sqrt(r_eq))
    return 2 / (3 * k_eq) * math.sqrt(6 / r_eq) * math.log(ratio)


def _drag_redshift(matter: float, baryon: float) -> float:
    b_1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
    b_2 = 0.238 * matter**0.223
    return 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + b_1 * baryon**b_2)


def _pressureless(q: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    log = np.log(math.e + 1.8 * beta * q)
    return log / (log + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)

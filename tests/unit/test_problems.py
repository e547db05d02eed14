"""Every problem family that conf/problem names: shapes, weights, seeds, closed forms, refusals."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.special import logsumexp

from fsbench.api import Clouds

CONF = Path(__file__).parents[2] / "conf" / "problem"
SIZES: dict[str, tuple[int, int, int]] = {  # n, m, d of the families that do not take any
    "shell_torus": (301, 207, 3),
    "photographs": (301, 207, 3),
    "sheet_curve": (301, 207, 3),
    "sheet_curve_thin": (301, 207, 3),
    "lidar": (301, 207, 3),
    "nbody": (301, 207, 3),
    "nbody_realisations": (301, 207, 3),
    "zeldovich": (512, 512, 3),
    "translated": (101, 101, 7),
    "gaussian_1d": (301, 207, 1),
    "two_points": (2, 2, 3),
    "single_point": (1, 207, 7),
    "disjoint_masses": (2, 2, 3),
}
ALL = sorted(path.stem for path in CONF.glob("*.yaml"))


def make(
    name: str, *, seed: int = 0, eps: float = 0.5, size: tuple[int, int, int] | None = None, **more: Any
) -> Clouds:
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    module, _, function = conf["_target_"].rpartition(".")
    family = getattr(importlib.import_module(module), function)
    n, m, d = size or SIZES.get(name, (301, 207, 7))
    made: Clouds = family(n=n, m=m, d=d, eps=eps, seed=seed, **(conf["params"] | more))
    return made


@pytest.mark.parametrize("name", ALL)
def test_shapes_types_and_weights(name: str) -> None:
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert conf["label"].strip() and "\n" not in conf["label"]
    n, m, d = SIZES.get(name, (301, 207, 7))
    clouds = make(name)
    assert clouds.x.shape == (n, d) and clouds.y.shape == (m, d)
    assert clouds.a.shape == (n,) and clouds.b.shape == (m,)
    for values in (clouds.x, clouds.y, clouds.a, clouds.b):
        assert values.dtype == np.float64 and np.isfinite(values).all()
    for weights in (clouds.a, clouds.b):
        assert (weights >= 0).all() and weights.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_data_depend_on_the_seed_and_not_on_eps(name: str) -> None:
    first, again, other = make(name), make(name, eps=0.01), make(name, seed=1)
    assert all(np.array_equal(getattr(first, k), getattr(again, k)) for k in "xyab")
    if name not in ("gaussian_1d", "two_points", "disjoint_masses"):  # grids and fixed points
        assert not np.array_equal(first.x, other.x) or not np.array_equal(first.y, other.y)


@pytest.mark.parametrize(
    ("name", "size", "more", "names"),
    [
        ("shell_torus", (5, 5, 2), {}, "d must be 3"),
        ("shell_torus", (5, 5, 3), {"tube": 1.0}, "tube"),
        ("photographs", (5, 5, 4), {}, "d must be 3"),
        ("photographs", (300_000, 5, 3), {}, "n must be a whole number from 1 to 273280"),
        ("photographs", (5, 300_000, 3), {}, "m must be a whole number from 1 to 273280"),
        ("translated", (5, 6, 3), {}, "m must equal n"),
        ("gaussian_1d", (5, 5, 2), {}, "d must be 1"),
        ("gaussian_1d", (1, 5, 1), {}, "n must be a whole number of at least 2"),
        ("gaussian_1d", (5, 5, 1), {"std": 0.0}, "std must be a number from"),
        ("uniform_gaussian", (5, 5, 1), {"std": -1.0}, "std must be a number from"),
        ("uniform_gaussian", (5, 5, 1), {"offset": 1e7}, "offset must be a number from"),
        ("clusters", (5, 5, 1), {"count": 0}, "count must be a whole number from 1"),
        ("clusters", (5, 5, 1), {"std": 0.0}, "std must be a number from"),
        ("two_points", (2, 3, 1), {}, "m must be 2, got 3"),
        ("disjoint_masses", (3, 2, 1), {}, "n must be 2, got 3"),
        ("disjoint_masses", (2, 2, 1), {"p": 0.1}, "p must be above q"),
        ("disjoint_masses", (2, 2, 1), {"length": 1.0}, "length must be at least"),
        ("single_point", (2, 3, 1), {}, "n or m must be 1"),
        ("heterogeneous", (5, 5, 3), {"mass": 0.0}, "mass must be a number from"),
        ("heterogeneous", (5, 5, 3), {"volume": 1.0}, "volume must be a number from"),
        ("lognormal_weights", (5, 5, 3), {"sigma": -1.0}, "sigma must be a number from 0 to 20"),
        ("sheet_curve", (5, 5, 2), {}, "d must be 3"),
        ("sheet_curve", (5, 5, 3), {"tube": -0.1}, "tube must be a number from 0 to 1"),
        ("nbody", (5, 5, 2), {}, "d must be 3"),
        ("nbody", (5, 5, 3), {"pair": "both"}, "pair must be evolution or realisations"),
        ("nbody", (5, 5, 3), {"spacing": 0.0}, "spacing must be a number from 0.01 to 1000, got 0.0"),
        ("nbody", (5, 5, 3), {"steps": 1.5}, "steps must be a whole number from 1 to 1000, got 1.5"),
        ("zeldovich", (512, 512, 2), {}, "d must be 3"),
        ("zeldovich", (511, 511, 3), {}, "n and m must be the same cube of an even number"),
        ("zeldovich", (27, 27, 3), {}, "n and m must be the same cube of an even number"),
        ("zeldovich", (64, 512, 3), {}, "n and m must be the same cube of an even number"),
        ("zeldovich", (64, 64, 3), {"smoothing": -1.0}, "smoothing must be a number from 0 to 100"),
        ("zeldovich", (64, 64, 3), {"smoothing": 50.0}, "smoothing must be at most the box, 7.8125 Mpc/h"),
        ("lidar", (5, 5, 2), {}, "d must be 3"),
        ("lidar", (5, 5, 3), {"balls": -1}, "balls must be a whole number from 0"),
        ("lidar", (5, 5, 3), {"noise": math.inf}, "noise must be a number from 0 to 0.1, got inf"),
        ("lidar", (5, 5, 3), {"radius": 0.5}, "radius must be a number from 0.001 to 0.15"),
    ],
)
def test_what_a_family_cannot_have_is_named(name: str, size: Any, more: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make(name, size=size, **more)


def test_published_protocol() -> None:
    clouds = make("gaussian", size=(20_000, 20_000, 2))
    assert clouds.x.mean() == pytest.approx(0, abs=0.02) and clouds.y.std() == pytest.approx(1, abs=0.02)
    assert clouds.a.max() / clouds.a.min() == pytest.approx(11, rel=0.01)  # 1.1 / 0.1


def test_shell_and_torus_lie_where_they_should() -> None:
    clouds = make("shell_torus", size=(20_000, 20_000, 3))
    radius = np.linalg.norm(clouds.x - 0.5, axis=1)
    assert radius.mean() == pytest.approx(0.35, rel=1e-3) and radius.std() == pytest.approx(0.007, rel=0.05)
    in_torus = clouds.y - 0.5
    from_axis = np.hypot(in_torus[:, 0], in_torus[:, 1])
    assert (np.hypot(from_axis - 0.35, in_torus[:, 2]) <= 0.12 + 1e-12).all()
    # Uniform in volume: E[distance from the axis] = R + r^2 / (4 R).
    assert from_axis.mean() == pytest.approx(0.35 + 0.12**2 / (4 * 0.35), rel=5e-3)


def test_photographs_are_distinct_pixels_in_the_unit_cube() -> None:
    whole = make("photographs", size=(273_280, 1, 3))  # without replacement: all of them, each once
    from sklearn.datasets import load_sample_image

    assert whole.x.mean() == pytest.approx(load_sample_image("china.jpg").mean() / 255, abs=1e-12)
    assert whole.x.min() >= 0 and whole.x.max() <= 1


def test_an_offset_moves_both_clouds_up_to_rounding() -> None:
    near, far = (make(name, size=(4096, 4096, 3)) for name in ("uniform_gaussian", "uniform_gaussian_far"))
    # Half the gap between float64 numbers at 1,000, and between float32 numbers there: 2^-14 of the box's side.
    for half_gap, dtype in ((2.0**-44, np.float64), (2.0**-15, np.float32)):
        for here, there in ((near.x, far.x), (near.y, far.y)):
            assert np.abs(there.astype(dtype).astype(np.float64) - 1000 - here).max() <= half_gap * (1 + 1e-6)


def test_gaussian_1d_is_the_published_value() -> None:
    """R8: N(0, 1) against N(1, 4) at eps 0.5 is 2.777670, and N(0, 1) with itself 0.612178."""
    assert make("gaussian_1d").optimal_value == pytest.approx(2.777670, abs=1e-6)
    assert make("gaussian_1d", mean=0.0, std=1.0).optimal_value == pytest.approx(0.612178, abs=1e-6)
    assert make("gaussian_1d", eps=1e-3).optimal_value is None  # this grid cannot resolve so narrow a plan


@pytest.mark.parametrize("eps", [0.5, 0.05])
def test_gaussian_1d_grid_claims_its_closed_form_only_where_it_holds(eps: float) -> None:
    """At the coarsest grid for which a value is claimed, the discrete problem has that value."""
    n = next(n for n in range(10, 2000) if make("gaussian_1d", size=(n, n, 1), eps=eps, std=1.0).optimal_value)
    clouds = make("gaussian_1d", size=(n, n, 1), eps=eps, std=1.0)
    cost = (clouds.x - clouds.y.T) ** 2
    g = np.zeros(n)
    for _ in range(3000):
        f = -eps * logsumexp((g - cost) / eps + np.log(clouds.b), axis=1)
        g = -eps * logsumexp((f[:, None] - cost) / eps + np.log(clouds.a)[:, None], axis=0)
    assert clouds.a @ f + clouds.b @ g == pytest.approx(clouds.optimal_value, rel=1e-6)


def test_disjoint_masses_plan_is_exact_to_rounding() -> None:
    clouds = make("disjoint_masses", eps=0.5)
    assert clouds.a.tolist() == [0.7, pytest.approx(0.3)] and clouds.b.tolist() == [0.2, 0.8]
    plan = np.array([[0.2, 0.5], [0.0, 0.3]])
    positive = plan > 0
    kl = (plan[positive] * np.log(plan[positive] / np.outer(clouds.a, clouds.b)[positive])).sum()
    assert clouds.optimal_value == pytest.approx(0.5 * 100 + 0.5 * kl, rel=1e-12)


def test_unit_distance_makes_eps_a_fraction_of_the_mean_squared_distance() -> None:
    for d in (2, 64):
        unit, plain = make("gaussian_unit", size=(2001, 2003, d)), make("gaussian", size=(2001, 2003, d))
        assert np.allclose(unit.x * np.sqrt(2 * d), plain.x) and np.array_equal(unit.a, plain.a)
        squared = (
            np.square(unit.x).sum(1) @ unit.a
            + np.square(unit.y).sum(1) @ unit.b
            - 2 * (unit.a @ unit.x) @ (unit.b @ unit.y)
        )
        assert squared == pytest.approx(1, abs=0.1)

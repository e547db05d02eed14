"""What defines each family of the suite of residuals: where its mass is, and how much of it."""

from __future__ import annotations

import numpy as np
import pytest

from fsbench.problems.heterogeneous import heterogeneous
from fsbench.problems.lidar import POSES, lidar
from fsbench.problems.lognormal_weights import lognormal_weights
from fsbench.problems.sheet_curve import sheet_curve

SIZE = {"n": 40_000, "m": 30_000, "d": 3, "eps": 0.1, "seed": 3}
# Shares of 30,000 points are within 5 standard deviations, 5 / sqrt(4 * 30,000), of what they estimate.
SHARE = 0.015


def uniform_moments(points: np.ndarray) -> bool:
    """Means and variances of a uniform unit cube, within five standard errors (the variance's is 0.0745 / sqrt n)."""
    error = 5 / np.sqrt(len(points))
    close_means = np.abs(points.mean(0) - 0.5) < error / np.sqrt(12)
    return bool(close_means.all() and (np.abs(points.var(0) - 1 / 12) < 0.0745 * error).all())


def test_half_the_mass_is_in_a_hundredth_of_the_volume() -> None:
    clouds = heterogeneous(**SIZE)
    side = 0.01 ** (1 / 3)
    low, high = clouds.x[:20_000].min(0), clouds.x[:20_000].max(0)
    assert np.allclose(high - low, side, rtol=1e-3) and (low >= 0).all() and (high <= 1).all()
    assert uniform_moments((clouds.x[:20_000] - low) / (high - low))
    inside = ((clouds.x >= low) & (clouds.x <= high)).all(1)
    assert inside.mean() == pytest.approx(0.5, abs=1e-3)
    # The rest is uniform outside: a corner region's share is its volume over what is left.
    rest = clouds.x[~inside]
    octant = (rest < 0.5).all(1).mean()
    overlap = np.clip(np.minimum(high, 0.5) - low, 0, None).prod()
    assert octant == pytest.approx((0.125 - overlap) / 0.99, abs=SHARE)
    assert uniform_moments(clouds.y)
    elsewhere = heterogeneous(**SIZE | {"seed": 4})
    assert not np.allclose(elsewhere.x[:20_000].min(0), low, atol=0.01)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_small_cube_has_its_volume_in_any_dimension(d: int) -> None:
    clouds = heterogeneous(**SIZE | {"d": d}, mass=0.25, volume=0.1)
    dense = clouds.x[:10_000]
    assert np.ptp(dense, axis=0).prod() == pytest.approx(0.1, rel=5e-3)
    assert not ((clouds.x[10_000:] > dense.min(0)) & (clouds.x[10_000:] < dense.max(0))).all(1).any()


def test_weights_are_lognormal_on_both_sides() -> None:
    clouds = lognormal_weights(**SIZE)
    assert uniform_moments(clouds.x) and uniform_moments(clouds.y)
    for weights in (clouds.a, clouds.b):
        logs = np.log(weights)
        # The standard error of a standard deviation of 2 over 30,000 is 2 / sqrt(60,000).
        assert logs.std() == pytest.approx(2, abs=5 * 0.0082)
        assert ((logs - logs.mean()) ** 3).mean() == pytest.approx(0, abs=5 * 8 * np.sqrt(6 / 30_000))
        assert np.sort(weights)[-len(weights) // 100 :].sum() > 0.3  # 1 % of the points hold Phi(2 - 2.33) = 0.37
    assert np.allclose(lognormal_weights(**SIZE, sigma=0.0).a, 1 / 40_000)


def test_sheet_is_flat_and_curve_is_a_thick_helix() -> None:
    clouds = sheet_curve(**SIZE)
    assert clouds.x[:, 2].mean() == pytest.approx(0.5, abs=5 * 0.01 / 200)
    assert clouds.x[:, 2].std() == pytest.approx(0.01, rel=5 / np.sqrt(2 * 40_000))
    assert uniform_moments(clouds.x[:, :2])
    core = sheet_curve(**SIZE, tube=0.0)
    off_axis = core.y[:, :2] - 0.5
    assert np.allclose(np.hypot(*off_axis.T), 0.35)
    turned = np.unwrap(np.angle(off_axis @ [1, 1j])[np.argsort(core.y[:, 2])])
    assert turned[-1] - turned[0] == pytest.approx(6 * np.pi, rel=1e-3)  # three turns
    assert core.y[:, 2].var() == pytest.approx(1 / 12, rel=0.02)  # uniform in height, so in arc length
    assert (clouds.y - core.y).std() == pytest.approx(0.02, rel=0.02)


def test_lidar_rays_are_uniform_in_solid_angle() -> None:
    clouds = lidar(**SIZE)
    for points, pose in zip((clouds.x, clouds.y), POSES, strict=True):
        rays = (points - pose) / np.linalg.norm(points - pose, axis=1, keepdims=True)
        error = 5 / np.sqrt(len(rays))
        assert (np.abs(rays.mean(0)) < error / np.sqrt(3)).all()
        assert np.allclose(rays.T @ rays / len(rays), np.eye(3) / 3, atol=error * np.sqrt(4 / 45))
        assert ((points > -0.01) & (points < 1.01)).all()


def test_lidar_density_falls_with_the_squared_distance() -> None:
    """On the floor, points per area go as cos / r^2 = height / r^3: counts in a near and a far patch of equal size."""
    clouds = lidar(**SIZE | {"n": 400_000}, balls=0, noise=0.0)
    pose = POSES[0]
    on_floor = clouds.x[np.abs(clouds.x[:, 2]) < 1e-12]
    found, expected = [], []
    for centre in (pose[:2], np.array([0.85, 0.8])):
        found.append((np.abs(on_floor[:, :2] - centre) < 0.1).all(1).sum())
        grid = centre + (np.stack(np.meshgrid(*[np.arange(200)] * 2), -1).reshape(-1, 2) + 0.5) / 1000 - 0.1
        squared = ((grid - pose[:2]) ** 2).sum(1) + pose[2] ** 2
        expected.append(400_000 * (pose[2] / squared**1.5).mean() * 0.04 / (4 * np.pi))
    assert found[0] > 8 * found[1]
    assert np.all(np.abs(np.array(found) - expected) < 5 * np.sqrt(expected))


def test_lidar_balls_cast_shadows() -> None:
    """Some returns are from balls, none from behind one, and the two scans see them from different sides."""
    clouds, bare = lidar(**SIZE, noise=0.0), lidar(**SIZE, noise=0.0, balls=0)
    for points, pose in zip((clouds.x, clouds.y), POSES, strict=True):
        on_wall = (np.minimum(points, 1 - points).min(1)) < 1e-9
        hits = points[~on_wall]
        # One ball of radius r at a distance R < sqrt 3 fills at least r^2 / 4 R^2 of the sky.
        assert len(hits) / len(points) > 0.08**2 / 12
        assert (np.linalg.norm(hits - pose, axis=1) >= 0.08 - 1e-9).all()
    walls = np.minimum(bare.x, 1 - bare.x).min(1)
    assert np.allclose(walls, 0, atol=1e-12)
    scatter = lidar(**SIZE, noise=0.002, balls=0).x
    off_wall = np.abs(np.linalg.norm(scatter - POSES[0], axis=1) - np.linalg.norm(bare.x - POSES[0], axis=1))
    assert np.sqrt((off_wall**2).mean()) == pytest.approx(0.002, rel=0.03)

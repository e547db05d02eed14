"""The particle mesh against linear theory, plane waves and perturbation theory; the N-body families."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fsbench.problems import cosmology, particle_mesh
from fsbench.problems.nbody import _cells, nbody, zeldovich, zeldovich_cost
from fsbench.problems.particle_mesh import Mesh

CPU = torch.device("cpu")
CELLS, SPACING = 32, 1000 / 32
BOX = CELLS * SPACING
LOWEST = 2 * np.pi / BOX  # h/Mpc
BINS = LOWEST * np.array([0.5, 1.5, 2.5, 4.0])
# Clouds in cells of size h, spread and gathered, weaken the force on a wave by (k h)^2 / 6, and a force weaker by e
# lowers growth from a = 0.05 to today by 0.6 e log 20: at most, at the far end of each bin, by
LOST = 0.6 * np.log(20) * (BINS[1:] * SPACING / 2) ** 2 / 6


def white(seed: int, cells: int = CELLS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((cells,) * 3)


def distances(mesh: Mesh) -> torch.Tensor:
    """|k| on the mesh's transform."""
    return sum((mesh.wavenumber(axis) ** 2 for axis in range(3)), torch.zeros(())).sqrt()


def binned(k: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """Means over modes of each bin; those off the planes kz = 0 stand for two."""
    twice = torch.full_like(k, 2.0)
    twice[..., 0] = 1.0
    chosen = [(k >= low) & (k < high) for low, high in itertools.pairwise(BINS)]
    return np.array([float((values * twice)[c].sum() / twice[c].sum()) for c in chosen])


def linear_power(density: torch.Tensor) -> np.ndarray:
    """Binned power of the initial conditions, in (Mpc/h)^3."""
    mesh = Mesh(CELLS, SPACING, CPU)
    return binned(distances(mesh), density.abs() ** 2 * BOX**3 / CELLS**6)


def particle_power(x: torch.Tensor) -> np.ndarray:
    """Binned power of particles, the window of their clouds divided out."""
    mesh = Mesh(2 * CELLS, SPACING / 2, CPU)
    density = torch.fft.rfftn(particle_mesh.deposit(x, mesh))
    for axis in range(3):
        density = density / torch.sinc(mesh.wavenumber(axis) * mesh.spacing / (2 * np.pi)) ** 2
    return binned(distances(mesh), density.abs() ** 2 * BOX**3 / mesh.cells**6)


def test_initial_conditions_have_the_linear_spectrum() -> None:
    """The mean power of N independent modes is within 5 / sqrt(N) of it."""
    mesh = Mesh(CELLS, SPACING, CPU)
    k = distances(mesh)
    density = particle_mesh.density_today(white(0), SPACING, CPU)
    half = (k > 0) & (mesh.wavenumber(2) > 0)  # one of each pair of conjugates
    for axis in range(3):
        half = half & (mesh.wavenumber(axis).abs() < np.pi / SPACING * 0.999)
    ratio = (density.abs() ** 2 * BOX**3 / CELLS**6)[half] / torch.from_numpy(cosmology.linear_power(k[half].numpy()))
    for lo, hi in ((0, 0.05), (0.05, 0.1), (0.1, 1.0)):
        chosen = ratio[(k[half] >= lo) & (k[half] < hi)]
        assert float(chosen.mean()) == pytest.approx(1, abs=5 / np.sqrt(len(chosen)))
    nyquist = density[CELLS // 2].abs().max() + density[:, CELLS // 2].abs().max() + density[..., -1].abs().max()
    assert float(nyquist) == 0 and abs(density[0, 0, 0]) == 0


def test_early_particles_follow_linear_theory() -> None:
    """At z = 49 the largest waves have the power of the initial conditions times D^2, mode by mode.

    What is beyond the linear displacement's own density is of relative order k^2 times the displacement's variance.
    """
    density = particle_mesh.density_today(white(1), SPACING, CPU)
    start = particle_mesh.displacements(density, SPACING)
    moved = cosmology.growth(0.02) * float(start.first.std())
    found = particle_power(start.positions(0.02) % BOX)
    np.testing.assert_allclose(
        found / cosmology.growth(0.02) ** 2, linear_power(density), rtol=0.01 + (0.02 * moved) ** 2
    )


def test_large_waves_grow_as_linear_theory_says() -> None:
    """Small contrasts, from a = 0.05 to today, mode by mode."""
    density = 0.01 * particle_mesh.density_today(white(2), SPACING, CPU)
    start = particle_mesh.displacements(density, SPACING)
    moved = particle_mesh.evolved(start, steps=20) - start.lattice
    moved = (moved + BOX / 2) % BOX - BOX / 2
    mesh = Mesh(CELLS, SPACING, CPU)
    cross, own = torch.zeros_like(density.real), torch.zeros_like(density.real)
    for axis in range(3):
        found = torch.fft.rfftn(moved[:, axis].reshape((CELLS,) * 3))
        expected = torch.fft.rfftn(start.first[:, axis].reshape((CELLS,) * 3))
        cross += (found * expected.conj()).real
        own += expected.abs() ** 2
    grown = binned(distances(mesh), cross) / binned(distances(mesh), own)
    assert (grown > 1 - LOST - 1e-3).all() and (grown < 1 + 1e-3).all()


@pytest.mark.parametrize("seed", [3, 4])
def test_amplitude_today_is_that_of_linear_theory_on_large_scales(seed: int) -> None:
    """Below 0.016 h/Mpc non-linear terms are of order (k sigma)^2 = (0.016 * 6 Mpc/h)^2 = 1 % of the power on average;
    a bin of tens of modes scatters by about as much."""
    density = particle_mesh.density_today(white(seed), SPACING, CPU)
    start = particle_mesh.displacements(density, SPACING)
    ratio = particle_power(particle_mesh.evolved(start, steps=20)) / linear_power(density)
    assert (ratio[:2] > 1 - 2 * LOST[:2] - 0.02).all() and (ratio[:2] < 1.02).all()


def test_a_plane_wave_moves_as_zeldovich_until_it_breaks() -> None:
    """In one dimension the first order is exact: the second vanishes, and steps add only what the mesh loses."""
    lattice = (np.arange(CELLS) + 0.5) * SPACING
    wave = np.cos(LOWEST * lattice)[:, None, None] * np.ones((1, CELLS, CELLS))
    growth = cosmology.growth(0.5)
    density = torch.fft.rfftn(torch.from_numpy(wave)) * (0.6 / growth)  # shells cross at one
    start = particle_mesh.displacements(density, SPACING)
    assert float(start.second.abs().max()) < 1e-12 * float(start.first.abs().max())
    # -Psi' = density
    expected = -0.6 / LOWEST * np.sin(LOWEST * lattice)
    found = particle_mesh.evolved(start, steps=20, a_end=0.5) - start.lattice
    found = ((found + BOX / 2) % BOX - BOX / 2).reshape(CELLS, CELLS, CELLS, 3).numpy()
    assert np.abs(found[..., 1:]).max() < 1e-9 * BOX
    np.testing.assert_allclose(growth * start.first.reshape(CELLS, CELLS, CELLS, 3)[:, 0, 0, 0], expected, rtol=1e-9)
    # The wave's own loss is under 0.5 %, that of its second harmonic, 0.6 / 2 of it, four times as much.
    assert np.abs(found[:, 0, 0, 0] - expected).max() < 0.015 * np.abs(expected).max()


def test_second_order_is_that_of_two_crossed_waves() -> None:
    """phi = A cos kx + B cos ky has the source A B k^4 cos kx cos ky, so Psi_2 = (3/7) A B k^3 / 2 sin kx cos ky."""
    k, lattice = LOWEST, (np.arange(CELLS) + 0.5) * SPACING
    cos, sin = np.cos(k * lattice), np.sin(k * lattice)
    big_a, big_b = 3.0, 5.0
    wave = -(k**2) * (big_a * cos[:, None, None] + big_b * cos[None, :, None]) * np.ones((1, 1, CELLS))
    start = particle_mesh.displacements(torch.fft.rfftn(torch.from_numpy(wave)), SPACING)
    second = start.second.reshape(CELLS, CELLS, CELLS, 3)[:, :, 0].numpy()
    scale = 3 / 7 * big_a * big_b * k**3 / 2
    np.testing.assert_allclose(second[..., 0], -scale * sin[:, None] * cos, atol=1e-9 * scale)
    np.testing.assert_allclose(second[..., 1], -scale * cos[:, None] * sin, atol=1e-9 * scale)


def test_momenta_are_those_of_the_positions() -> None:
    """a^3 E dx/da, both orders."""
    start = particle_mesh.displacements(particle_mesh.density_today(white(5, 8), 4.0, CPU), 4.0)
    a, step = 0.05, 1e-5
    slope = (start.positions(a + step) - start.positions(a - step)) / (2 * step)
    torch.testing.assert_close(start.momenta(a), a**3 * cosmology.expansion(a) * slope, rtol=1e-6, atol=1e-9)


def test_deposit_conserves_mass_and_does_not_depend_on_the_order() -> None:
    rng = np.random.default_rng(0)
    mesh = Mesh(6, 0.5, CPU)
    x = torch.from_numpy(rng.random((1001, 3)) * 3)
    density = particle_mesh.deposit(x, mesh)
    assert float(density.sum()) == pytest.approx(0, abs=1e-6)
    assert torch.equal(density, particle_mesh.deposit(x[rng.permutation(1001)], mesh))
    one = particle_mesh.deposit(torch.tensor([[0.25, 0.25 + 0.125, 3 - 0.25]], dtype=torch.float64), mesh) + 1
    assert one[0, 0, 5].item() == pytest.approx(0.75 * 216) and one[0, 1, 5].item() == pytest.approx(0.25 * 216)


@pytest.mark.parametrize("points", [1, 8, 9, 64, 65, 216, 1000, 2**18, 2**18 + 1, 2**20, 512**3, 512**3 + 1])
def test_the_smallest_even_cube(points: int) -> None:
    cells = _cells(points)
    assert cells % 2 == 0 and cells**3 >= points and (cells == 2 or (cells - 2) ** 3 < points)


def test_structure_forms() -> None:
    """Counts in cells of 3.9 Mpc/h: near even at z = 49, in haloes today; both in the box, in random order."""
    size = {"n": 32**3, "m": 32**3 - 5, "d": 3, "eps": 0.1}
    clouds = nbody(**size, seed=0)
    counts = [
        np.histogramdd(points, bins=16, range=[(0, 1)] * 3)[0] for points in (clouds.x, clouds.y)
    ]  # 8 particles a cell on average
    assert counts[1].std() / 8 < 0.35 and counts[0].std() / 8 > 1
    for points in (clouds.x, clouds.y):
        assert (points >= 0).all() and (points < 1).all()
        # Uniform neighbours in a unit box are 0.66 apart; those of a lattice's order would be 1/32.
        assert np.linalg.norm(np.diff(points, axis=0), axis=1).mean() == pytest.approx(0.66, abs=0.05)
    other = nbody(**size, seed=0, pair="realisations")
    assert np.array_equal(other.x, clouds.x)
    assert np.histogramdd(other.y, bins=16, range=[(0, 1)] * 3)[0].std() / 8 > 1
    assert not np.allclose(np.sort(other.x[:100, 0]), np.sort(other.y[:100, 0]))


@pytest.mark.parametrize("seed", [0, 1])
def test_zeldovich_cost_is_the_exact_optimum(seed: int) -> None:
    n = 10**3
    settings = {"seed": seed, "spacing": 8.0, "smoothing": 8.0}
    clouds = zeldovich(n=n, m=n, d=3, eps=0.1, **settings)
    cost = ((clouds.x[:, None] - clouds.y) ** 2).sum(2)
    rows, columns = linear_sum_assignment(cost)
    assert cost[rows, columns].mean() == pytest.approx(zeldovich_cost(n=n, **settings), rel=1e-12)
    assert zeldovich_cost(n=n, **settings) > 0.01**2  # percents of the box: not a trivial optimum


def test_zeldovich_stays_before_shell_crossing() -> None:
    """The bound on the growth is one on the eigenvalues, and not more than sqrt 3 of the largest of either sign."""
    density = particle_mesh.density_today(white(0, 10), 8.0, CPU, smoothing=8.0)
    mesh = Mesh(10, 8.0, CPU)
    tides = [[mesh.tide(density, i, j) for j in range(3)] for i in range(3)]
    tide = torch.stack([torch.stack(line, -1) for line in tides], -2)
    largest = float(torch.linalg.eigvalsh(tide)[..., -1].max())
    bound = particle_mesh.largest_tide(density, 8.0)
    assert largest <= bound <= np.sqrt(3) * max(largest, float(torch.linalg.eigvalsh(tide).abs().max()))


def test_the_family_is_known_without_torch() -> None:
    code = "import sys, fsbench.problems.nbody; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

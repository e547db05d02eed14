"""Matter of a universe before and after its structure formed: what large-scale reconstructions transport.

Points are comoving positions in units of the box side, in random order: the order of a lattice would hand a solver a
near-optimal plan. The same seed gives the same clouds on one machine; another processor's rounding, which collapse
amplifies, moves single particles of z = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights

if TYPE_CHECKING:
    import torch

SPACING = 1000 / 512  # Mpc/h between particles: 512^3 of them in a box of 1 Gpc/h
_SPACINGS = Within(1e-2, 1e3)  # Mpc/h, where the linear power spectrum says something
_A_EARLY = 1 / 50  # z = 49


@checked()
def nbody(
    *,
    n: int,
    m: int,
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
    pair: Literal["evolution", "realisations"] = "evolution",
    spacing: Annotated[float, _SPACINGS] = SPACING,
    steps: Annotated[int, Within(1, 1000)] = 20,
) -> Clouds:
    """Particles today onto those of z = 49 (pair="evolution") or onto today's of another universe ("realisations").

    A particle mesh in float64, on the GPU where there is one, of the smallest even cube of particles that holds n and
    m, `spacing` Mpc/h apart; n of these are drawn at random, and m. steps: of the mesh, from a = 0.05 to today.
    Equal weights. ValueError if d is not 3 or a setting is out of its range.
    """
    from fsbench.problems import particle_mesh  # here: it brings torch

    cells = _cells(max(n, m))
    start = particle_mesh.displacements(_density(cells, spacing, (seed, 0)), spacing)
    today = _numpy(particle_mesh.evolved(start, steps=steps))
    if pair == "evolution":
        other = _numpy(start.positions(_A_EARLY))
    else:
        start = particle_mesh.displacements(_density(cells, spacing, (seed, 1)), spacing)
        other = _numpy(particle_mesh.evolved(start, steps=steps))
    _empty_cache()
    box = cells * spacing
    rng = np.random.default_rng((seed, 2))
    x, y = (rng.permutation(cloud)[:size] / box % 1.0 for cloud, size in ((today, n), (other, m)))
    return Clouds(x, y, equal_weights(n), equal_weights(m))


def _lattice(*, n: int, m: int, spacing: float, smoothing: float, **_: object) -> None:
    cells = _cells(n)
    if cells**3 != n or m != n:
        raise ValueError(f"n and m must be the same cube of an even number for zeldovich, got n={n}, m={m}")
    if not smoothing <= cells * spacing:
        raise ValueError(f"smoothing must be at most the box, {cells * spacing:g} Mpc/h, got {smoothing:g}")


@checked(_lattice)
def zeldovich(
    *,
    n: int,
    m: int,
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
    spacing: Annotated[float, _SPACINGS] = SPACING,
    smoothing: Annotated[float, Within(0, 100)] = 6.0,
) -> Clouds:
    """A lattice onto its displaced copy before any shell crosses: the displacement is the optimal map.

    The linear displacement of a density smoothed by a Gaussian of `smoothing` Mpc/h, grown until no eigenvalue of its
    derivative passes 0.9, so that W_2^2 of |x - y|^2 is `zeldovich_cost`. Displaced points are not wrapped into the
    box, and OT_eps has no closed form. Equal weights. ValueError if m is not n, n is no cube of an even number, d is
    not 3, smoothing is more than the box or a setting is out of its range.
    """
    lattice, displaced = _zeldovich_map(n, seed, spacing, smoothing)
    rng = np.random.default_rng((seed, 2))
    return Clouds(rng.permutation(lattice), rng.permutation(displaced), equal_weights(n), equal_weights(m))


def zeldovich_cost(*, n: int, seed: int, spacing: float = SPACING, smoothing: float = 6.0) -> float:
    """The exact W_2^2 of `zeldovich`'s clouds, in squared box sides: the mean squared displacement."""
    lattice, displaced = _zeldovich_map(n, seed, spacing, smoothing)
    return float(((displaced - lattice) ** 2).sum(1).mean())


def _zeldovich_map(n: int, seed: int, spacing: float, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Lattice and displaced points [n, 3] in units of the box side, in the lattice's order."""
    cells = _cells(n)
    from fsbench.problems import particle_mesh

    density = _density(cells, spacing, (seed, 0), smoothing=smoothing)
    growth = min(1.0, 0.9 / particle_mesh.largest_tide(density, spacing))
    start = particle_mesh.displacements(density, spacing)
    lattice, displaced = _numpy(start.lattice), _numpy(start.lattice + growth * start.first)
    _empty_cache()
    return lattice / (cells * spacing), displaced / (cells * spacing)


def _cells(points: int) -> int:
    """The smallest even number whose cube holds so many points."""
    half = max(1, round((points / 8) ** (1 / 3)))
    return 2 * (half if (2 * half) ** 3 >= points else half + 1)


def _density(cells: int, spacing: float, seed: tuple[int, int], *, smoothing: float = 0.0) -> torch.Tensor:
    """Transform of today's linear density from white noise that is the same on every machine."""
    import torch

    from fsbench.problems.particle_mesh import density_today

    white = np.random.default_rng(seed).standard_normal((cells,) * 3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return density_today(white, spacing, device, smoothing=smoothing)


def _numpy(points: torch.Tensor) -> np.ndarray:
    return points.cpu().numpy()


def _empty_cache() -> None:
    """Hand back what the mesh took on a GPU: the solver is measured on it next."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()

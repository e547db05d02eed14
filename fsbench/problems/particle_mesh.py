"""Matter in an expanding universe: Gaussian initial conditions, Lagrangian perturbation theory, and a particle mesh.

Comoving lengths in Mpc/h, momenta a^2 dx/dt in Mpc/h times H_0, everything in float64 on one device. Sums into the
mesh are of integers, so that the same device gives the same bits again whatever the order of its additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fsbench.problems import cosmology

A_START = 0.05  # of the steps, which begin from second-order perturbation theory
_FIXED_POINT = 2.0**32  # one particle's mass in the integer mesh: 10^9 particles fit into one cell
_CHUNK = 1 << 22  # particles handled at once


@dataclass(frozen=True)
class Displacements:
    """Perturbation theory on a lattice of `cells` points a side, `spacing` Mpc/h apart, scaled to today.

    first, second [cells^3, 3]: x(a) = lattice + D(a) first + D(a)^2 second, in the Einstein-de Sitter form of the
    second order, whose growth -3/7 D^2 is off by under 1 % today and exact at the early times it is used for.
    Source: Bouchet et al. 1995; Scoccimarro 1998.
    """

    cells: int
    spacing: float
    first: torch.Tensor
    second: torch.Tensor

    @property
    def lattice(self) -> torch.Tensor:
        """[cells^3, 3], in the middle of each cell, the last coordinate fastest."""
        along = (torch.arange(self.cells, dtype=torch.float64, device=self.first.device) + 0.5) * self.spacing
        return torch.cartesian_prod(along, along, along)

    def positions(self, a: float) -> torch.Tensor:
        growth = cosmology.growth(a)
        return self.lattice + growth * self.first + growth**2 * self.second

    def momenta(self, a: float) -> torch.Tensor:
        # d(D^2) = 2 D dD
        return cosmology.growth_momentum(a) * (self.first + 2 * cosmology.growth(a) * self.second)


@dataclass(frozen=True)
class Mesh:
    """A periodic mesh of `cells` a side (even) and the derivatives of fields on it, in Fourier space.

    Fields are [cells, cells, cells], their transforms those of rfftn.
    """

    cells: int
    spacing: float
    device: torch.device

    def wavenumber(self, axis: int) -> torch.Tensor:
        """k along `axis` in h/Mpc, shaped to multiply a transform."""
        frequencies = torch.fft.rfftfreq if axis == 2 else torch.fft.fftfreq
        k = 2 * math.pi * frequencies(self.cells, self.spacing, dtype=torch.float64, device=self.device)
        shape = [1, 1, 1]
        shape[axis] = -1
        return k.view(shape)

    def slope(self, axis: int) -> torch.Tensor:
        """`wavenumber`, but zero on the Nyquist plane, where a real field has no first derivative."""
        k = self.wavenumber(axis)
        return torch.where(k.abs() < math.pi / self.spacing * (1 - 1e-9), k, 0.0)

    def difference(self, axis: int) -> torch.Tensor:
        """The four-point difference in the place of `slope`: it fades towards the Nyquist plane, where a spectral
        slope would let particles on a lattice push each other through their images in the mesh."""
        phase = self.wavenumber(axis) * self.spacing
        return (8 * phase.sin() - (2 * phase).sin()) / (6 * self.spacing)

    def squared(self) -> torch.Tensor:
        """|k|^2, infinite at k = 0, so that dividing by it removes the mean."""
        squared = self.wavenumber(0) ** 2 + self.wavenumber(1) ** 2 + self.wavenumber(2) ** 2
        squared[0, 0, 0] = math.inf
        return squared

    def field(self, transform: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfftn(transform, s=(self.cells,) * 3)

    def pull(self, density: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """Minus the derivative, by `slope` along an axis, of the potential whose Laplacian is the field of transform
        `density`: to first order, the displacement that made that field."""
        return self.field(density * (1j * slope / self.squared()))

    def tide(self, density: torch.Tensor, i: int, j: int) -> torch.Tensor:
        """d^2/dx_i dx_j of that potential."""
        factor = self.slope(i) * self.slope(j) if i != j else self.wavenumber(i) ** 2
        return self.field(density * (factor / self.squared()))


def density_today(white: np.ndarray, spacing: float, device: torch.device, *, smoothing: float = 0.0) -> torch.Tensor:
    """Transform of the linear density contrast today, from white noise [cells, cells, cells] of unit variance.

    smoothing: standard deviation of a Gaussian filter in Mpc/h. Modes on the Nyquist planes are left out.
    """
    mesh = Mesh(len(white), spacing, device)
    squared = mesh.squared()
    k = squared.clone()
    k[0, 0, 0] = 1.0
    k = k.sqrt()
    power = torch.from_numpy(cosmology.linear_power(k.cpu().numpy())).to(device)
    kept = torch.isfinite(squared)
    for axis in range(3):
        kept = kept & (mesh.slope(axis) == mesh.wavenumber(axis))
    shape = torch.where(kept, (power / spacing**3).sqrt() * torch.exp(-0.5 * (k * smoothing) ** 2), 0.0)
    return torch.fft.rfftn(torch.from_numpy(white).to(device)) * shape


def displacements(density: torch.Tensor, spacing: float) -> Displacements:
    """First and second order from the transform of the linear density today."""
    cells = density.shape[0]
    mesh = Mesh(cells, spacing, density.device)
    source = torch.zeros((cells,) * 3, dtype=torch.float64, device=density.device)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        source += mesh.tide(density, i, i) * mesh.tide(density, j, j) - mesh.tide(density, i, j) ** 2
    first, second = (
        torch.stack([mesh.pull(field, mesh.slope(axis)).flatten() for axis in range(3)], dim=1)
        for field in (density, torch.fft.rfftn(source))
    )
    return Displacements(cells, spacing, first, second.mul_(3 / 7))


def largest_tide(density: torch.Tensor, spacing: float) -> float:
    """An upper bound on the eigenvalues of the potential's second derivatives, over the lattice: their Frobenius norm.

    lattice + D first is the gradient of a convex function, hence optimal, for D below its inverse.
    """
    mesh = Mesh(density.shape[0], spacing, density.device)
    squares = torch.zeros((mesh.cells,) * 3, dtype=torch.float64, device=density.device)
    for i in range(3):
        for j in range(i, 3):
            squares.add_(mesh.tide(density, i, j).square(), alpha=1 if i == j else 2)
    return float(squares.max().sqrt())


def evolved(start: Displacements, *, steps: int, refinement: int = 2, a_end: float = 1.0) -> torch.Tensor:
    """Positions [cells^3, 3] in the periodic box at a_end, by kick-drift-kick steps, even in a, from `A_START`.

    The force is solved on a mesh `refinement` times as fine as the lattice. Kicks and drifts move the linear growing
    mode exactly, whatever the step. Source: FastPM, Feng et al. 2016 (arXiv 1603.00476), section 2.
    """
    box = start.cells * start.spacing
    mesh = Mesh(start.cells * refinement, start.spacing / refinement, start.first.device)
    times = np.linspace(A_START, a_end, steps + 1)
    x, p = start.positions(A_START) % box, start.momenta(A_START)
    _kick(x, p, mesh, A_START, A_START, (times[0] + times[1]) / 2)
    for i in range(steps):
        before, after = float(times[i]), float(times[i + 1])
        middle = (before + after) / 2
        growth = cosmology.growth(after) - cosmology.growth(before)
        x = x.add_(p, alpha=growth / cosmology.growth_momentum(middle)).remainder_(box)
        to = (after + times[i + 2]) / 2 if i + 1 < steps else after
        _kick(x, p, mesh, after, middle, float(to))
    return x


def _kick(x: torch.Tensor, p: torch.Tensor, mesh: Mesh, a: float, begin: float, end: float) -> None:
    """Add the momentum that the force at `a`, where the particles are, gives from `begin` to `end`."""
    gained = cosmology.growth_momentum(end) - cosmology.growth_momentum(begin)
    density = torch.fft.rfftn(deposit(x, mesh))
    for axis in range(3):
        force = mesh.pull(density, mesh.difference(axis)).flatten()
        for part, momenta in zip(x.split(_CHUNK), p[:, axis].split(_CHUNK), strict=True):
            for weight, index in _corners(part, mesh):
                momenta.add_(weight * force[index], alpha=gained / cosmology.growth(a))


def deposit(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Density contrast [cells, cells, cells] of particles x [N, 3] of equal mass, each spread over its eight cells."""
    counts = torch.zeros(mesh.cells**3, dtype=torch.int64, device=x.device)
    for part in x.split(_CHUNK):
        for weight, index in _corners(part, mesh):
            counts.index_add_(0, index, (weight * _FIXED_POINT).round_().long())
    mean = _FIXED_POINT * len(x) / mesh.cells**3
    return counts.view((mesh.cells,) * 3).double().div_(mean).sub_(1)


def _corners(x: torch.Tensor, mesh: Mesh) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weight [N] and flat index [N] of each of the eight cells around x [N, 3]: cloud in cell."""
    scaled = x / mesh.spacing - 0.5  # in cells from the first centre
    low = scaled.floor()
    share = scaled - low
    index = low.long() % mesh.cells
    for corner in range(8):
        up = [corner >> axis & 1 for axis in range(3)]
        u, v, w = (share[:, axis] if up[axis] else 1 - share[:, axis] for axis in range(3))
        i, j, k = ((index[:, axis] + up[axis]) % mesh.cells for axis in range(3))
        yield u * v * w, (i * mesh.cells + j) * mesh.cells + k

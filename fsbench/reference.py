"""Float64 references for derivatives: converged potentials, and the Hessian of OT_eps in x times a direction.

All pairs, in blocks: storage is O(n d + m d) and one block. The square is expanded on centred points, which in float64
loses 1e-16 of their squared distance from the centre, over eps. Nothing of a solver under test is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fsbench.api import Clouds

RESIDUAL = 1e-10  # of the reference potentials, L1
_MOST_ITERATIONS = 20_000
_BLOCK_PAIRS = {"cpu": 1 << 20, "cuda": 1 << 26}  # 8 MiB stays near a CPU's cache; 512 MiB fills a GPU


class NotConverged(Exception):
    """The reference itself cannot be had: the problem is too hard for plain float64 iterations."""


@dataclass(frozen=True)
class _Problem:
    """x [n, d], y [m, d] centred, log_a [n], log_b [m], all float64 on the device; scale = cost_scale / eps."""

    x: torch.Tensor
    y: torch.Tensor
    log_a: torch.Tensor
    log_b: torch.Tensor
    scale: float

    @classmethod
    def of(cls, clouds: Clouds, eps: float, cost_scale: float, device: str) -> _Problem:
        x, y, a, b = (torch.from_numpy(v).double().to(device) for v in (clouds.x, clouds.y, clouds.a, clouds.b))
        centre = (a @ x + b @ y) / (a.sum() + b.sum())
        return cls(x - centre, y - centre, (a / a.sum()).log(), (b / b.sum()).log(), cost_scale / eps)

    def turned(self) -> _Problem:
        return _Problem(self.y, self.x, self.log_b, self.log_a, self.scale)

    def exponents(self, rows: slice, v: torch.Tensor) -> torch.Tensor:
        """v_j - scale |x_i - y_j|^2 [rows, m]."""
        x = self.x[rows]
        block = torch.addmm(v - self.scale * self.y.square().sum(1), x, self.y.T, alpha=2 * self.scale)
        return block.sub_(self.scale * x.square().sum(1)[:, None])

    def blocks(self) -> list[slice]:
        step = max(1, _BLOCK_PAIRS[self.x.device.type] // len(self.y))
        return [slice(i, min(i + step, len(self.x))) for i in range(0, len(self.x), step)]

    def update(self, v: torch.Tensor) -> torch.Tensor:
        """f / eps [n] that makes the rows hold, from v = g / eps [m]."""
        return -torch.cat([self.exponents(rows, self.log_b + v).logsumexp(1) for rows in self.blocks()])


def converged_potentials(
    clouds: Clouds, *, eps: float, cost_scale: float = 1.0, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """f [n], g [m] whose L1 residual is at most RESIDUAL, by plain alternating updates. NotConverged otherwise."""
    problem = _Problem.of(clouds, eps, cost_scale, device)
    turned, weights = problem.turned(), problem.log_a.exp()
    u = problem.update(torch.zeros_like(problem.log_b))
    for _ in range(_MOST_ITERATIONS):
        v = turned.update(u)
        ahead = problem.update(v)
        residual = float((weights * torch.expm1(u - ahead)).abs().nansum())
        if residual <= RESIDUAL:
            return (eps * u).cpu().numpy(), (eps * v).cpu().numpy()
        u = ahead
    raise NotConverged(f"residual {residual:.1e} after {_MOST_ITERATIONS} float64 iterations: raise eps")


def hessian_product(
    clouds: Clouds, f: np.ndarray, g: np.ndarray, v: np.ndarray, *, eps: float, cost_scale: float = 1.0,
    device: str = "cpu", tol: float = 1e-11, max_iterations: int = 5000,
) -> np.ndarray:  # fmt: skip
    """The Hessian of OT_eps in x times v, [n, d] float64, at converged potentials f [n], g [m]; all weights positive.

    With dC_ij = 2 cost_scale (x_i - y_j) . v_i, the potentials change by (phi, gamma) so that the marginals stay:
    a phi + P gamma = (P o dC) 1 and P^T phi + b gamma = (P o dC)^T 1, solved for gamma by conjugate gradients on the
    Schur complement; then h_i = 2 cost_scale (a_i v_i - sum_j dP_ij y_j), dP = P o (phi + gamma - dC) / eps.
    Source: arXiv 2602.03067, Th. 5. NotConverged if `tol`, relative, is not reached.
    """
    problem = _Problem.of(clouds, eps, cost_scale, device)
    plan = _Plan(problem, *(torch.from_numpy(p).double().to(device) / eps for p in (f, g)))
    x, y = problem.x, problem.y
    a, b = plan.rows(torch.ones_like(y[:, :1]))[:, 0], plan.columns(torch.ones_like(x[:, :1]))[:, 0]
    move = torch.from_numpy(v).double().to(device)
    factor, along = 2 * cost_scale, (x * move).sum(1)
    plan_y = plan.rows(y)
    p = factor * (a * along - (plan_y * move).sum(1))
    of_columns = plan.columns(torch.cat([along[:, None], move], 1))
    q = factor * (of_columns[:, 0] - (y * of_columns[:, 1:]).sum(1))

    def schur(z: torch.Tensor) -> torch.Tensor:
        """In the unknown sqrt(b) gamma, whose spectrum lies in [0, 1]."""
        forth = plan.rows((z / b.sqrt())[:, None])[:, 0]
        return z - plan.columns((forth / a)[:, None])[:, 0] / b.sqrt()

    rhs = (q - plan.columns((p / a)[:, None])[:, 0]) / b.sqrt()
    gamma = _conjugate_gradients(schur, rhs, tol=tol, max_iterations=max_iterations) / b.sqrt()
    phi = (p - plan.rows(gamma[:, None])[:, 0]) / a
    second = plan.second_moment(move)
    moved = (phi - factor * along)[:, None] * plan_y + plan.rows(gamma[:, None] * y) + factor * second
    return (factor * (a[:, None] * move - moved / eps)).cpu().numpy()


class _Plan:
    """P_ij = a_i b_j exp(u_i + v_j - scale |x_i - y_j|^2), computed again at each use."""

    def __init__(self, problem: _Problem, u: torch.Tensor, v: torch.Tensor) -> None:
        self._problem, self._turned = problem, problem.turned()
        self._u, self._v = problem.log_a + u, problem.log_b + v

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """P values, [m, k] -> [n, k]."""
        return self._product(self._problem, self._u, self._v, values)

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        """P^T values, [n, k] -> [m, k]."""
        return self._product(self._turned, self._v, self._u, values)

    def second_moment(self, move: torch.Tensor) -> torch.Tensor:
        """sum_j P_ij (y_j . move_i) y_j [n, d]."""
        problem, y = self._problem, self._problem.y
        parts = []
        for rows in problem.blocks():
            block = self._block(problem, rows, self._u, self._v)
            parts.append(block.mul_(move[rows] @ y.T) @ y)
        return torch.cat(parts)

    @classmethod
    def _product(cls, problem: _Problem, u: torch.Tensor, v: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([cls._block(problem, rows, u, v) @ values for rows in problem.blocks()])

    @staticmethod
    def _block(problem: _Problem, rows: slice, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return problem.exponents(rows, v).add_(u[rows, None]).exp_()


def _conjugate_gradients(apply, rhs: torch.Tensor, *, tol: float, max_iterations: int) -> torch.Tensor:
    """Solve apply(z) = rhs, symmetric and semi-definite with rhs in its range. NotConverged past max_iterations."""
    z, residual = torch.zeros_like(rhs), rhs.clone()
    direction, square = residual.clone(), float(rhs @ rhs)
    goal = tol**2 * square
    for _ in range(max_iterations):
        if square <= goal:
            return z
        applied = apply(direction)
        step = square / float(direction @ applied)
        z, residual = z + step * direction, residual - step * applied
        before, square = square, float(residual @ residual)
        direction = residual + (square / before) * direction
    raise NotConverged(f"the reference's linear system was not solved to {tol:g} in {max_iterations} iterations")

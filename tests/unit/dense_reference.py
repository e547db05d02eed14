"""Entropic OT by the definitions: dense float64 arrays, plain alternating updates. Knows nothing of the solver."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def cost_matrix(x, y, cost_scale=1.0):
    return cost_scale * (x.double()[:, None] - y.double()[None]).square().sum(-1)


@dataclass
class Dense:
    """Converged potentials [n], [m], their plan [n, m], and the primal value it attains."""

    f: torch.Tensor
    g: torch.Tensor
    plan: torch.Tensor
    value: float
    linear_cost: float


def solve_dense(x, y, a, b, *, eps, cost_scale=1.0, rho_x=None, rho_y=None, iterations=20_000):
    """Alternate f = -damping eps log sum_j b_j exp((g_j - C_ij) / eps) and its mirror image until f stands still.

    A cloud given as both sides has one potential for both, which its update is averaged with.
    """
    cost = cost_matrix(x, y, cost_scale)
    damping_x, damping_y = (1.0 if rho is None else rho / (rho + eps) for rho in (rho_x, rho_y))
    alone = x is y and a is b and rho_x == rho_y
    a, b = a.double(), b.double()
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(iterations):
        previous = f
        f = -damping_x * eps * torch.logsumexp((g[None] - cost) / eps + b.log()[None], 1)
        if alone:
            f = g = (f + previous) / 2
        else:
            g = -damping_y * eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
        if (f - previous)[a > 0].abs().max() < 1e-13 * max(1.0, cost.max()):
            break
    else:
        raise AssertionError("the reference did not converge: choose an easier problem")
    product = a[:, None] * b
    plan = product * torch.exp((f[:, None] + g - cost) / eps)
    linear = (plan * cost).sum()
    value = linear + eps * kl(plan, product)
    for rho, marginal, weight in ((rho_x, plan.sum(1), a), (rho_y, plan.sum(0), b)):
        value += 0.0 if rho is None else rho * kl(marginal, weight)
    return Dense(f, g, plan, value.item(), linear.item())


def kl(p, q):
    """sum p ln(p / q) - p + q; 0 where both are."""
    return (torch.xlogy(p, torch.where(q > 0, p / q, 1.0)) - p + q).sum()


def divergence(x, y, a, b, **options):
    """S_eps by three dense solves."""
    cross, own_x, own_y = (solve_dense(*side, **options).value for side in ((x, y, a, b), (x, x, a, a), (y, y, b, b)))
    return cross - own_x / 2 - own_y / 2 + options["eps"] / 2 * (a.sum() - b.sum()).item() ** 2

"""Losses of the full cost |x - y|^2, in which closed forms and reports are stated, and clouds to try them on.

OT_full(eps, rho) = 2 OT_half(eps / 2, rho / 2), where SamplesLoss is of half the cost.
"""

from __future__ import annotations

import math

import torch

from solvers.flash_sinkhorn import SamplesLoss

# GPU sweeps are of float32 grade: residuals far below this are its rounding's at the ratios of cost to eps used here.
TIGHT = {"cpu": 1e-6, "cuda": 1e-5}


class Full:
    """Loss of the full cost; called like SamplesLoss, its gradients are those of the doubled half cost."""

    def __init__(self, eps, *, rho=None, debias=True, max_iterations=500, **options):
        reach = None if rho is None else math.sqrt(rho / 2)
        options |= {"debias": debias, "max_iterations": max_iterations}
        self.loss = SamplesLoss(blur=math.sqrt(eps / 2), reach=reach, **options)

    def __call__(self, *clouds):
        return 2 * self.loss(*clouds)


def plain(eps, **options):
    return Full(eps, debias=False, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=generator(seed), dtype=torch.float64).to(dtype)


def uniform(n, d, seed=0, dtype=torch.float64):
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64).to(dtype)


def weights(n, seed=0):
    w = torch.rand(n, generator=generator(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def leaf(tensor, device):
    return tensor.detach().to(device).requires_grad_()


def shifted(x, t):
    """x moved along t, with the steps that x's type can take."""
    return x + torch.as_tensor(t, dtype=x.dtype)

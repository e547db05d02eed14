"""Run under TRITON_INTERPRET=1: the balance's kernels against torch, one JSON line. `case` serves GPUs too."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import torch

from solvers.flash_sinkhorn.sweeps.launching import launch
from solvers.flash_sinkhorn2.correct import levels, pairs_of
from solvers.flash_sinkhorn2.correct.balance import FACTORS, Balance, bounded
from solvers.flash_sinkhorn2.correct.kernels import bound_kernel
from solvers.flash_sinkhorn2.correct.newton import STEPS, STOP
from solvers.flash_sinkhorn2.correct.triton_balance import BOUND, TritonBalance
from solvers.flash_sinkhorn2.geometry import Tree

CASES = [  # rows, columns, share of pairs kept, decades of the entries, of the transposed matrix
    (5, 40, 0.7, 2.0, False),  # one level
    (127, 90, 0.3, 6.0, True),
    (300, 20, 0.2, 3.0, False),  # rows alone have levels
    (301, 280, 0.03, 9.0, True),
    (560, 333, 0.01, 1.0, False),
]
EXACT = {"steps": 8, "stop": 0.0}  # as far as rounding lets the coarsest level be balanced
SMALL = CASES[:3]  # balanced twice more: after another balance, and no further than in use
BOUNDS = [(1, 1.0), (37, 20.0), (5001, 100.0)]  # columns, and the scale of their logarithms


def moved(value, device):
    """A record of tensors, and of records, on that device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def dual(dense, A, B, w):
    sums = dense @ w.exp()
    return (B @ w - (A[A > 0] * sums[A > 0].log()).sum()).item()


def case(rows, cols, density, decades, flipped, device="cpu"):
    generator = torch.Generator().manual_seed(rows + cols)
    random = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    kept = random(rows, cols) < density
    index = torch.arange(max(rows, cols))
    kept[index % rows, index % cols] = True
    dense = torch.where(kept, 10.0 ** (-decades * random(rows, cols)), 0.0)
    A, B = (mass / mass.sum() for mass in (random(rows) + 0.05, random(cols) + 0.05))
    if flipped:
        A, B = B, A
        dense = (dense.T * (A / dense.sum(0))[:, None]).T
    else:
        dense *= (A / dense.sum(1))[:, None]
    r, c = kept.nonzero(as_tuple=True)
    level = levels(pairs_of(r, c, kept.shape), *(Tree(n, 1, torch.arange(n)) for n in (rows, cols)))
    S = dense[r, c]
    level, S, A, B = moved(level, device), S.to(device), A.to(device), B.to(device)
    oriented = (dense.T if flipped else dense).to(device)
    masses = [(c, r) for r, c in level.masses(B, A)] if flipped else level.masses(A, B)
    arguments = {"sweeps": 4, "factors": FACTORS}
    exact = arguments | EXACT | {"products": 32, "inexact": 1e-8}
    balance = TritonBalance(level, masses, flipped=flipped, **exact)
    is_small = (rows, cols, density, decades, flipped) in SMALL
    if is_small:  # the memory that the other one leaves says nothing of what comes next
        other = TritonBalance(level, [(c, r) for r, c in masses], flipped=not flipped, **exact)
        other(torch.rand_like(S), fine=False)
    w, fine = balance(S, fine=False).clone(), balance(S, fine=True)
    in_use = w
    if is_small:
        in_use = TritonBalance(level, masses, flipped=flipped, **arguments, steps=STEPS, stop=STOP)(S, fine=False)
    level, S, A, B = (moved(value, "cpu") for value in (level, S, A, B))
    of_torch = Balance(level, A, B, flipped=flipped, **EXACT)
    by_torch, fine_by_torch = of_torch(S), of_torch(S, fine=True)
    in_use_by_torch = Balance(level, A, B, flipped=flipped)(S)
    w, fine, in_use, oriented = w.cpu(), fine.cpu(), in_use.cpu(), oriented.cpu()
    start = dual(oriented, A, B, torch.zeros_like(B))
    return {
        "gained": dual(oriented, A, B, w) - start,
        "gained_by_torch": dual(oriented, A, B, by_torch) - start,
        "largest": w.abs().max().item(),
        "mean": max((B @ w).abs().item(), (B @ fine).abs().item()),
        "apart": (w - by_torch).abs().max().item(),
        "in_use_gained": dual(oriented, A, B, in_use) - start,
        "in_use_gained_by_torch": dual(oriented, A, B, in_use_by_torch) - start,
        "fine_gained": dual(oriented, A, B, fine) - start,
        "fine_apart": (fine - fine_by_torch).abs().max().item(),
    }


def bounds_apart(n, scale, device="cpu"):
    """Of logarithms of that scale, largest difference from the bounds in torch, and the largest of those."""
    generator = torch.Generator().manual_seed(n)
    w, mass = (torch.rand(n, generator=generator, dtype=torch.float64) for _ in range(2))
    w, mass = scale * (w.square() - 0.3), mass / mass.sum()
    out = torch.empty_like(w, device=device)
    launch(bound_kernel, (1, 1, 1), (w.to(device), mass.to(device), out, n), {"BLOCK": BOUND, "num_warps": 8})
    want = bounded(w, mass)
    return (out.cpu() - want).abs().max().item(), want.abs().max().item()


if __name__ == "__main__":
    bounds = [bounds_apart(n, scale) for n, scale in BOUNDS]
    print(json.dumps({"bounds": bounds, **{str(c): case(*c) for c in CASES}}))

"""Cosine costs and costs between labels against dense float64 solves of their cost matrices."""

from __future__ import annotations

import pytest
import torch
from full_cost import TIGHT, leaf, normal, weights

from solvers.flash_sinkhorn import SamplesLoss, label_transport, unit_vectors


def dense(cost, a, b, eps, iterations=5000):
    """f, g, plan and value by plain alternating updates."""
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(iterations):
        f = -eps * torch.logsumexp((g - cost) / eps + b.log(), 1)
        g = -eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
    plan = a[:, None] * b * torch.exp((f[:, None] + g - cost) / eps)
    return f, g, plan, (a @ f + b @ g).item()


def labelled(n=21, m=17, d=3, kinds=(4, 3)):
    x, y, a, b = normal(n, d), normal(m, d, 1), weights(n, 2), weights(m, 3)
    generator = torch.Generator().manual_seed(5)
    l_x, l_y = (torch.randint(k, (count,), generator=generator) for k, count in zip(kinds, (n, m), strict=True))
    table = 3 * torch.rand(kinds, generator=generator, dtype=torch.float64) - 0.5  # costs may be negative
    return x, y, l_x, l_y, table, a, b


@pytest.mark.parametrize("cost_scale", [1.0, 0.5])
def test_label_cost_is_that_of_its_matrix(device, cost_scale):
    x, y, l_x, l_y, table, a, b = labelled()
    cost = cost_scale * torch.cdist(x, y).square() + table[l_x][:, l_y]
    f, g, plan, value = dense(cost, a, b, 0.4)
    on_device = [v.to(device) for v in (x, y, l_x, l_y, table, a, b)]
    found = label_transport(*on_device, eps=0.4, cost_scale=cost_scale, tol=TIGHT[device])
    assert found.converged
    assert found.ot.item() == pytest.approx(value, abs=1e-8 if device == "cpu" else 1e-5)
    constant = (found.f.cpu() - f).mean()
    assert (found.f.cpu() - f - constant).abs().max() < 10 * TIGHT[device]
    assert (found.g.cpu() - g + constant).abs().max() < 10 * TIGHT[device]
    received = found.plan.apply(torch.eye(3, dtype=torch.float64)[l_y].to(device)).cpu().double()
    assert (received - plan @ torch.eye(3, dtype=torch.float64)[l_y]).abs().sum() < 10 * TIGHT[device]


def test_gradient_of_label_cost(device):
    x, y, l_x, l_y, table, a, b = labelled()
    cost = torch.cdist(x, y).square() + table[l_x][:, l_y]
    plan = dense(cost, a, b, 0.4)[2]
    points = leaf(x, device)
    label_transport(
        points, *(v.to(device) for v in (y, l_x, l_y, table, a, b)), eps=0.4, tol=TIGHT[device]
    ).ot.backward()
    want = 2 * (plan.sum(1, keepdim=True) * x - plan @ y)
    assert (points.grad.cpu() - want).abs().max() < 10 * TIGHT[device]


def test_masses_other_than_one_and_uniform_weights():
    x, y, l_x, l_y, table, a, b = labelled()
    one = label_transport(x, y, l_x, l_y, table, a, b, eps=0.4, tol=1e-10)
    three = label_transport(x, y, l_x, l_y, table, 3 * a, 3 * b, eps=0.4, tol=1e-10)
    # With masses of three KL(P | a x b) has a reference of mass nine: P log 3 and the constants differ.
    entropy = 0.4 * (3 * torch.log(torch.tensor(1 / 3)) - 3 + 9).item()
    assert three.ot.item() == pytest.approx(3 * one.ot.item() + entropy, rel=1e-6)
    uniform = label_transport(x, y, l_x, l_y, table, eps=0.4, tol=1e-10).ot.item()
    same = label_transport(
        x, y, l_x, l_y, table, torch.full((21,), 1 / 21), torch.full((17,), 1 / 17), eps=0.4, tol=1e-10
    )
    assert uniform == pytest.approx(same.ot.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_points_do_not_round_the_labels_costs(dtype):
    x, y, l_x, l_y, table, a, b = labelled()
    x, y, table = x.to(dtype), y.to(dtype), 1000 + table / 10
    want = label_transport(x.double(), y.double(), l_x, l_y, table, a, b, eps=0.4, tol=1e-8).ot.item()
    assert label_transport(x, y, l_x, l_y, table, a, b, eps=0.4, tol=1e-5).ot.item() == pytest.approx(want, rel=1e-6)


def test_a_constant_table_adds_its_constant():
    x, y, l_x, l_y, _, a, b = labelled()
    plain = label_transport(x, y, l_x, l_y, torch.zeros(4, 3), a, b, eps=0.4, tol=1e-10).ot
    moved = label_transport(x, y, l_x, l_y, torch.full((4, 3), 7.0), a, b, eps=0.4, tol=1e-10).ot
    assert (moved - plain).item() == pytest.approx(7.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.full((4, 3), torch.nan)}, "table must"),
        ({"table": torch.zeros(4)}, "table must"),
        ({"labels_x": torch.full((21,), 4)}, "labels_x must index the table's 4 labels"),
        ({"labels_y": torch.zeros(17)}, "labels_y must be an integer tensor"),
        ({"labels_y": torch.zeros(5, dtype=torch.long)}, "labels_y must be an integer tensor"),
        ({"x": [[1.0]]}, "x must be"),
        ({"y": torch.zeros(17, 2)}, "x and y must have the same d, got 3 and 2"),
        ({"debias": True}, "debias is not offered"),
        ({"rho": 1.0}, "rho is not offered"),
    ],
)
def test_wrong_labels_are_refused_by_name(change, message):
    names = ("x", "y", "labels_x", "labels_y", "table", "a", "b")
    arguments = dict(zip(names, labelled(), strict=True)) | {"eps": 0.4} | change
    with pytest.raises(ValueError, match=message):
        label_transport(**arguments)


def test_cosine_cost(device):
    x, y, a, b = 3 * normal(15, 4), normal(12, 4, 1), weights(15, 2), weights(12, 3)
    cost = 1 - torch.nn.functional.cosine_similarity(x[:, None], y[None], dim=-1)
    points = leaf(x, device)
    loss = SamplesLoss(blur=0.3, debias=False, tol=TIGHT[device])
    value = loss(a.to(device), unit_vectors(points), b.to(device), unit_vectors(y).to(device))
    plan = dense(cost, a, b, 0.09)[2]
    assert value.item() == pytest.approx(dense(cost, a, b, 0.09)[3], abs=1e-5)
    value.backward()
    reference = leaf(x, "cpu")
    (plan * (1 - torch.nn.functional.cosine_similarity(reference[:, None], y[None], dim=-1))).sum().backward()
    assert (points.grad.cpu() - reference.grad).abs().max() < 10 * TIGHT[device]


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e25])
def test_unit_vectors_of_any_length(size):
    vectors = normal(4, 3, dtype=torch.float32)
    found = unit_vectors(size * vectors)
    assert (found - torch.nn.functional.normalize(vectors.double(), dim=-1)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.zeros(2, 3), "zero vector"),
        (torch.full((2, 3), torch.nan), "NaN"),
        (torch.ones(2, 3, dtype=torch.long), "x must be a floating-point"),
        ([[1.0, 2.0]], "x must be a floating-point"),
    ],
)
def test_vectors_without_a_direction_are_refused(vectors, message):
    with pytest.raises(ValueError, match=message):
        unit_vectors(vectors)


@pytest.mark.gpu
def test_sixty_thousand_labelled_points_a_side_stay_under_a_gigabyte():
    """At d = 512, inputs included; the costs alone would be 14 GB."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    n, d, kinds = 60_000, 512, 10
    x, y = (torch.randn(n, d, device="cuda") / d**0.5 for _ in range(2))
    l_x, l_y = (torch.randint(kinds, (n,), device="cuda") for _ in range(2))
    table = torch.rand(kinds, kinds, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    found = label_transport(x, y, l_x, l_y, table, eps=0.1, n_iterations=2)
    assert torch.cuda.max_memory_allocated() < 1e9
    assert torch.isfinite(found.f).all() and torch.isfinite(found.ot)

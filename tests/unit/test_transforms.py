"""torch.func's transforms of losses: reverse mode gives what autograd does, vmap what a batch does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_batches import gpu, problems
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

from solvers.flash_sinkhorn import SamplesLoss, solve, transport
from solvers.flash_sinkhorn.losses import batches
from solvers.flash_sinkhorn.losses.loss import ot_value
from solvers.flash_sinkhorn2.plan.transport import transport as kept_transport

SETTINGS = [{}, {"debias": False}, {"reach": 2.0}, {"reach_x": 2.0}, {"n_iterations": 20}, {"max_seconds": 60.0}]
# The same solve, gradient and system on either way: sums of at most 200 float64 terms of size one, in another order.
SAME = {"rtol": 1e-11, "atol": 1e-11}
same = partial(torch.testing.assert_close, **SAME)


def loss_of(**settings):
    return SamplesLoss(blur=1.5, tol=None if "n_iterations" in settings else 1e-10, hessian_tol=1e-12, **settings)


def batch(count=3):
    """a, x, b, y of a batch, as losses take them."""
    x, y, a, b = problems(count, 9, 7, 2, dtype=torch.float64)
    return a, 0.5 * x, b, 0.5 * y


def single():
    return tuple(v[0] for v in batch())


def directions(clouds):
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in clouds)


def by_autograd(loss, clouds, along):
    """The sum of the values, its gradients in all clouds, and their change along a direction."""
    clouds = [v.clone().requires_grad_() for v in clouds]
    value = loss(*clouds).sum()
    first = torch.autograd.grad(value, clouds, create_graph=True)
    second = torch.autograd.grad(first, clouds, along)
    return value.detach(), [v.detach() for v in first], second


@pytest.mark.parametrize("settings", SETTINGS)
def test_reverse_mode_is_autograds(settings):
    loss, clouds, every = loss_of(**settings), single(), (0, 1, 2, 3)
    along = directions(clouds)
    value, first, second = by_autograd(loss, clouds, along)
    assert all(v.any() for v in (*first, *second))
    gradients, found = grad_and_value(loss, argnums=every)(*clouds)
    same(found, value)
    _, back = vjp(loss, *clouds)
    for got in (gradients, grad(loss, argnums=every)(*clouds), jacrev(loss, argnums=every)(*clouds),
                back(torch.ones_like(value))):  # fmt: skip
        same(list(got), first)
    _, back = vjp(grad(loss, argnums=every), *clouds)
    same(list(back(along)), list(second))


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_jacrev_of_grad_is_the_hessian(settings):
    """Its columns are Hessian products along one-hot directions, which vmap lines up."""
    loss, clouds = loss_of(**settings), single()
    along = torch.zeros(4).double(), directions(clouds)[1]
    _, _, second = by_autograd(lambda x: loss(clouds[0], x, *clouds[2:]), clouds[1:2], along[1:])
    for transformed in (jacrev(grad(loss, argnums=1), argnums=1), jacrev(jacrev(loss, argnums=1), argnums=1)):
        # Two linear solves to hessian_tol, whose errors a condition number below 1e3 magnifies.
        torch.testing.assert_close((transformed(*clouds) * along[1]).sum((2, 3)), second[0], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("settings", SETTINGS)
def test_vmap_is_the_batch(settings):
    loss, clouds, every = loss_of(**settings), batch(), (0, 1, 2, 3)
    along = directions(clouds)
    value, first, second = by_autograd(loss, clouds, along)
    same(vmap(loss)(*clouds), loss(*clouds))
    same(vmap(loss)(*clouds).sum(), value)
    same(list(vmap(grad(loss, argnums=every))(*clouds)), first)
    same(list(grad(lambda *clouds: vmap(loss)(*clouds).sum(), argnums=every)(*clouds)), first)

    def product(clouds, along):
        return vjp(grad(loss, argnums=every), *clouds)[1](along)

    same(list(vmap(product)(clouds, along)), list(second))


def test_vmap_solves_all_problems_together(monkeypatch):
    """Without it each would call for a solve of its own."""
    shapes = []
    plain = batches.find_together

    def counted(x, *others, **options):
        shapes.append(x.shape)
        return plain(x, *others, **options)

    monkeypatch.setattr(batches, "find_together", counted)
    a, x, b, y = batch()
    vmap(grad(loss_of()))(a, x, b, y)
    assert shapes == [x.shape]


def test_what_is_not_mapped_is_shared():
    loss, (a, x, b, y) = loss_of(), batch()
    shared = y[0]
    want = y[0].clone().requires_grad_()
    values = loss(x, want.expand(3, 7, 2))
    (gradient,) = torch.autograd.grad(values.sum(), want)
    same(vmap(loss, in_dims=(0, None))(x, shared), values.detach())
    same(grad(lambda y: vmap(loss, in_dims=(0, None))(x, y).sum())(shared), gradient)
    same(vmap(loss, in_dims=(None, 1))(shared, x.movedim(0, 1)), loss(shared.expand(3, 7, 2), x))
    same(
        vmap(lambda a: loss(a, x[0], b[0], y[0]))(a),
        loss(a, x[:1].expand(3, 9, 2), *(v[:1].expand_as(v) for v in (b, y))),
    )


def test_maps_of_maps_and_of_batches():
    loss, (_, x, _, y) = loss_of(), batch()
    several = torch.stack([x, 0.9 * x])
    want = torch.stack([loss(one, y) for one in several])
    gradients = torch.stack([grad(lambda x: loss(x, y).sum())(one) for one in several])
    for mapped in (vmap(loss, in_dims=(0, None)), vmap(vmap(loss), in_dims=(0, None))):
        same(mapped(several, y), want)
    same(vmap(vmap(grad(loss)), in_dims=(0, None))(several, y), gradients)


@pytest.mark.parametrize("debias", [False, True])
def test_potentials_of_a_map(debias):
    loss, clouds = loss_of(potentials=True, debias=debias), batch()
    for got, want in zip(vmap(loss)(*clouds), loss(*clouds), strict=True):
        same(got, want)


@pytest.mark.parametrize(("solve", "tol"), [(transport, 1e-10), (kept_transport, 1e-6)])
def test_grad_of_a_transport(solve, tol):
    a, x, b, y = single()
    for name in ("ot", "divergence"):

        def value(x, name=name):
            return getattr(solve(x, y, a, b, eps=1.0, debias=True, tol=tol), name)

        ours = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(value(ours), ours)
        assert first.any()
        same(grad(value)(x), first)


def test_grad_of_ot_value():
    a, x, b, y = single()
    found = solve(x, y, a, b, eps=1.0, tol=1e-10)

    def value(x):
        return ot_value(x, y, a, b, found.f, found.g, eps=1.0)

    ours = x.clone().requires_grad_()
    same(grad(value)(x), torch.autograd.grad(value(ours), ours)[0])


def test_multiscale_losses():
    """float32 tiles: the same numbers on either way."""
    loss, (_, x, _, y) = SamplesLoss(blur=1.0, backend="multiscale", tol=1e-5), batch()
    ours = x.clone().requires_grad_()
    values = loss(ours, y)
    (gradient,) = torch.autograd.grad(values.sum(), ours)
    same(vmap(loss)(x, y), values.detach())
    same(vmap(grad(loss))(x, y), gradient)
    same(grad(loss)(x[0], y[0]), gradient[0])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"tol": 1e-4}, {"n_iterations": 10}])
def test_on_a_gpu(settings):
    """Kernels get plain tensors. The same launches on either way, so the same bits but for one multiplication."""
    loss = SamplesLoss(blur=1.5, **settings)
    x, y, a, b = (v.cuda() for v in problems(5, 300, 211, 3))
    ours = x.clone().requires_grad_()
    values = loss(a, ours, b, y)
    (gradient,) = torch.autograd.grad(values.sum(), ours)
    torch.testing.assert_close(vmap(loss)(a, x, b, y), values.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(vmap(grad(loss, argnums=1))(a, x, b, y), gradient, rtol=1e-6, atol=1e-6)
    alone = x[0].clone().requires_grad_()
    (of_one,) = torch.autograd.grad(loss(a[0], alone, b[0], y[0]), alone)
    torch.testing.assert_close(grad(loss, argnums=1)(a[0], x[0], b[0], y[0]), of_one, rtol=1e-6, atol=1e-6)
    _, back = vjp(grad(loss, argnums=1), a[0], x[0], b[0], y[0])
    assert back(of_one)[1].isfinite().all()


def test_results_of_a_transport_are_plain_numbers_inside():
    a, x, b, y = single()
    want = loss_of().transport(a, x, b, y)

    def value(x):
        found = loss_of().transport(a, x, b, y)
        assert found.residual == want.residual and found.converged
        return found.value, found.f

    gradient, f = grad(value, has_aux=True)(x)
    assert gradient.any() and torch.equal(f, want.f)


def test_half_precision_clouds_have_gradients_of_their_type():
    _, x, _, y = single()
    assert grad(SamplesLoss(blur=1.0))(x.half(), y.half()).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
def test_what_is_refused_says_what_to_use():
    loss, (_, x, _, y) = loss_of(), single()
    value = partial(loss, y)
    for forward in (lambda: jvp(value, (x,), (x,)), lambda: hessian(value)(x), lambda: dual(value, x)):
        with pytest.raises(NotImplementedError, match=r"no forward mode .*use torch.func.vjp, jacrev"):
            forward()
    with pytest.raises(NotImplementedError, match="three times"):
        grad(lambda x: grad(lambda x: grad(value)(x).square().sum())(x).square().sum())(x)
    for mapped in (lambda x: transport(x, y, eps=1.0).ot, lambda x: loss.transport(x, y).ot):
        with pytest.raises(NotImplementedError, match=r"use torch.func.vmap on a SamplesLoss"):
            vmap(mapped)(x[None])


def dual(value, x):
    with forward_ad.dual_level():
        return value(forward_ad.make_dual(x, x))


def test_checks_are_made_inside():
    _, x, _, y = batch()
    x[1, 0] = torch.nan
    with pytest.raises(ValueError, match="x contains NaN"):
        vmap(grad(loss_of()))(x, y)
    with pytest.raises(ValueError, match="must have the same d"):
        grad(loss_of())(x[0], y[0, :, :1])

"""`SamplesLoss` as GeomLoss's: its calls, its values, what it takes and refuses, batches, types, torch's tools."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.utils.checkpoint
from dense_reference import divergence, solve_dense
from full_cost import TIGHT

from solvers.flash_sinkhorn import NotConverged, transport
from solvers.flash_sinkhorn.losses.samples_loss import SamplesLoss


def uniform(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(*shape, seed=0):
    w = uniform(*shape, seed=seed) + 0.2
    return w / w.sum(-1, keepdim=True)


def problem(n=15, m=12, d=3):
    return weights(n, seed=1), uniform(n, d, seed=2), weights(m, seed=3), uniform(m, d, seed=4) * 0.8 + 0.3


def on(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


class TestAgainstGeomLoss:
    """GeomLoss ends on a schedule, and its error falls in proportion to 1 - scaling: 1e-3 at 0.999 to a factor."""

    @pytest.mark.parametrize("reach", [None, 0.5])
    @pytest.mark.parametrize("debias", [True, False])
    @pytest.mark.parametrize("blur", [0.4, 0.2])
    def test_values_gradients_and_potentials(self, blur, debias, reach):
        theirs = pytest.importorskip("geomloss").SamplesLoss
        options = {"blur": blur, "debias": debias, "reach": reach}
        found, expected = {}, {}
        for loss, out in (
            (SamplesLoss(tol=1e-9, **options), found),
            (theirs(scaling=0.999, backend="tensorized", **options), expected),
        ):
            a, x, b, y = (v.clone().requires_grad_() for v in problem())
            value = loss(a, x, b, y)
            out["value"] = value.detach()
            out["a"], out["x"], out["b"], out["y"] = torch.autograd.grad(value, (a, x, b, y))
            loss.potentials = True
            out["f"], out["g"] = (potential.reshape(-1) for potential in loss(a, x, b, y))
        if reach is not None:
            # Their gradients with a reach carry the factor (rho + eps / 2) / (rho + eps); the value's own do not.
            factor = (reach**2 + blur**2) / (reach**2 + blur**2 / 2)
            expected["x"], expected["y"] = expected["x"] * factor, expected["y"] * factor
            compared = ("value", "x", "y", "f", "g")
        else:
            for key in ("a", "b", "f", "g"):  # of balanced ones only differences count
                found[key], expected[key] = (out[key] - out[key].mean() for out in (found, expected))
            compared = ("value", "a", "x", "b", "y", "f", "g")
        for key in compared:
            scale = expected[key].abs().max().item()
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=4e-3 * scale, msg=key)
        assert found["value"].item() == pytest.approx(expected["value"].item(), rel=1e-3)

    def test_the_difference_falls_with_their_schedule(self):
        theirs = pytest.importorskip("geomloss").SamplesLoss
        a, x, b, y = problem()
        value = SamplesLoss(blur=0.2, tol=1e-9)(a, x, b, y).item()
        errors = [
            abs(theirs(blur=0.2, scaling=s, backend="tensorized")(a, x, b, y).item() - value) for s in (0.9, 0.99)
        ]
        assert errors[1] < 0.2 * errors[0]

    def test_parameters_have_their_names_places_and_defaults(self):
        import inspect

        theirs = pytest.importorskip("geomloss").SamplesLoss
        expected = [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
        found = [(p.name, p.default) for p in inspect.signature(SamplesLoss).parameters.values()]
        assert found[: len(expected)] == expected

    @pytest.mark.parametrize(
        ("options", "call"),
        [
            ({"loss": "sinkhorn", "p": 2, "blur": 0.05}, "points"),
            ({"blur": 0.05}, "weights"),
            ({"blur": 0.05}, "no labels"),
            ({"blur": 0.1, "scaling": 0.8, "backend": "tensorized"}, "points"),
            ({"blur": 0.1, "scaling": 0.9, "debias": False, "potentials": True}, "points"),
            ({"blur": 0.1, "reach": 0.3, "backend": "online"}, "weights"),
            ({"blur": 0.1, "diameter": 4.0, "truncate": None, "cluster_scale": 0.2, "backend": "multiscale"}, "points"),
            ({"blur": 0.1, "potentials": True}, "batch"),
            ({"blur": 0.1}, "batch"),
            ({"blur": 0.1}, "columns of weights"),
        ],
    )
    def test_every_call_form_runs_with_the_import_changed(self, device, options, call):
        a, x, b, y = on(device, *problem())
        arguments = {
            "points": (x, y),
            "weights": (a, x, b, y),
            "no labels": (None, a, x, None, b, y),
            "columns of weights": (a[:, None], x, b[:, None], y),
            "batch": (a.expand(2, -1), x.expand(2, -1, -1), b.expand(2, -1), y.expand(2, -1, -1)),
        }[call]
        found = SamplesLoss(**options)(*arguments)
        shape = (2,) if call == "batch" else ()
        if not options.get("potentials"):
            assert found.shape == shape and (found > 0).all()
        else:
            f, g = found
            assert f.shape == (*shape, 15) and g.shape == (*shape, 12)
            assert not f.requires_grad and not g.requires_grad

    def test_gradient_by_autograd_grad_as_in_their_documentation(self, device):
        x, y = on(device, uniform(100, 3, dtype=torch.float32).requires_grad_(), uniform(200, 3, dtype=torch.float32))
        loss = SamplesLoss(loss="sinkhorn", p=2, blur=0.05)
        (gradient,) = torch.autograd.grad(loss(x, y), [x])
        assert gradient.shape == x.shape and gradient.dtype == torch.float32 and gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("geomloss", {"loss": "energy"}),
        ("geomloss", {"loss": "gaussian"}),
        ("geomloss", {"loss": "laplacian"}),
        ("geomloss", {"loss": "hausdorff"}),
        ("loss", {"loss": "sinkhorm"}),
        ("p must be 2", {"p": 1}),
        ("cost", {"cost": "SqDist(X,Y)"}),
        ("backend", {"backend": "keops"}),
        ("scaling", {"scaling": 0}),
        ("scaling", {"scaling": 1}),
        ("scaling", {"scaling": 1.5}),
        ("blur", {"blur": 0.0}),
        ("blur", {"blur": float("nan")}),
        ("blur", {"blur": -0.1}),
        ("blur", {"blur": 1e-300}),
        ("blur", {"blur": 1e300}),
        ("reach", {"reach": 1e200}),
        ("reach", {"reach": 0.0}),
        ("reach_x", {"reach_x": -1.0}),
        ("reach_y", {"reach_y": float("inf")}),
        ("diameter", {"diameter": 0.0}),
        ("truncate", {"truncate": -5}),
        ("cluster_scale", {"cluster_scale": "small"}),
    ],
)
def test_bad_settings_are_refused_by_name(name, options):
    with pytest.raises(ValueError, match=name):
        SamplesLoss(**options)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("3 arguments", ("a", "x", "y")),
        ("labels", ("labels", "a", "x", None, "b", "y")),
        ("x must be a tensor", ("flat", "y")),
        ("x must be a tensor", ([[0.0]], "y")),
        ("y must be a tensor", ("x", "four")),
        ("batches of the same size", ("x", "batch")),
        ("batches of the same size", ("batch", "batch of one")),
        ("of at least one", ("no batch", "no batch")),
        ("a must be a tensor", ("b", "x", "b", "y")),
        ("b must be a tensor", ("a", "x", "square", "y")),
        ("same d", ("x", "plane")),
        ("x must be a dense floating", ("integers", "y")),
        ("x contains NaN", ("nan", "y")),
        ("y must have shape", ("x", "empty")),
        ("negative", ("negative", "x", "b", "y")),
        ("same mass", ("heavy", "x", "b", "y")),
        ("a contains NaN", ("inf", "x", "b", "y")),
    ],
)
def test_bad_clouds_are_refused_by_name(name, arguments):
    a, x, b, y = problem()
    bad = {
        "a": a, "x": x, "b": b, "y": y, "labels": torch.zeros(15), "flat": x[0], "four": x[None, None],
        "batch": x.expand(3, -1, -1), "batch of one": y[None], "no batch": x.expand(0, -1, -1),
        "square": b.expand(12, 12),
        "plane": y[:, :2], "integers": x.long(), "nan": x.masked_fill(x > 0.9, float("nan")), "empty": y[:0],
        "negative": a - 0.05, "heavy": 2 * a, "inf": a / 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=name):
        SamplesLoss()(
            *(bad.get(argument, argument) if isinstance(argument, str) else argument for argument in arguments)
        )


def test_a_batch_is_a_loop(device):
    """Values, gradients in points and weights, potentials; items in any order.

    Either is off by its residual times the distances of points in the unit square, and once over each problem's three.
    """
    tol = 1e-10 if device == "cpu" else 1e-5
    close = {"rtol": 0.0, "atol": 10 * tol}
    a, x, b, y = on(device, weights(4, 15), uniform(4, 15, 2), weights(4, 12, seed=1), uniform(4, 12, 2, seed=1) + 0.2)
    loss = SamplesLoss(blur=0.2, tol=tol)
    batch = [v.clone().requires_grad_() for v in (a, x, b, y)]
    values = loss(*batch)
    scale = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device)
    gradients = torch.autograd.grad(values @ scale.to(values.dtype), batch)
    for i in range(4):
        single = [v[i].clone().requires_grad_() for v in (a, x, b, y)]
        value = loss(*single)
        torch.testing.assert_close(values[i], value, **close)
        for gradient, alone in zip(gradients, torch.autograd.grad(scale[i] * value, single), strict=True):
            torch.testing.assert_close(gradient[i], alone, **close)
    order = [2, 0, 3, 1]
    assert torch.equal(loss(a[order], x[order], b[order], y[order]), values[order])
    loss = SamplesLoss(blur=0.2, tol=tol, potentials=True)
    f, g = loss(a[..., None], x, b[..., None], y)
    assert f.shape == (4, 15, 1) and g.shape == (4, 12, 1)
    torch.testing.assert_close(f[2, :, 0], loss(a[2], x[2], b[2], y[2])[0], **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 8, 25, 26, 200])
def test_i01_i03_half_precision_is_taken_as_it_is_at_every_size(device, dtype, n):
    x, y = uniform(n, 8).to(device, dtype), uniform(20, 8, seed=1).to(device, dtype)
    loss = SamplesLoss(blur=0.3)
    halves = x.clone().requires_grad_()
    singles = x.float().requires_grad_()
    value, expected = loss(halves, y), loss(singles, y.float())
    assert value.dtype == torch.float32 and value.item() == expected.item()
    value.backward()
    expected.backward()
    assert halves.grad.dtype == dtype
    assert torch.equal(halves.grad, singles.grad.to(dtype))


def test_small_upstream_gradients_do_not_vanish_in_half_precision(device):
    """A point's gradient is below float16's range; scaled as by a GradScaler it is not, if scaled before rounding."""
    x = uniform(1000, 2).to(device, torch.float16)
    y = (x.float() + 1e-4).half()
    leaf = x.clone().requires_grad_()
    (2.0**16 * SamplesLoss(blur=0.3, n_iterations=3)(leaf, y)).backward()
    single = x.float().requires_grad_()
    (2.0**16 * SamplesLoss(blur=0.3, n_iterations=3)(single, y.float())).backward()
    torch.testing.assert_close(leaf.grad.float(), single.grad, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "view",
    [
        lambda v: v.T.contiguous().T,
        lambda v: torch.cat([v, v], 1)[:, : v.shape[1]],
        lambda v: torch.repeat_interleave(v, 3, 0)[::3],
        lambda v: torch.repeat_interleave(v, 2, 1)[:, ::2],
        lambda v: torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape),
        lambda v: v[:1].expand(v.shape),
    ],
    ids=["transposed", "wider", "every third", "every other", "offset", "expanded"],
)
def test_i04_strides_change_nothing(device, view):
    a, x, b, y = (v.float() for v in problem())
    loss = SamplesLoss(blur=0.2, reach=1.0)  # expanded weights have other masses
    strided = [view(v if v.ndim == 2 else v[:, None]).to(device) for v in (a, x, b, y)]
    strided[0], strided[2] = strided[0][:, 0], strided[2][:, 0]
    gradients = []
    for inputs in (strided, [v.contiguous() for v in strided]):
        leaves = [v.detach().requires_grad_() for v in inputs]
        gradients.append(torch.autograd.grad(loss(*leaves), leaves))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("which", ["x", "y", "a", "b", "xy", "ab", "xa"])
def test_g05_the_loss_needs_grad_when_any_input_does(device, which):
    tensors = dict(zip("axby", on(device, *problem()), strict=True))
    leaves = [tensors[name].requires_grad_() for name in which]
    value = SamplesLoss(blur=0.2)(*tensors.values())
    assert value.requires_grad
    value.backward()
    assert all(leaf.grad is not None and leaf.grad.abs().max() > 0 for leaf in leaves)
    assert all(tensor.grad is None for name, tensor in tensors.items() if name not in which)


@pytest.mark.parametrize("reaches", [{"reach_x": 0.6}, {"reach_y": 0.6}, {"reach_x": 0.4, "reach_y": 0.9}])
@pytest.mark.parametrize("debias", [True, False])
def test_one_reach_a_side(device, reaches, debias):
    a, x, b, y = problem()
    a = 1.5 * a
    found = SamplesLoss(blur=0.3, debias=debias, tol=TIGHT[device], **reaches)(*on(device, a, x, b, y)).item()
    options = {"eps": 0.09, "cost_scale": 0.5} | {f"rho_{name[-1]}": reach**2 for name, reach in reaches.items()}
    expected = divergence(x, y, a, b, **options) if debias else solve_dense(x, y, a, b, **options).value
    assert found == pytest.approx(expected, rel=1e-5)


def test_potentials_are_the_gradients_in_the_weights(device):
    """For unit masses; constants to autograd (G16)."""
    a, x, b, y = (v.requires_grad_() for v in on(device, *problem()))
    for debias in (True, False):
        f, g = SamplesLoss(blur=0.2, potentials=True, debias=debias)(a, x, b, y)
        in_a, in_b = torch.autograd.grad(SamplesLoss(blur=0.2, debias=debias)(a, x, b, y), (a, b))
        torch.testing.assert_close(f, in_a)
        torch.testing.assert_close(g, in_b)
        assert not f.requires_grad and not g.requires_grad


def test_what_did_not_converge_warns_and_what_did_does_not():
    x = torch.cat([torch.linspace(0, 0.3, 30), torch.linspace(5, 5.3, 20)])[:, None]
    y = torch.cat([torch.linspace(0, 0.3, 20), torch.linspace(5, 5.3, 30)])[:, None]
    hurried = SamplesLoss(blur=0.05, tol=1e-3, max_iterations=3)
    calls = (
        lambda: hurried(x, y),
        lambda: hurried.transport(x, y),
        lambda: hurried(x.expand(2, -1, -1), y.expand(2, -1, -1)),
        lambda: transport(x, y, eps=0.0025, cost_scale=0.5, tol=1e-3, max_iterations=3),
    )
    for call in calls:
        with pytest.warns(NotConverged, match="residual .* above tol 1.0e-03; raise max_iterations") as told:
            call()
        assert {one.filename for one in told} == {__file__}
    assert transport(x, y, eps=0.0025, cost_scale=0.5, tol=1e-3).converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplesLoss(blur=0.05, tol=1e-3)(x, y).item() == pytest.approx(4.599 / 2, rel=1e-2)
        SamplesLoss(blur=0.05, n_iterations=3)(x, y)


def test_a_default_tolerance_that_float32_cannot_hold_is_told(device):
    """4e-7 |x|^2 / (2 eps), and no more than 1e-2: once for a line of the user's, and not if tol is given."""
    x = torch.cat([torch.full((5, 1), -20.0), torch.full((5, 1), 20.0)]).to(device)
    for blur, tol in ((0.5, "3e-04"), (0.1, "8e-03"), (0.01, "1e-02")):
        with pytest.warns(RuntimeWarning, match=f"tol {tol}, not 1e-04.* set tol=") as told:
            result = SamplesLoss(blur=blur).transport(x, x + 1)
        assert told[0].filename == __file__ and f"{result.tol:.0e}" == tol
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for shift in (1.0, 1.1):  # of one line, figures and all
            SamplesLoss(blur=0.5)(x, x + shift)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        SamplesLoss(blur=0.5, tol=1e-3)(x, x + 1)
        SamplesLoss(blur=0.5, n_iterations=3)(x, x + 1)
        SamplesLoss(blur=2.0)(x, x + 1)
        if device == "cpu":
            SamplesLoss(blur=0.1)(x.double(), x.double() + 1)


def test_results_and_settings_can_be_read(device, capsys):
    a, x, b, y = on(device, *problem())
    loss = SamplesLoss(blur=0.2, verbose=True)
    value = loss(a, x, b, y)
    result = loss.transport(a, x, b, y)
    assert result.value.item() == value.item() and "Sinkhorn divergence" in capsys.readouterr().out
    batch = loss.transport(x.expand(2, -1, -1), y.expand(2, -1, -1))
    assert [item.value.item() for item in batch] == pytest.approx([loss(x, y).item()] * 2, rel=1e-6)
    assert "|x - y|^2 / 2" in repr(loss) and "blur=0.2" in repr(loss)
    assert copy.deepcopy(loss)(a, x, b, y).item() == value.item()
    loss.blur = 0.4
    assert loss(a, x, b, y).item() == SamplesLoss(blur=0.4)(a, x, b, y).item()
    loss.blur = 0.0
    with pytest.raises(ValueError, match="blur"):
        loss(a, x, b, y)


def test_autocast_changes_nothing(device):
    """Forward, backward and double backward."""
    layer = torch.nn.Linear(3, 3, device=device)
    x, y = uniform(30, 3, dtype=torch.float32).to(device), uniform(20, 3, seed=1, dtype=torch.float32).to(device)
    loss = SamplesLoss(blur=0.2)
    found = []
    for enabled in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            value = loss(leaf, y)
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            (second,) = torch.autograd.grad(gradient.square().sum(), leaf)
        assert value.dtype == torch.float32
        found.append((value, gradient, second))
    for plain, under_autocast in zip(*found, strict=True):
        assert torch.equal(plain, under_autocast)
    with torch.autocast(device, dtype=torch.bfloat16):
        mapped = layer(x)
        assert mapped.dtype == torch.bfloat16
        loss(mapped, y).backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.abs().max() > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_code_calls_it(device, use_reentrant):
    x, y = on(device, *problem()[1::2])
    plain, checkpointed = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = SamplesLoss(blur=0.2)
    loss(plain, y).backward()
    torch.utils.checkpoint.checkpoint(loss, checkpointed, y, use_reentrant=use_reentrant).backward()
    assert torch.equal(plain.grad, checkpointed.grad)


def test_inference_mode(device):
    a, x, b, y = on(device, *problem())
    with torch.inference_mode():
        assert SamplesLoss(blur=0.2)(a, x, b, y).item() == SamplesLoss(blur=0.2)(a.clone(), x, b, y).item()


@pytest.mark.slow
def test_compiled_code_calls_it(device):
    loss = SamplesLoss(blur=0.2)
    x, y = (v.float().to(device) for v in problem()[1::2])

    def step(points):
        return 3 * loss(2 * points, 2 * y)

    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    step(eager).backward()
    for call in (torch.compile(step), lambda points: 3 * torch.compile(loss)(2 * points, 2 * y)):
        compiled.grad = None
        call(compiled).backward()
        torch.testing.assert_close(compiled.grad, eager.grad)


def test_g12_parameters_of_a_sampler_are_fitted(device):
    """Gradient descent on mean and scale of a sampler, through a differentiable map; the mean's gradient is known."""
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    y = 0.5 * noise.flip(0) + torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64, device=device)
    mean = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
    std = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
    plain = SamplesLoss(blur=0.3, debias=False, tol=1e-5)
    (gradient,) = torch.autograd.grad(plain(mean + std * noise, y), mean)
    torch.testing.assert_close(gradient, (noise.mean(0) - y.mean(0)).detach(), rtol=1e-4, atol=1e-4)
    optimiser = torch.optim.SGD([mean, std], lr=0.5)
    loss = SamplesLoss(blur=0.3)
    for _ in range(25):
        optimiser.zero_grad()
        loss(mean + std * noise, y).backward()
        optimiser.step()
    torch.testing.assert_close(mean.detach(), y.mean(0) - 0.5 * noise.mean(0), rtol=0, atol=0.02)
    torch.testing.assert_close(std.detach(), torch.full_like(std, 0.5), rtol=0, atol=0.02)

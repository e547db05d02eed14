"""`SamplesLoss` over kept pairs: the values and gradients of all pairs, what it refuses, and which is chosen."""

from __future__ import annotations

import pytest
import torch

from solvers.flash_sinkhorn import SamplesLoss
from solvers.flash_sinkhorn2 import KeptTransport, choice, solve

TOL = 1e-4


def uniform(n, d, seed):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(device, n=300, m=257, d=2):
    a, b = uniform(n, 1, 2)[:, 0] + 0.1, uniform(m, 1, 3)[:, 0] + 0.1
    return [t.to(device) for t in (a / a.sum(), uniform(n, d, 0), b / b.sum(), uniform(m, d, 1) ** 1.5)]


def leaves(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


class TestMultiscale:
    @pytest.mark.parametrize("debias", [True, False])
    def test_values_and_gradients_are_those_over_all_pairs(self, device, debias):
        own, dense = leaves(problem(device)), leaves(problem(device))
        values = [
            SamplesLoss(blur=0.1, debias=debias, tol=TOL, backend=backend)(*inputs)
            for backend, inputs in (("multiscale", own), ("tensorized", dense))
        ]
        assert values[0].dtype == values[1].dtype
        # Each is off by eps (residual^2 + omitted) in each of its problems.
        assert values[0].item() == pytest.approx(values[1].item(), abs=4 * 0.01 * TOL)
        for value in values:
            value.backward()
        for mine, exact in zip(own, dense, strict=True):
            # By the residual, in both: ten times covers displacements above the mean gradient.
            assert (mine.grad - exact.grad).norm() <= 10 * TOL * exact.grad.norm()

    def test_potentials(self, device):
        a, x, b, y = problem(device)
        options = {"blur": 0.1, "potentials": True, "tol": TOL}
        mine = SamplesLoss(backend="multiscale", **options)(a, x, b, y)
        exact = SamplesLoss(backend="online", **options)(a, x, b, y)
        for own, other, weight in zip(mine, exact, (a, b), strict=True):
            assert own.shape == other.shape and not own.requires_grad
            # A residual is the mean change of f / eps at one more update; slow modes need more of them.
            assert (weight * (own - other).abs()).sum() <= 20 * 0.01 * TOL

    def test_a_batch_is_solved_one_after_another(self, device):
        a, x, b, y = problem(device)
        loss = SamplesLoss(blur=0.1, tol=TOL, backend="multiscale")
        batch = [torch.stack([v, v.flip(0)]) for v in (a, x, b, y)]
        values = loss(*batch)
        single = [loss(*(v[k] for v in batch)) for k in range(2)]
        assert values.shape == (2,) and torch.equal(values, torch.stack(single))
        assert loss(batch[1], batch[3]).shape == (2,)

    def test_results_are_told(self, device, capsys):
        a, x, b, y = problem(device)
        loss = SamplesLoss(blur=0.1, tol=TOL, backend="multiscale", verbose=True)
        found = loss.transport(a, x, b, y)
        assert isinstance(found, KeptTransport) and found.converged and found.omitted <= TOL
        assert "linear cost" in capsys.readouterr().out
        assert found.plan.row_omitted().sum() <= TOL

    def test_second_derivatives_are_those_over_all_pairs(self, device):
        products = []
        for backend in ("multiscale", "online"):
            _, x, _, y = leaves(problem(device))
            (gradient,) = torch.autograd.grad(
                SamplesLoss(blur=0.3, tol=TOL, backend=backend)(x, y), x, create_graph=True
            )
            products.append(torch.autograd.grad(gradient[:, 0].square().sum(), x)[0])
        assert (products[0] - products[1]).norm() <= 100 * TOL * products[1].norm()

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("reach", {"reach": 0.5}),
            ("reach", {"reach_x": 0.5}),
            ("n_iterations", {"n_iterations": 10}),
            ("precision", {"precision": "fast"}),
        ],
    )
    def test_what_it_does_not_offer_is_refused_with_the_alternative(self, name, options):
        with pytest.raises(ValueError, match=rf"multiscale.*{name}.*online"):
            SamplesLoss(blur=0.1, backend="multiscale", **options)

    def test_cost_and_exponent_are_geomloss_s_own(self):
        for options in ({"p": 1}, {"cost": "SqDist(X,Y)"}):
            with pytest.raises(ValueError, match=r"geomloss\.SamplesLoss"):
                SamplesLoss(backend="multiscale", **options)

    def test_many_coordinates_are_refused_with_the_alternative(self):
        with pytest.raises(ValueError, match=r"dimension 7.*dense solver"):
            SamplesLoss(backend="multiscale")(torch.rand(9, 7), torch.rand(9, 7))


@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")  # one iteration shows which it is
class TestAuto:
    @pytest.fixture(autouse=True)
    def few_pairs_are_enough(self, monkeypatch):
        monkeypatch.setattr(choice, "LEAST_PAIRS", {"cpu": 1000, "cuda": 1000})

    def chosen(self, *clouds, blur=1e-3, **options):
        options = {"max_iterations": 1, "tol": None if "n_iterations" in options else 1e-2} | options
        result = SamplesLoss(blur=blur, debias=False, **options).transport(*clouds)
        return isinstance(result[0] if isinstance(result, list) else result, KeptTransport)

    def test_a_small_blur_goes_over_kept_pairs_and_a_large_one_over_all(self):
        x, y = uniform(1500, 1, 0), uniform(1400, 1, 1)
        assert self.chosen(x, y)
        assert not self.chosen(x, y, blur=0.3)
        assert not self.chosen(x, y, backend="tensorized") and not self.chosen(x, y, backend="online")

    def test_few_pairs_go_over_all(self, monkeypatch):
        monkeypatch.setattr(choice, "LEAST_PAIRS", {"cpu": 1500 * 1400 + 1})
        assert not self.chosen(uniform(1500, 1, 0), uniform(1400, 1, 1))

    @pytest.mark.parametrize("options", [{"reach": 1.0}, {"n_iterations": 2}, {"precision": "fast"}], ids=str)
    def test_what_kept_pairs_do_not_offer_goes_over_all(self, options):
        assert not self.chosen(uniform(1500, 1, 0), uniform(1400, 1, 1), **options)

    def test_batches_and_many_coordinates_go_over_all(self):
        assert not self.chosen(uniform(1500, 1, 0)[None], uniform(1400, 1, 1)[None])
        assert not self.chosen(uniform(600, 7, 0), uniform(500, 7, 1), blur=0.5)

    def test_weights_of_zero_are_no_obstacle(self):
        a, b = torch.ones(1500), torch.ones(1400)
        a[7] = 0.0
        assert self.chosen(a / 1499, uniform(1500, 1, 0), b / 1400, uniform(1400, 1, 1))

    def test_a_bad_tolerance_is_named(self):
        with pytest.raises(ValueError, match="tol must be a positive"):
            SamplesLoss(tol=-1.0)(uniform(1500, 1, 0), uniform(1400, 1, 1))

    @pytest.mark.parametrize(("d", "eps"), [(1, 1e-5), (2, 1e-3), (3, 3e-3)])
    @pytest.mark.parametrize("tol", [1e-2, 1e-4])
    def test_the_estimate_is_right_to_a_factor_of_three(self, d, eps, tol):
        x, y = uniform(3000, d, 0).float(), (0.3 + 0.5 * uniform(2900, d, 1)).float()
        kept = solve(x, y, eps=eps, tol=tol).kept_pairs
        assert kept < 2000
        assert kept / 3 <= choice.kept_pairs(x, y, eps=eps, cost_scale=1.0, tol=tol) <= 3 * kept

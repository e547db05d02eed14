"""The coarse correction: products over tile pairs, aggregation, and a balance that never lowers its dual value.

References are dense float64 from the definitions.
"""

from __future__ import annotations

import pytest
import torch

from solvers.flash_sinkhorn2.correct import Balance, Coarse, levels, newton, pairs_of
from solvers.flash_sinkhorn2.geometry import Tree


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tree(tiles):
    return Tree(tiles, 1, torch.arange(tiles))


def random_matrix(rows, cols, *, density, seed=0, decades=8.0):
    """Dense with zeros, entries over `decades` decades, every row and column with an entry; and its pairs, its K."""
    shape = rows, cols
    kept = torch.rand(shape, generator=generator(seed)) < density
    i = torch.arange(max(shape))
    kept[i % rows, i % cols] = True
    values = 10.0 ** (-decades * torch.rand(shape, generator=generator(seed + 1), dtype=torch.float64))
    r, c = kept.nonzero(as_tuple=True)
    return torch.where(kept, values, 0.0), pairs_of(r, c, shape), values[r, c]


def masses(n, seed, *, zeros=0):
    m = torch.rand(n, generator=generator(seed), dtype=torch.float64) + 0.05
    m[:zeros] = 0.0
    return m / m.sum()


def dual(dense, A, B, w):
    sums = dense @ w.exp()
    used = A > 0
    return (B @ w - (A[used] * sums[used].log()).sum()).item()


def scaled_rows(dense, A):
    return dense * (A / dense.sum(1))[:, None]


def chain(tiles, reach=3):
    """A random walk's plan on a line of tiles, symmetric but at its ends; and its pairs."""
    near = torch.arange(-reach, reach + 1)
    r = torch.arange(tiles).repeat_interleave(len(near))
    c = r + near.repeat(tiles)
    inside = (c >= 0) & (c < tiles)
    r, c = r[inside], c[inside]
    values = torch.exp(-((r - c).double() ** 2) / 2)
    A = torch.full((tiles,), 1 / tiles, dtype=torch.float64)
    return pairs_of(r, c, (tiles, tiles)), values * (A / torch.zeros(tiles).double().index_add_(0, r, values))[r], A


class TestPairs:
    def test_products_and_transposes_are_the_dense_ones(self):
        dense, pairs, values = random_matrix(37, 23, density=0.2)
        left, right = torch.rand(37).double(), torch.rand(23).double()
        torch.testing.assert_close(pairs.matrix(values) @ right, dense @ right)
        torch.testing.assert_close(pairs.transposed(values) @ left, dense.T @ left)
        mirrored = pairs.mirrored
        torch.testing.assert_close(mirrored.matrix(values[pairs.to_columns]).to_dense(), dense.T)
        torch.testing.assert_close(mirrored.transposed(values[pairs.to_columns]).to_dense(), dense)
        assert torch.equal(pairs.row_of_entries.long(), dense.nonzero()[:, 0])

    def test_sums_of_points_and_tile_pairs(self):
        dense, pairs, values = random_matrix(11, 7, density=0.4)
        T = 4
        partial = torch.rand(len(values), T, generator=generator(3), dtype=torch.float64)
        factor, multipliers = torch.rand(11 * T).double(), torch.rand(7).double()
        of_points = torch.zeros(11, T, 7, dtype=torch.float64)
        r, c = dense.nonzero(as_tuple=True)
        of_points[r, :, c] = partial
        coarse = Coarse(pairs, tree(11), tree(7))
        S = torch.zeros(11, 7, dtype=torch.float64)
        S[r, c] = coarse.tile_matrix(partial, factor)
        torch.testing.assert_close(S, (of_points * factor.view(11, T, 1)).sum(1))
        torch.testing.assert_close(coarse.corrected_sums(partial, multipliers), (of_points @ multipliers).flatten())


class TestLevels:
    @pytest.mark.parametrize(("rows", "cols"), [(300, 300), (517, 130), (90, 1100), (40, 3)])
    def test_each_level_holds_the_sums_over_nodes_of_the_one_before(self, rows, cols):
        dense, pairs, values = random_matrix(rows, cols, density=0.03)
        level = levels(pairs, tree(rows), tree(cols))
        while level.coarsening is not None:
            coarsening = level.coarsening
            size = coarsening.level.pairs.shape
            half = torch.zeros(size[0], dense.shape[1], dtype=torch.float64).index_add_(
                0, coarsening.row_parents, dense
            )
            dense = torch.zeros(size, dtype=torch.float64).index_add_(1, coarsening.col_parents, half)
            values = coarsening.sums(values)
            torch.testing.assert_close(coarsening.level.pairs.matrix(values).to_dense(), dense)
            assert coarsening.row_parents.diff().min() >= 0 and coarsening.row_parents.diff().max() <= 1
            level = coarsening.level
        assert max(dense.shape) < 128

    def test_levels_together_are_a_small_multiple_of_the_first(self):
        """Per node two in number, and per row no more entries: K, K / 2, ... and the 64 x 64 entries of the last."""
        pairs, _, _ = chain(4096)
        level, entries = levels(pairs, tree(4096), tree(4096)), []
        while level is not None:
            entries.append(len(level.pairs.cols))
            level = level.coarsening and level.coarsening.level
        assert sum(entries) <= 2 * entries[0] + 64**2


class TestNewton:
    @pytest.mark.parametrize("seed", range(4))
    def test_balances_a_small_matrix(self, seed):
        dense, _, _ = random_matrix(20, 30, density=0.6, seed=seed, decades=3)
        A, B = masses(20, seed), masses(30, seed + 9)
        S = scaled_rows(dense, A)
        w = newton(S, A, B, steps=20, stop=0.0)
        columns = w.exp() * (S.T @ (A / (S @ w.exp())))
        assert (columns - B).abs().sum() < 1e-10  # quadratic at the end; the limit is float64's
        assert dual(S, A, B, w) >= 0

    def test_a_matrix_that_cannot_be_balanced_leaves_finite_multipliers(self):
        S = torch.block_diag(torch.rand(4, 4).double(), torch.rand(5, 3).double())
        A, B = masses(9, 0), masses(7, 1)
        S = scaled_rows(S, A)
        w = newton(S, A, B)
        assert w.isfinite().all() and w.abs().max() <= 30
        assert dual(S, A, B, w) >= 0


class TestBalance:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("sweeps", [0, 1, 4])
    @pytest.mark.parametrize(("rows", "cols"), [(301, 260), (150, 700)])
    def test_never_lowers_the_dual_value(self, seed, sweeps, rows, cols):
        dense, pairs, _ = random_matrix(rows, cols, density=0.02, seed=seed, decades=2.0 + 4 * seed)
        A, B = masses(rows, seed, zeros=5 * (seed % 2)), masses(cols, seed + 9, zeros=3 * (seed % 2))
        S = scaled_rows(dense, A)
        w = Balance(levels(pairs, tree(rows), tree(cols)), A, B, sweeps=sweeps)(S[dense > 0])
        assert dual(S, A, B, w) >= dual(S, A, B, torch.zeros_like(w)) - 1e-13  # float64 sums of numbers under 100
        assert abs(B @ w) < 1e-12 and w.abs().max() <= 30.0 + 1e-12

    @pytest.mark.parametrize("tiles", [256, 1024, 4096])
    def test_long_waves_are_balanced_whatever_the_length(self, tiles):
        """Mass is to move by half a tile or so across the whole line, for which alternating sweeps take tiles^2."""
        pairs, S, A = chain(tiles)
        r, c = pairs.row_of_entries.long(), pairs.cols.long()

        def scaled(w):
            values = S * w.exp()[c]
            return values * (A / torch.zeros_like(A).index_add_(0, r, values))[r]

        def columns(w):
            return torch.zeros_like(A).index_add_(0, c, scaled(w))

        def gained(w):
            sums = torch.zeros_like(A).index_add_(0, r, S * w.exp()[c])
            return (B @ w - A @ (sums / A).log()).item()

        middle = (torch.arange(tiles).double() + 0.5) / tiles
        exact = tiles / (4 * torch.pi) * torch.cos(2 * torch.pi * middle)  # a slope of half a unit a tile
        B = columns(exact)
        swept = torch.zeros_like(A)
        for _ in range(50):
            swept = swept + (B / columns(swept)).log()
        level, w = levels(pairs, tree(tiles), tree(tiles)), torch.zeros_like(A)
        for _ in range(10):
            w = w + Balance(level, A, B)(scaled(w))
        left, left_by_sweeps = (1 - gained(z) / gained(exact) for z in (w, swept))
        assert left < 0.05 and left_by_sweeps > 0.9  # of the dual value there is to gain; as many updates in both

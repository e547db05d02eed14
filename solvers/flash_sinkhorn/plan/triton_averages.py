"""Means over the plan on a GPU: memory layout of values and launches of the kernels that carry them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..inputs.checks import Inputs
from ..sweeps.launching import launch
from ..sweeps.sweep_kernels import ULPS
from ..sweeps.tiles import Precision, column_splits
from ..sweeps.triton_sweeps import StoredCloud, TritonSweeps, _multiprocessors, _shared_bytes
from .average_kernels import combine_kernel, mean_kernel, store_values_kernel
from .average_tiles import LARGEST_PARTIAL_COLUMNS, ValueTile, moment_tile, value_tile
from .averages import Averages, Motion
from .moment_kernel import moment_kernel


@dataclass(frozen=True)
class StoredValues:
    """hi, lo: operands [n_padded, k_stored] in fp16 (lo is hi where not split), or float32 [k_stored, n_padded].

    column_scale: float32 [k_stored], what to multiply stored columns by.
    """

    hi: torch.Tensor
    lo: torch.Tensor
    split: bool
    strides: tuple[int, int]  # from point to point, from column to column
    column_scale: torch.Tensor


class TritonAverages(Averages[StoredCloud]):
    """On one GPU, in the given precision; with "fast" values and plan too are rounded to 10-bit mantissas.

    Where sweeps round nothing, means do not either.
    """

    sweeps: TritonSweeps

    def __init__(self, inputs: Inputs, *, cost_scale: float, precision: Precision):
        self.d = inputs.x.shape[1]
        self.precision = Precision.EXACT if precision.packs(self.d) else precision
        sweeps = TritonSweeps(inputs, cost_scale=cost_scale, precision=self.precision)
        super().__init__(inputs, sweeps, cost_scale=cost_scale)
        self._points: dict[int, StoredValues] = {}

    def set_potentials(self, f: torch.Tensor, g: torch.Tensor, eps: float) -> None:
        super().set_potentials(f, g, eps)
        biases = (self.sweeps.bias(cloud).float() for cloud in (self.sweeps.x, self.sweeps.y))
        self.rounding = sum(torch.linalg.vector_norm(bias, math.inf) for bias in biases) * ULPS.value

    def _sweep_sums(self, rows: StoredCloud, cols: StoredCloud) -> torch.Tensor:
        partial = self.sweeps.sweep(rows, cols)[:, : rows.n].double()
        return torch.logsumexp(partial * math.log(2), 0) / math.log(2)

    def _settle(self, rows: StoredCloud, log2_sums: torch.Tensor) -> StoredCloud:
        bias = rows.row_bias.double()
        bias[: rows.n] -= log2_sums
        return replace(rows, row_bias=bias.float())

    def _biases(self, rows: StoredCloud, cols: StoredCloud) -> tuple[torch.Tensor, torch.Tensor]:
        """In exponents, both parts in one: float32's precision is enough here."""
        parts = (rows.row_bias, rows.coarse_bias), (cols.col_bias, cols.coarse_bias)
        of_rows, of_cols = (torch.add(rest, coarse, alpha=self.sweeps.scale) for rest, coarse in parts)
        return of_rows, of_cols

    def _means(
        self, rows: StoredCloud, cols: StoredCloud, values: torch.Tensor | None, *, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.d if values is None else values.shape[1]
        tile = value_tile(self.precision, self.d, k, _shared_bytes(rows.hi.device))
        if values is None:
            stored = self._stored_points(cols, tile)
        else:
            stored = self._store(values, cols.n_padded, tile.stored_columns(k), as_dot=tile.dot, scaled=tile.dot)
        k_stored = stored.column_scale.shape[0]
        splits, tiles_per_split = self._splits(rows, cols, tile, k_stored)
        singles = torch.empty(2, splits, rows.n_padded, dtype=torch.float32, device=rows.hi.device)
        moments = torch.empty(splits, rows.n_padded, k_stored, dtype=torch.float32, device=rows.hi.device)
        launch(
            mean_kernel, (rows.n_padded // tile.pairs.rows, splits, -(-k_stored // tile.columns)),
            (rows.hi, rows.lo, cols.hi, cols.lo, *rows.strides, *cols.strides, *self._biases(rows, cols),
             self.rounding, int(settled), stored.hi, stored.lo, *stored.strides, singles[0], singles[1], moments,
             rows.n_padded, k_stored, cols.n_padded // tile.pairs.cols, tiles_per_split, self.sweeps.scale),
            {**self._options(rows, cols, tile), "K": k_stored, "BK": tile.columns, "VALUES_SPLIT": stored.split,
             "DOT": tile.dot, "OWN": stored.hi is cols.hi and tile.holds_points(k_stored),
             "num_warps": tile.pairs.warps, "num_stages": tile.pairs.stages},
        )  # fmt: skip
        means = torch.empty(rows.n, k, dtype=torch.float32, device=rows.hi.device)
        log2_sums = torch.empty(rows.n, dtype=torch.float64, device=rows.hi.device)
        block, width = 64, min(_power_of_two(k), 64)
        launch(
            combine_kernel, (-(-rows.n // block), -(-k // width), 1),
            (singles[0], singles[1], moments, rows.n_padded, k_stored, splits, stored.column_scale, means, log2_sums,
             rows.n, k),
            {"BM": block, "BK": width},
        )  # fmt: skip
        return means, log2_sums

    def _moments(
        self,
        rows: StoredCloud,
        cols: StoredCloud,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        motion: Motion,
        *,
        with_points: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tile = moment_tile(self.d, _shared_bytes(rows.hi.device))
        stored = self._stored_points(cols, tile)
        k_stored = stored.column_scale.shape[0]
        alpha, beta, factor, bound, v, w = self._stored_motion(rows, cols, alpha, beta, motion)
        v, w = v or stored, w or stored
        splits, tiles_per_split = self._splits(rows, cols, tile, k_stored)
        singles = torch.empty(2, splits, rows.n_padded, dtype=torch.float32, device=rows.hi.device)
        moments = torch.empty(
            splits if with_points else 0, rows.n_padded, k_stored, dtype=torch.float32, device=rows.hi.device
        )
        launch(
            moment_kernel,
            (rows.n_padded // tile.pairs.rows, splits, -(-k_stored // tile.columns) if with_points else 1),
            (rows.hi, rows.lo, cols.hi, cols.lo, *rows.strides, *cols.strides, *self._biases(rows, cols),
             alpha, beta, factor, v.hi, v.lo, w.hi, w.lo, stored.hi, stored.lo, *stored.strides, singles[0],
             singles[1], moments, rows.n_padded, k_stored, cols.n_padded // tile.pairs.cols, tiles_per_split,
             self.sweeps.scale),
            {**self._options(rows, cols, tile), "K": k_stored, "BK": tile.columns, "VALUES_SPLIT": stored.split,
             "DOT": tile.dot, "ROWS_MOVE": motion.v is not None, "COLS_MOVE": motion.w is not None,
             "WITH_POINTS": with_points, "num_warps": tile.pairs.warps, "num_stages": tile.pairs.stages},
        )  # fmt: skip
        totals, firsts = singles.sum(1)[:, : rows.n]
        means = firsts / totals * bound
        if not with_points:
            return means, moments
        moments = moments.sum(0)[: rows.n, : self.d] / totals[:, None]
        return means, moments * (bound * stored.column_scale[: self.d])

    def _options(self, rows: StoredCloud, cols: StoredCloud, tile: ValueTile) -> dict[str, object]:
        pairs = tile.pairs
        return {
            "D": self.sweeps.options["D"],
            "BM": pairs.rows,
            "BN": pairs.cols,
            "BD": pairs.coordinates,
            "DIRECT": self.sweeps.direct,
            "ROWS_SPLIT": rows.split,
            "COLS_SPLIT": cols.split,
            "STAGES": pairs.stages,
        }

    def _splits(self, rows: StoredCloud, cols: StoredCloud, tile: ValueTile, k_stored: int) -> tuple[int, int]:
        """Into how many programs to split each row block's columns, and the tiles of each.

        Partial moments of every split are stored, so only few columns of values, or few rows, are split.
        """
        n_tiles = cols.n_padded // tile.pairs.cols
        programs = rows.n_padded // tile.pairs.rows * -(-k_stored // tile.columns)
        slots = _multiprocessors(rows.hi.device) * tile.pairs.resident
        largest = max(LARGEST_PARTIAL_COLUMNS // k_stored, slots // programs, 1)
        tiles_per_split = -(-n_tiles // min(column_splits(programs, n_tiles, slots), largest))
        return -(-n_tiles // tiles_per_split), tiles_per_split

    def _stored_points(self, cloud: StoredCloud, tile: ValueTile) -> StoredValues:
        """The points of a cloud about `centre`, as values: what the scores are made of, but for direct differences."""
        side = id(cloud.hi)
        if side not in self._points:
            device = cloud.hi.device
            if self.sweeps.direct:
                points = self.inputs.x if cloud.hi is self.sweeps.x.hi else self.inputs.y
                self._points[side] = self._store(
                    points.double() - self.centre,
                    cloud.n_padded,
                    tile.stored_columns(self.d),
                    as_dot=False,
                    scaled=False,
                )
            else:
                scale = torch.full((cloud.hi.shape[1],), self.sweeps.unit, dtype=torch.float32, device=device)
                self._points[side] = StoredValues(cloud.hi, cloud.lo, cloud.split, cloud.strides, scale)
        return self._points[side]

    def _store(
        self,
        values: torch.Tensor,
        n_padded: int,
        k_stored: int,
        *,
        as_dot: bool,
        scaled: bool,
        largest: torch.Tensor | None = None,
    ) -> StoredValues:
        """values [n, k] as operands: fp16 pairs for tensor cores, float32 otherwise."""
        n, k = values.shape
        shape = (n_padded, k_stored) if as_dot else (k_stored, n_padded)
        hi = torch.empty(shape, dtype=torch.float16 if as_dot else torch.float32, device=values.device)
        split = as_dot and self.precision is not Precision.FAST
        column_scale = torch.ones(k_stored, dtype=torch.float32, device=values.device)
        if largest is None:
            largest = values.abs().amax(0) if scaled else column_scale
        strides = (k_stored, 1) if as_dot else (1, n_padded)
        stored = StoredValues(hi, torch.empty_like(hi) if split else hi, split, strides, column_scale)
        block, width = 64, min(_power_of_two(k_stored), 64)
        launch(
            store_values_kernel, (n_padded // block, -(-k_stored // width), 1),
            (values, *values.stride(), largest, stored.hi, stored.lo, column_scale, n, k, k_stored, *strides),
            {"BM": block, "BK": width, "SPLIT": split, "SCALED": scaled},
        )  # fmt: skip
        return stored

    def _stored_motion(
        self, rows: StoredCloud, cols: StoredCloud, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, StoredValues | None, StoredValues | None]:
        """alpha, beta and factor of `moment_kernel` over a bound of |q|, that bound, and v and w as stored."""
        factor = 2.0 * self.cost_scale
        bound = torch.ones(1, dtype=torch.float32, device=rows.hi.device)
        moves = [(motion.v, rows, cols), (motion.w, cols, rows)]
        largest = None
        if not self.sweeps.direct:
            biases = [alpha, beta]
            reach = torch.zeros_like(bound)
            for side, (direction, own, opposite) in enumerate(moves):
                if direction is not None:
                    points, others = self._centred(own), self._centred(opposite)
                    biases[side] = biases[side] - factor * (points * direction).sum(1)
                    reach = reach + direction.norm(dim=1).amax() * others.norm(dim=1).amax()
            alpha, beta = biases
            bound = (alpha.abs().amax() + beta.abs().amax() + factor * reach).float()
            bound = torch.where(bound > 0, bound, 1.0)
            motions = [direction.abs().amax() for direction, _, _ in moves if direction is not None]
            largest = torch.stack(motions).amax().repeat(self.d) if motions else None
        stored = [
            None
            if direction is None
            else self._store(
                direction, own.n_padded, self.sweeps.options["D"], as_dot=not self.sweeps.direct,
                scaled=not self.sweeps.direct, largest=largest,
            )
            for direction, own, _ in moves
        ]  # fmt: skip
        scale = next((values.column_scale[:1] for values in stored if values is not None), torch.ones_like(bound))
        alpha, beta = _padded(alpha / bound, rows.n_padded), _padded(beta / bound, cols.n_padded)
        return alpha, beta, factor * self.sweeps.unit * scale / bound, bound, stored[0], stored[1]

    def _centred(self, cloud: StoredCloud) -> torch.Tensor:
        """[n, d] about the centre of the stored points."""
        points = self.inputs.x if cloud.hi is self.sweeps.x.hi else self.inputs.y
        return points - self.inputs.centre.to(points.dtype)


def _padded(values: torch.Tensor, n_padded: int) -> torch.Tensor:
    return torch.nn.functional.pad(values.float(), (0, n_padded - values.shape[0]))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()

"""Sweeps on a GPU: memory layout of a cloud and launches of the kernels in cloud_kernels.py and
sweep_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton

from ..inputs.checks import Inputs
from .cloud_kernels import RESIDUAL, prepare_kernel, rescale_kernel
from .launching import Launch, launch
from .sweep_kernels import settle_kernel, sweep_kernel
from .sweeps import Cloud, Sweeps
from .tiles import (
    HOPPER_SHARED_BYTES,
    LARGEST_DIRECT_DIMENSION,
    LOG2_E,
    Precision,
    Tile,
    column_splits,
    fitted_tile,
    padded_dimension,
    pair_unit,
)

PADDING = 256  # points; a multiple of every tile's rows and cols
ROWS = 256  # of one program of `rescale_kernel`


@dataclass(eq=False)
class StoredCloud(Cloud):
    """hi, lo: operands [n_padded, d_stored], or [d, n_padded] for direct differences (lo is hi where not split). Packed
    points take one product: hi is the operand of a row, lo that of a column.

    weight, log2_weight, half_square, potential, used: float64 [n_padded]; half_square is that of the stored operands,
    so that a rounded problem is solved consistently. Biases: float32 [n_padded]; coarse_bias, in units of the scores,
    as rows and as columns, and what remains in exponents, row_bias and col_bias (cloud_kernels.py).
    statistics: float64 [3], what settling leaves behind; block_statistics [3, blocks].
    Padding repeats the last point with weight zero. Of a batch all have B as their first axis.
    """

    hi: torch.Tensor
    lo: torch.Tensor
    split: bool  # whether points are hi + lo, of which each takes a product
    coarse_bias: torch.Tensor
    row_bias: torch.Tensor
    col_bias: torch.Tensor
    log2_weight: torch.Tensor
    statistics: torch.Tensor
    block_statistics: torch.Tensor
    partial: torch.Tensor
    strides: tuple[int, int]  # of hi and lo: from point to point, from coordinate to coordinate

    @property
    def n_padded(self) -> int:
        return self.weight.shape[-1]


class TritonSweeps(Sweeps[StoredCloud]):
    """One problem on one GPU, or a batch of them, x [B, n, d] and so on, in the given precision; C = cost_scale
    |x - y|^2."""

    def __init__(self, inputs: Inputs, *, cost_scale: float, precision: Precision, tile: Tile | None = None):
        n, d = inputs.x.shape[-2:]
        self.batch: tuple[int, ...] = tuple(inputs.x.shape[:-2])
        self.cost_scale = cost_scale
        self.packed = precision.packs(d)
        self.direct = d <= LARGEST_DIRECT_DIMENSION and not self.packed
        self.rounded = not self.packed and not self.direct and precision is not Precision.EXACT
        self.improvable = self.rounded or (self.packed and d <= LARGEST_DIRECT_DIMENSION)
        n_padded, m_padded = _round_up(n), _round_up(inputs.y.shape[-2])
        multiprocessors = max(1, _multiprocessors(inputs.x.device) // self.problems)  # each one's share
        self.tile = tile or fitted_tile(
            precision, d, n_padded, m_padded, multiprocessors, _shared_bytes(inputs.x.device)
        )
        pairs = not self.direct and not self.packed
        x_split, y_split = pairs and precision.splits_x, pairs and precision.splits_y
        self.whole = x_split and y_split
        self.unit = 1.0 if self.direct else inputs.unit * pair_unit(d) if self.whole else inputs.unit
        self.scale, self.exponent_dtype = 0.0, torch.float32
        self._launches: dict[tuple[object, ...], Launch] = {}  # of these two clouds
        self.options = {
            "D": padded_dimension(d, packed=self.packed),
            "BM": self.tile.rows,
            "BN": self.tile.cols,
            "BD": self.tile.coordinates,
            "DIRECT": self.direct,
        }
        slots = multiprocessors * self.tile.resident
        blocks = max(n_padded, m_padded) // self.tile.rows
        self.arrivals = torch.zeros(self.problems * (blocks + 1), dtype=torch.int32, device=inputs.x.device)
        centre = inputs.direct_centre if self.direct else inputs.centre
        self.x = self._store(inputs.x, inputs.a, centre, x_split, self._splits(n_padded, m_padded, slots))
        self.y = self._store(inputs.y, inputs.b, centre, y_split, self._splits(m_padded, n_padded, slots))

    @property
    def problems(self) -> int:
        """How many."""
        return math.prod(self.batch)

    def _splits(self, n_padded: int, m_padded: int, slots: int) -> int:
        return column_splits(n_padded // self.tile.rows, m_padded // self.tile.cols, slots)

    def _store(
        self, points: torch.Tensor, weight: torch.Tensor, centre: torch.Tensor, split: bool, splits: int
    ) -> StoredCloud:
        n, d = points.shape[-2:]
        n_padded, d_stored, device, batch = _round_up(n), self.options["D"], points.device, self.batch
        shape = (d_stored, n_padded) if self.direct else (n_padded, d_stored)
        hi = torch.empty(*batch, *shape, dtype=torch.float32 if self.direct else torch.float16, device=device)
        doubles = torch.empty(5, *batch, n_padded, dtype=torch.float64, device=device)
        singles = torch.empty(3, *batch, n_padded, dtype=torch.float32, device=device)
        statistics = torch.empty(*batch, 3, dtype=torch.float64, device=device)
        cloud = StoredCloud(
            n=n,
            potential=doubles[0],
            half_square=doubles[1],
            weight=doubles[2],
            log2_weight=doubles[3],
            used=doubles[4],
            coarse_bias=singles[0],
            row_bias=singles[1],
            col_bias=singles[2],
            hi=hi,
            lo=torch.empty_like(hi) if split or self.packed else hi,
            split=split,
            statistics=statistics,
            residual=statistics[..., RESIDUAL.value :],
            block_statistics=torch.empty(*batch, 3, n_padded // self.tile.rows, dtype=torch.float64, device=device),
            partial=torch.empty(*batch, splits, n_padded, dtype=torch.float32, device=device),
            strides=(1, n_padded) if self.direct else (d_stored, 1),
        )
        rows, width = 32, min(64, 1 << (d_stored - 1).bit_length())
        launch(
            prepare_kernel, (n_padded // rows, 1, self.problems),
            (points, *points.stride()[-2:], centre, weight, cloud.hi, cloud.lo, cloud.potential,
             cloud.half_square, cloud.weight, cloud.log2_weight, n, *cloud.strides, 1.0 / self.unit),
            {"D": d, "D_STORED": d_stored, "BM": rows, "BD": width, "SPLIT": cloud.lo is not hi,
             "WHOLE": self.whole, "DIRECT": self.direct, "PACKED": self.packed, "BATCHED": bool(self.batch)},
        )  # fmt: skip
        return cloud

    def set_epsilon(self, eps: float, ratio: float) -> None:
        s = self.cost_scale * LOG2_E / eps
        self.scale = -s if self.direct else 2.0 * s * self.unit**2
        for cloud in (self.x, self.y):
            self._derive_biases(cloud, ratio)

    @property
    def scales(self) -> tuple[float, float, float]:
        """What kernels take: the scale in float32, the rest of it, and the step of coarse biases, a power of two such
        that what they leave of a bias is half at most, zero where there are none."""
        rounded = float(np.float32(self.scale))
        step = 2.0 ** -math.ceil(math.log2(abs(self.scale))) if self.whole else 0.0
        return rounded, self.scale - rounded, step

    def take_potential(self, cloud: StoredCloud, potential: torch.Tensor) -> None:
        change = (potential - cloud.potential).abs().amax()  # without weight as well: their sums are kept in range too
        bounds = cloud.statistics[:2] + change
        cloud.potential.copy_(potential)
        self._derive_biases(cloud, 1.0)
        cloud.statistics[:2].copy_(bounds)

    def _derive_biases(self, cloud: StoredCloud, ratio: float) -> None:
        self._launch(("rescale", cloud), lambda: self._bind_rescale(cloud), ratio, *self.scales)

    def sweep(self, rows: StoredCloud, cols: StoredCloud) -> torch.Tensor:
        self._launch_sweep(rows, cols, settle=False)
        return rows.partial

    def settle(self, rows: StoredCloud, partial: torch.Tensor, *, relaxation: float, damping: float) -> None:
        key = "settle", rows, id(partial)
        self._launch(key, lambda: self._bind_settle(rows, partial), *self.scales, relaxation, 1.0 - damping)

    def half_step(self, rows: StoredCloud, cols: StoredCloud) -> None:
        self._launch_sweep(rows, cols, settle=True)

    def _launch_sweep(self, rows: StoredCloud, cols: StoredCloud, *, settle: bool) -> None:
        key = "sweep", rows, cols, settle
        self._launch(key, lambda: self._bind_sweep(rows, cols, settle), *self.scales, 1.0, 1.0 - rows.damping)

    def _launch(self, key: tuple[object, ...], bind: Callable[[], Launch], *changing: float) -> None:
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = bind()
        launch(*changing)

    def _bind_rescale(self, cloud: StoredCloud) -> Launch:
        return Launch(
            rescale_kernel, (cloud.n_padded // ROWS, 1, self.problems),
            (cloud.potential, cloud.half_square, cloud.log2_weight, cloud.coarse_bias, cloud.row_bias, cloud.col_bias,
             cloud.statistics),
            {"ROWS": ROWS, "BATCHED": bool(self.batch)},
        )  # fmt: skip

    def _bind_sweep(self, rows: StoredCloud, cols: StoredCloud, settle: bool) -> Launch:
        n_tiles = cols.n_padded // self.tile.cols
        splits = rows.partial.shape[-2]
        return Launch(
            sweep_kernel, (rows.n_padded // self.tile.rows, splits, self.problems),
            (rows.hi, rows.lo, cols.hi if cols.split else cols.lo, cols.lo, *rows.strides, *cols.strides,
             rows.coarse_bias, rows.row_bias, cols.coarse_bias, cols.col_bias, rows.statistics, cols.statistics,
             rows.partial, rows.n_padded, n_tiles, -(-n_tiles // splits), rows.potential, rows.half_square, rows.weight,
             rows.log2_weight, rows.col_bias, rows.used, rows.block_statistics, self.arrivals),
            {**self.options, "ROWS_SPLIT": rows.split, "COLS_SPLIT": cols.split, "STAGES": self.tile.stages,
             "SETTLE": settle, "BATCHED": bool(self.batch), "num_stages": self.tile.stages,
             "num_warps": self.tile.warps, "maxnreg": self.tile.registers},
        )  # fmt: skip

    def _bind_settle(self, rows: StoredCloud, partial: torch.Tensor) -> Launch:
        return Launch(
            settle_kernel, (rows.n_padded // self.tile.rows, 1, self.problems),
            (partial, rows.n_padded, partial.shape[-2], rows.potential, rows.half_square, rows.weight,
             rows.log2_weight, rows.coarse_bias, rows.row_bias, rows.col_bias, rows.used, rows.statistics,
             rows.block_statistics, self.arrivals),
            {"BM": self.tile.rows, "BATCHED": bool(self.batch)},
        )  # fmt: skip


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _round_up(n: int) -> int:
    return -(-n // PADDING) * PADDING

"""Sweeps on a GPU: launches of the kernels in kernels.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from .cloud import Geometry, SweptCloud, make_clouds
from .kernels import settle_kernel, sweep_kernel
from .sweeps import Sweeps
from .tiles import Precision, Tile, column_splits, settle_tile, sweep_tile


class TritonSweeps(Sweeps):
    """x [n, d], y [m, d] on one GPU, weights a [n], b [m] in float64, C = cost_scale |x - y|^2."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        cost_scale: float,
        precision: Precision,
        tile: Tile | None = None,
    ):
        self.cost_scale = cost_scale
        self.tile = tile or sweep_tile(precision, x.shape[1])
        self.x, self.y, self.geometry = make_clouds(x, y, a, b, precision)
        self.rounded = not (self.geometry.direct or self.geometry.split)
        self.slots = _multiprocessors(x.device) * self.tile.resident
        self.scale = self.geometry.score_scale(1.0, cost_scale)

    def set_epsilon(self, eps: float, f: torch.Tensor, g: torch.Tensor) -> None:
        self.scale = self.geometry.score_scale(eps, self.cost_scale)
        for cloud, potential in ((self.x, f), (self.y, g)):
            padded = torch.zeros_like(cloud.potential)
            padded[: cloud.n] = potential
            cloud.set_potential(padded, self.scale)

    def sweep(self, rows: SweptCloud, cols: SweptCloud, *, safe: bool) -> torch.Tensor:
        tile = self.tile
        n_padded, m_padded = rows.weight.shape[0], cols.weight.shape[0]
        n_blocks, n_tiles = n_padded // tile.rows, m_padded // tile.cols
        tiles_per_split = triton.cdiv(n_tiles, column_splits(n_blocks, n_tiles, self.slots))
        splits = triton.cdiv(n_tiles, tiles_per_split)
        partial = torch.empty(splits, n_padded, dtype=torch.float32, device=rows.hi.device)
        with _on(rows.hi.device):
            sweep_kernel[(n_blocks, splits)](
                *self._operands(rows, cols), rows.row_bias, cols.col_bias, self.scale,
                partial, n_padded, n_tiles, tiles_per_split, SAFE=safe, **self._options(tile),
            )  # fmt: skip
        return partial

    def settle(self, rows: SweptCloud, cols: SweptCloud, partial: torch.Tensor, *, relaxation: float) -> None:
        tile = settle_tile(self.tile)
        n_padded, m_padded = rows.weight.shape[0], cols.weight.shape[0]
        with _on(rows.hi.device):
            settle_kernel[(n_padded // tile.rows,)](
                *self._operands(rows, cols), rows.row_bias, cols.col_bias, self.scale,
                partial, n_padded, partial.shape[0], m_padded // tile.cols,
                rows.potential, rows.half_square, rows.weight, rows.log2_weight, rows.log2_sum, rows.next_col_bias,
                rows.block_residual, relaxation, **self._options(tile),
            )  # fmt: skip

    def _operands(self, rows: SweptCloud, cols: SweptCloud) -> tuple[Any, ...]:
        return (rows.hi, rows.lo, cols.hi, cols.lo, *_strides(rows.hi, self.geometry), *_strides(cols.hi, self.geometry))

    def _options(self, tile: Tile) -> dict[str, Any]:
        return {
            "D": self.x.hi.shape[0 if self.geometry.direct else 1],
            "BM": tile.rows,
            "BN": tile.cols,
            "BD": tile.coordinates,
            "DIRECT": self.geometry.direct,
            "SPLIT": self.geometry.split,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def _strides(operand: torch.Tensor, geometry: Geometry) -> tuple[int, int]:
    """(from point to point, from coordinate to coordinate)."""
    first, second = operand.stride()
    return (second, first) if geometry.direct else (first, second)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make that the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

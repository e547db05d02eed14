"""A pass on the GPU: frames of both clouds, sums over the kept tile pairs, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..geometry import TiledCloud
from .frame_kernel import frame_kernel
from .items import items_of
from .kernels import combine_kernel, sweep_kernel

SMALLEST_TILE, LARGEST_TILE = 8, 64
LARGEST_VALUES = 4  # columns of values a launch
REGISTERS = {1: 80, 2: 96, 3: 96, 4: 128}  # a thread may have, by dimension


@dataclass(eq=False)
class Side:
    """A cloud as kernels read it: packed float32 [d + 1, N], potential float64 [N], frame float64 [2 d + 2, tiles]."""

    packed: Tensor
    potential: Tensor
    frame: Tensor


def sweep_triton(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float,
    *, robust: bool, partial: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """log2_sums, partial and anchor as in `Pass`."""
    run = _Sweep(rows, cols, starts, lists, v, k)
    anchor = run.anchor(u) if robust else _no_anchor(rows)
    side = frame(rows, u - anchor if robust else u, run.k)
    stored = torch.empty(lists.shape[0], rows.tree.tile, dtype=torch.float32, device=u.device) if partial else None
    return run(side, anchor=anchor, partial=stored), stored, anchor


def apply_triton(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float, values: Tensor,
    *, robust: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_j 2^(t_ij - anchor_i) values_j [N, r], and anchor."""
    run = _Sweep(rows, cols, starts, lists, v, k)
    anchor = run.anchor(u) if robust else _no_anchor(rows)
    side = frame(rows, u - anchor if robust else u, run.k)
    columns = values.T.float().contiguous()
    groups = [run(side, values=group) for group in columns.split(LARGEST_VALUES)]
    return torch.cat(groups).T, anchor


def frame(cloud: TiledCloud, potential: Tensor, k: Tensor, offset: Tensor | None = None) -> Side:
    """The frames of a cloud's tiles at a potential; offset [N] float64 is added to its points' rests and potential."""
    tiles, d = cloud.centre.shape
    n, tile = potential.shape[0], cloud.tree.tile
    if not SMALLEST_TILE <= tile <= LARGEST_TILE:
        raise ValueError(f"tiles have {tile} points: on a GPU choose {SMALLEST_TILE} to {LARGEST_TILE}")
    potential = potential.contiguous()
    packed = torch.empty(d + 1, n, device=potential.device, dtype=torch.float32)
    shifted = potential if offset is None else torch.empty_like(potential)
    frames = torch.empty(2 * d + 2, tiles, device=potential.device, dtype=torch.float64)
    at_once = 256 // tile
    arguments = (
        cloud.local, *cloud.local.stride(), cloud.lost.contiguous(), cloud.centre.contiguous(), d, potential,
        cloud.log2_weight, potential if offset is None else offset, packed, shifted, frames, k, n, tiles,
    )  # fmt: skip
    options = {"D": d, "T": tile, "TILES": at_once, "SHIFT": offset is not None}
    launch(frame_kernel, (-(-tiles // at_once), 1, 1), arguments, options)
    return Side(packed, shifted, frames)


def launch_options(d: int, tile: int, *, values: int, far: bool) -> dict[str, int]:
    """A warp for every 32 rows; as many of them on a multiprocessor as registers allow without spills."""
    options = {"num_warps": max(1, tile // 32)}
    if not far and not values and d in REGISTERS:
        options["maxnreg"] = REGISTERS[d] if tile <= 32 else max(REGISTERS[d], 128)
    return options


@lru_cache
def _scale(k: float, device: torch.device) -> Tensor:
    """k as kernels read it."""
    return torch.full((1,), k, dtype=torch.float64, device=device)


def _no_anchor(rows: TiledCloud) -> Tensor:
    """Zeros [N] float32, the same ones each time: not to be written."""
    zeros = _zeros.get(rows)
    if zeros is None:
        zeros = _zeros[rows] = torch.zeros(len(rows.weight), dtype=torch.float32, device=rows.weight.device)
    return zeros


_zeros: WeakKeyDictionary[TiledCloud, Tensor] = WeakKeyDictionary()


class _Sweep:
    """Everything of a pass but the rows' potentials."""

    def __init__(self, rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, v: Tensor, k: float) -> None:
        self.rows, self.starts, self.lists = rows, starts.contiguous(), lists.contiguous()
        self.k = _scale(k, v.device)
        self.items = items_of(starts, lists.shape[0])
        self.col_tiles = cols.tree.tiles
        self.col_side = frame(cols, v, self.k, cols.log2_weight)

    def anchor(self, u: Tensor) -> Tensor:
        """The rows' largest exponents [N] float32."""
        return self(frame(self.rows, u, self.k), maximum=True)

    def __call__(
        self, side: Side, *, anchor: Tensor | None = None, partial: Tensor | None = None,
        values: Tensor | None = None, maximum: bool = False,
    ) -> Tensor:  # fmt: skip
        d, n = side.packed.shape[0] - 1, side.packed.shape[1]
        tile, tiles = self.rows.tree.tile, self.rows.tree.tiles
        n_items, n_values = self.items.tiles.shape[0], 0 if values is None else values.shape[0]
        device = side.packed.device
        sums = torch.empty(2, n_items, max(n_values, 1), tile, device=device, dtype=torch.float32)
        for far in (False, True):
            arguments = (
                side.packed, side.potential, side.frame,
                self.col_side.packed, self.col_side.potential, self.col_side.frame,
                self.starts, self.lists, self.items.starts, self.items.tiles,
                sums if values is None else values, sums[int(far)], sums if partial is None else partial, self.k,
                n, self.col_side.packed.shape[1], tiles, self.col_tiles, self.items.pairs,
            )  # fmt: skip
            options = {
                "D": d, "T": tile, "VALUES": n_values, "PARTIAL": partial is not None, "MAXIMUM": maximum,
                "FACTOR": not far and not maximum, "FAR": far, **launch_options(d, tile, values=n_values, far=far),
            }  # fmt: skip
            launch(sweep_kernel, (n_items, 1, 1), arguments, options)
        shape = (n_values, n) if n_values else (n,)
        out = torch.empty(shape, device=device, dtype=torch.float32 if maximum else torch.float64)
        launch(
            combine_kernel,
            (tiles, 1, 1),
            (sums, self.items.starts, sums if anchor is None else anchor, out, n_items, n),
            {"T": tile, "VALUES": n_values, "MAXIMUM": maximum, "ANCHORED": anchor is not None, "num_warps": 1},
        )
        return out

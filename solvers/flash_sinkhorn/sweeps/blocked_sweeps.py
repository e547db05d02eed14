"""Sweeps on the CPU: torch over blocks of scores, float32 for float32 clouds and float64 for float64 ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import local

import torch

from ..inputs.checks import Inputs
from .sweeps import Cloud, Sweeps
from .threads import LEAST_DIVIDED, each_block
from .tiles import LARGEST_DIRECT_DIMENSION, LOG2_E

BLOCK_BYTES = 1 << 22  # operations so long that threads seldom meet in the interpreter between them, in fast memory
BLOCK_COLS = 2048
LARGEST_LOG2_SUM = 60.0


@dataclass(eq=False)
class BlockedCloud(Cloud):
    """points [n, d] (direct differences: [d, n]) and biases [n] in the working precision; the rest float64 [n]; of a
    batch all [B, ...].

    row_bias, col_bias: what a sweep adds to the scores of the cloud as rows and as columns.
    """

    points: torch.Tensor
    row_bias: torch.Tensor
    col_bias: torch.Tensor
    log2_weight: torch.Tensor
    guarded: bool = True  # nothing is known of the next sums


class Blocked(Sweeps[BlockedCloud]):
    """One problem on the CPU, or a batch of them, x [B, n, d] and so on; C = cost_scale |x - y|^2.

    Never stores more than one block of scores a thread. Low d takes direct differences, high d one product a block.
    """

    rounded = improvable = False

    def __init__(self, inputs: Inputs, *, cost_scale: float):
        self.cost_scale = cost_scale
        self.direct = inputs.x.shape[-1] <= LARGEST_DIRECT_DIMENSION
        self.scale, self.exponent_dtype = 0.0, inputs.x.dtype
        self._of_thread = local()
        centre = inputs.direct_centre if self.direct else inputs.centre

        def store(side: tuple[torch.Tensor, torch.Tensor]) -> BlockedCloud:
            return self._store(*side, centre)

        self.x, self.y = each_block(store, ((inputs.x, inputs.a), (inputs.y, inputs.b)))

    def _store(self, points: torch.Tensor, weight: torch.Tensor, centre: torch.Tensor) -> BlockedCloud:
        centred = (points.double() - centre[..., None, :]).to(points.dtype)
        square = torch.zeros_like(weight) if self.direct else centred.double().square().sum(-1) / 2
        return BlockedCloud(
            n=points.shape[-2],
            potential=torch.zeros_like(weight),
            used=torch.zeros_like(weight),
            residual=torch.zeros_like(weight[..., :1]),
            points=centred.mT.contiguous() if self.direct else centred,
            half_square=square,
            weight=weight,
            log2_weight=torch.log2(weight),
            row_bias=torch.zeros_like(weight, dtype=points.dtype),
            col_bias=torch.zeros_like(weight, dtype=points.dtype),
        )

    def set_epsilon(self, eps: float, ratio: float) -> None:
        s = self.cost_scale * LOG2_E / eps
        self.scale = -s if self.direct else 2.0 * s
        for cloud in (self.x, self.y):
            cloud.potential *= ratio
            cloud.guarded = True
            self._derive_biases(cloud)

    def _derive_biases(self, cloud: BlockedCloud) -> None:
        bias = self.bias(cloud)
        cloud.row_bias.copy_(bias)
        cloud.col_bias.copy_(bias + cloud.log2_weight)

    def settle(self, rows: BlockedCloud, partial: torch.Tensor, *, relaxation: float, damping: float) -> None:
        log2_sums = partial[..., 0, :]
        rows.used.copy_(rows.row_bias.double() + self.scale * rows.half_square)
        excess = log2_sums + (1.0 - damping) * (rows.used - log2_sums)
        rows.potential.copy_(rows.used - relaxation * excess)
        rows.guarded = False
        self._derive_biases(rows)
        deviation = (torch.exp2(excess) - 1.0).abs()  # of row sums in float64: expm1 would tell no more
        rows.residual.copy_(torch.where(rows.weight > 0, rows.weight * deviation, 0.0).sum(-1, keepdim=True))

    def take_potential(self, cloud: BlockedCloud, potential: torch.Tensor) -> None:
        cloud.potential.copy_(potential)
        self._derive_biases(cloud)


class BlockedSweeps(Blocked):
    """One problem."""

    def sweep(self, rows: BlockedCloud, cols: BlockedCloud) -> torch.Tensor:
        exponents = self.exponents(rows, cols)

        def log2_sums(block: slice) -> torch.Tensor:
            found = _log2_sums(exponents(block), with_maximum=rows.guarded)
            if not bool((found.abs() < LARGEST_LOG2_SUM).all()):  # false for nan too
                found = _log2_sums(exponents(block), with_maximum=True)
            return found

        divided = not self.direct or rows.n * cols.n >= LEAST_DIVIDED
        blocks = self.row_blocks(rows, cols)
        found = each_block(log2_sums, blocks) if divided else [log2_sums(block) for block in blocks]
        return torch.cat(found)[None]

    def exponents(
        self, rows: BlockedCloud, cols: BlockedCloud
    ) -> Callable[[slice], Iterator[tuple[slice, torch.Tensor, torch.Tensor]]]:
        """Of a block of rows: (columns, their exponents [rows, columns], scratch of that shape) block by block.

        The next block of the thread overwrites both.
        """
        right = None if self.direct else _right_factor(cols)

        def of_rows(block: slice) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
            size, buffers = block.stop - block.start, self._buffers_of_thread()
            left = None if self.direct else _left_factor(rows, block, self.scale)
            for opposite in _blocks(cols.n, BLOCK_COLS):
                width = opposite.stop - opposite.start
                out, scratch = buffers[:, : size * width].view(2, size, width)
                if left is None or right is None:
                    _direct_exponents(rows, cols, block, opposite, self.scale, out, scratch)
                else:
                    torch.mm(left, right[opposite].T, out=out)
                yield opposite, out, scratch

        return of_rows

    def _buffers_of_thread(self) -> torch.Tensor:
        """[2, pairs of a block], kept from sweep to sweep: fresh memory costs more than the arithmetic on it."""
        if not hasattr(self._of_thread, "buffers"):
            with torch.inference_mode(False):  # to be written to in either mode
                size = BLOCK_BYTES // self.exponent_dtype.itemsize
                self._of_thread.buffers = torch.empty(2, size, dtype=self.exponent_dtype)
        return self._of_thread.buffers

    def row_blocks(self, rows: BlockedCloud, cols: BlockedCloud) -> Iterator[slice]:
        """What one thread takes of the rows at a time."""
        return _blocks(rows.n, BLOCK_BYTES // (self.exponent_dtype.itemsize * min(BLOCK_COLS, cols.n)))


def _left_factor(rows: BlockedCloud, block: slice, scale: float) -> torch.Tensor:
    """[scale q_i, row_bias_i, 1]: times the right factor's transpose this is the exponent, biases included."""
    q, bias = rows.points[block] * scale, rows.row_bias[block, None]
    return torch.cat([q, bias, torch.ones_like(bias)], 1)


def _right_factor(cols: BlockedCloud) -> torch.Tensor:
    """[k_j, 1, col_bias_j]."""
    bias = cols.col_bias[:, None]
    return torch.cat([cols.points, torch.ones_like(bias), bias], 1)


def _direct_exponents(
    rows: BlockedCloud,
    cols: BlockedCloud,
    block: slice,
    opposite: slice,
    scale: float,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    torch.add(rows.row_bias[block, None], cols.col_bias[None, opposite], out=out)
    for q, k in zip(rows.points[:, block, None], cols.points[:, None, opposite], strict=True):
        torch.sub(q, k, out=scratch)
        out.addcmul_(scratch, scratch, value=scale)


def _log2_sums(blocks: Iterable[tuple[slice, torch.Tensor, torch.Tensor]], *, with_maximum: bool) -> torch.Tensor:
    """log2 sum_j 2^t_ij [rows] in float64, of `BlockedSweeps.exponents`."""
    if not with_maximum:
        return torch.stack([t.exp2_().sum(1) for _, t, _ in blocks]).sum(0, dtype=torch.float64).log2_()
    partial = []
    for _, t, _ in blocks:
        maximum = t.amax(1, keepdim=True).clamp_min_(torch.finfo(t.dtype).min)  # all weights zero
        partial.append(maximum[:, 0] + t.sub_(maximum).exp2_().sum(1).log2_())
    return torch.logsumexp(torch.stack(partial).double() / LOG2_E, 0) * LOG2_E


def _blocks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))

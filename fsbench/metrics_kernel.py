"""Row and column sums of exp(E), E_ij = (f_i + g_j - C_ij) / eps, in one pass over all pairs in float64 on CUDA.

One exponential a pair serves both sides: rows are summed in registers, columns go to memory by one float64 atomic
add per column and tile. Storage is O(n + m); nothing of size n * m is ever built. Points are sorted by place, and
where the boxes of two blocks are so far apart that every exp(E) between them is exactly zero in float64, these zeros
are not added up one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64
BLOCK_COLUMNS = 16
COLUMNS_A_PROGRAM = 4096
NUM_WARPS = 4
SAMPLED = 16  # row boxes, by which to tell whether looking at boxes pays
MOST_THAT_COUNTS = 0.8  # of their pairs: above, looking at boxes would take more time than it saves
ZERO = tl.constexpr(-750.0)  # exp is exactly zero below -745.2; the rest is for the rounding of exponents up to 1e15
BOXED_COORDINATES = tl.constexpr(6)  # points are sorted by these, the first ones, and boxes are of them


@triton.jit
def _largest_exponent(rows, r, n_rows, cols, c, n_cols, scale, D: tl.constexpr):
    """No E_ij of row box r and column box c is larger. rows [2 K + 1, n_rows], cols [2 K + 1, n_cols]: the lows and
    highs of K coordinates and the largest potential, float64."""
    K: tl.constexpr = D if D < BOXED_COORDINATES else BOXED_COORDINATES
    sq = scale - scale
    for k in range(K):
        row_low = tl.load(rows + k * n_rows + r)
        row_high = tl.load(rows + (K + k) * n_rows + r)
        col_low = tl.load(cols + k * n_cols + c)
        col_high = tl.load(cols + (K + k) * n_cols + c)
        gap = tl.maximum(tl.maximum(col_low - row_high, row_low - col_high), 0.0)
        sq += gap * gap
    return tl.load(rows + 2 * K * n_rows + r) + tl.load(cols + 2 * K * n_cols + c) - scale * sq


@triton.jit
def plan_sums_fwd_kernel(
    x_ptr,  # [D, n] float64: converted once, not once a tile
    y_ptr,  # [D, m] float64
    f_ptr,  # [n] f / eps, float64
    g_ptr,  # [m] g / eps, float64
    a_ptr,  # [n] float64
    b_ptr,  # [m] float64
    row_ptr,  # [n] out: sum_j b_j exp(E_ij), float64, zeroed by the caller
    col_ptr,  # [m] out: sum_i a_i exp(E_ij), float64, zeroed by the caller
    row_boxes_ptr,  # [2 K + 1, n / BM] float64, as of `_boxes`
    col_boxes_ptr,  # [2 K + 1, m / BN]
    chunk_boxes_ptr,  # [2 K + 1, m / CHUNK]
    n,
    m,
    n_row_boxes,
    n_col_boxes,
    n_chunks,
    cost_over_eps,  # [1] cost_scale / eps: in memory, because a scalar argument would be rounded to float32
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS: tl.constexpr,  # whether boxes are looked at
):
    block, chunk = tl.program_id(0), tl.program_id(1)
    i = block.to(tl.int64) * BM + tl.arange(0, BM)
    scale = tl.load(cost_over_eps)
    b_a = tl.load(a_ptr + i, mask=i < n, other=0.0)  # [BM]
    b_f = tl.load(f_ptr + i, mask=i < n, other=float("-inf"))  # [BM]; -inf makes the padding's exp exactly 0
    b_row = tl.zeros([BM, BN], tl.float64)
    tiles = CHUNK // BN
    if SKIPS:
        exponent = _largest_exponent(row_boxes_ptr, block, n_row_boxes, chunk_boxes_ptr, chunk, n_chunks, scale, D)
        tiles = tl.where(exponent >= ZERO, tiles, 0)
    for step in range(tiles):
        # Each program starts at another tile, or all of them would add to the same addresses at once.
        first = chunk * CHUNK + (step + block) % (CHUNK // BN) * BN
        counts = True
        if SKIPS:
            box = tl.minimum(first // BN, n_col_boxes - 1)
            exponent = _largest_exponent(row_boxes_ptr, block, n_row_boxes, col_boxes_ptr, box, n_col_boxes, scale, D)
            counts = exponent >= ZERO
        if counts:
            j = first.to(tl.int64) + tl.arange(0, BN)
            b_b = tl.load(b_ptr + j, mask=j < m, other=0.0)  # [BN]
            b_g = tl.load(g_ptr + j, mask=j < m, other=float("-inf"))  # [BN]
            b_sq = tl.zeros([BM, BN], tl.float64)
            x_k, y_k = x_ptr + i, y_ptr + j
            for _ in range(D):
                b_x = tl.load(x_k, mask=i < n, other=0.0)
                b_y = tl.load(y_k, mask=j < m, other=0.0)
                diff = b_x[:, None] - b_y[None, :]  # [BM, BN]
                b_sq += diff * diff
                x_k += n  # 64-bit pointer steps: d * n may pass 2^31
                y_k += m
            b_exp = tl.exp(b_f[:, None] + b_g[None, :] - scale * b_sq)  # [BM, BN]
            b_row += b_exp * b_b[None, :]
            b_col = tl.sum(b_exp * b_a[:, None], axis=0)  # [BN]
            tl.atomic_add(col_ptr + j, b_col, mask=j < m, sem="relaxed")
    tl.atomic_add(row_ptr + i, tl.sum(b_row, axis=1), mask=i < n, sem="relaxed")


def plan_sums(
    x: torch.Tensor, y: torch.Tensor, f: torch.Tensor, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_j b_j exp(E_ij) [n] and sum_i a_i exp(E_ij) [m] in float64, E_ij = f_i + g_j - scale * |x_i - y_j|^2.

    x [n, d], y [m, d] of any float type; f [n], g [m] already divided by eps, a [n], b [m] float64.
    """
    (n, d), m = x.shape, len(y)
    order_x, order_y = _orders(x, y)
    x, f, a = x[order_x].t().double().contiguous(), f[order_x], a[order_x]
    y, g, b = y[order_y].t().double().contiguous(), g[order_y], b[order_y]
    boxes = _boxes(x, f, BLOCK_ROWS), _boxes(y, g, BLOCK_COLUMNS), _boxes(y, g, COLUMNS_A_PROGRAM)
    row = torch.zeros(n, dtype=torch.float64, device=x.device)
    col = torch.zeros(m, dtype=torch.float64, device=x.device)
    scale_in_memory = torch.tensor([scale], dtype=torch.float64, device=x.device)
    skips = _share_that_counts(*boxes[:2], scale) < MOST_THAT_COUNTS
    plan_sums_fwd_kernel[(boxes[0].shape[1], boxes[2].shape[1])](
        x, y, f, g, a, b, row, col, *boxes, n, m, *(each.shape[1] for each in boxes), scale_in_memory,
        D=d, BM=BLOCK_ROWS, BN=BLOCK_COLUMNS, CHUNK=COLUMNS_A_PROGRAM, SKIPS=skips, num_warps=NUM_WARPS,
    )  # fmt: skip
    return torch.empty_like(row).index_copy_(0, order_x, row), torch.empty_like(col).index_copy_(0, order_y, col)


def _orders(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Of both clouds, indices [n] and [m] along the Morton curve in their common box."""
    d = min(x.shape[1], BOXED_COORDINATES.value)
    bits = 60 // d
    clouds = [points[:, :d].double() for points in (x, y)]
    low = torch.minimum(*(points.amin(0) for points in clouds))
    width = (torch.maximum(*(points.amax(0) for points in clouds)) - low).amax().clamp(min=1e-300)
    orders = []
    for points in clouds:
        cells = ((points - low) / width * (2.0**bits - 1)).long()
        key = torch.zeros_like(cells[:, 0])
        for bit in range(bits):
            for k in range(d):
                key |= (cells[:, k] >> bit & 1) << (bit * d + k)
        orders.append(key.argsort())
    return orders


def _boxes(points: torch.Tensor, potential: torch.Tensor, size: int) -> torch.Tensor:
    """[2 K + 1, blocks] of each `size` consecutive points [d, n]: the least and the largest of the first K coordinates,
    and of potential [n] the largest."""
    points = points[: BOXED_COORDINATES.value]
    d, n = points.shape
    blocks = -(-n // size)
    index = torch.arange(blocks * size, device=points.device).clamp(max=n - 1)
    grouped = points[:, index].view(d, blocks, size)
    return torch.cat([grouped.amin(2), grouped.amax(2), potential[index].view(1, blocks, size).amax(2)])


def _share_that_counts(rows: torch.Tensor, cols: torch.Tensor, scale: float) -> float:
    """Of pairs of some row boxes [2 K + 1, n] and all column boxes [2 K + 1, m]: where some exp(E) may not be zero."""
    k = len(rows) // 2
    rows = rows[:, torch.linspace(0, rows.shape[1] - 1, SAMPLED, device=rows.device).long(), None]
    cols = cols[:, None]
    exponent = rows[-1] + cols[-1]
    for low, high, col_low, col_high in zip(rows[:k], rows[k:-1], cols[:k], cols[k:-1], strict=True):
        gap = torch.maximum(col_low - high, low - col_high).clamp(min=0.0)
        exponent = exponent - scale * gap * gap
    return (exponent >= ZERO.value).double().mean().item()

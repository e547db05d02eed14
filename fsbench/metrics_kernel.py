"""Row and column sums of exp(E), E_ij = (f_i + g_j - C_ij) / eps, in one pass over all pairs in float64 on CUDA.

One exponential a pair serves both sides: rows are summed in registers, columns go to memory by one float64 atomic
add per column and tile. Storage is O(n + m); nothing of size n * m is ever built.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64
BLOCK_COLUMNS = 16
COLUMNS_A_PROGRAM = 4096
NUM_WARPS = 4


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
    n,
    m,
    cost_over_eps,  # [1] cost_scale / eps: in memory, because a scalar argument would be rounded to float32
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    first_column = tl.program_id(1).to(tl.int64) * CHUNK
    scale = tl.load(cost_over_eps)
    b_a = tl.load(a_ptr + i, mask=i < n, other=0.0)  # [BM]
    b_f = tl.load(f_ptr + i, mask=i < n, other=float("-inf"))  # [BM]; -inf makes the padding's exp exactly 0
    b_row = tl.zeros([BM, BN], tl.float64)
    for tile in range(CHUNK // BN):
        # Each program starts at another tile, or all of them would add to the same addresses at once.
        j = first_column + (tile + tl.program_id(0)) % (CHUNK // BN) * BN + tl.arange(0, BN)
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
    row = torch.zeros(n, dtype=torch.float64, device=x.device)
    col = torch.zeros(m, dtype=torch.float64, device=x.device)
    scale_in_memory = torch.tensor([scale], dtype=torch.float64, device=x.device)
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(m, COLUMNS_A_PROGRAM))
    plan_sums_fwd_kernel[grid](
        x.t().double().contiguous(), y.t().double().contiguous(), f, g, a, b, row, col, n, m, scale_in_memory,
        D=d, BM=BLOCK_ROWS, BN=BLOCK_COLUMNS, CHUNK=COLUMNS_A_PROGRAM, num_warps=NUM_WARPS,
    )  # fmt: skip
    return row, col

"""How far is a sweep over all pairs from what the chip allows: exponentials and fp16 dot products on one H200?"""

from __future__ import annotations

import pandas as pd

from fsbench.report.analysis import finished
from fsbench.report.style import label, styles
from fsbench.report.tables import Column, Entry, Table, Unit

CHIP = "H200"
# 16 exponentials per clock and multiprocessor (CUDA programming guide, arithmetic throughput of compute capability
# 9.0), 132 multiprocessors at 1.98 GHz: 4.18e12.
EXPONENTIALS_PER_S = 16 * 132 * 1.98e9
FP16_DOT_FLOPS = 9.89e14  # dense, float32 sums: half of the data sheet's figure, which is for sparse matrices

PRODUCTS = {"flash_sinkhorn_fast": 1, "flash_sinkhorn_mixed": 2, "flash_sinkhorn": 3}  # fp16 products of a sweep's dot
LARGEST_DIRECT_DIMENSION, LARGEST_PACKED_DIMENSION, SMALLEST_DOT_DIMENSION = 4, 5, 16  # as in its tiles.py


def floor_s(solver: str, pairs: float, d: int) -> tuple[float, str]:
    """Least seconds of one pass of a FlashSinkhorn solver over so many pairs in R^d, and the unit that sets it."""
    exact = solver == "flash_sinkhorn"
    width, products = max(d, SMALLEST_DOT_DIMENSION), PRODUCTS[solver]
    if exact and d <= LARGEST_DIRECT_DIMENSION:
        products = 0  # direct differences take no dot product
    elif not exact and d <= LARGEST_PACKED_DIMENSION:
        width, products = SMALLEST_DOT_DIMENSION, 1
    exponentials, dots = pairs / EXPONENTIALS_PER_S, 2.0 * width * pairs * products / FP16_DOT_FLOPS
    return (exponentials, "exp") if exponentials >= dots else (dots, "dot")


def tables(df: pd.DataFrame, where: str) -> list[Table]:
    """A row for each forward cell of FlashSinkhorn that finished on this chip with a time per pass; none, no table."""
    ours = finished(df)
    ours = ours[ours["solver"].isin(PRODUCTS) & ours["gpu_name"].str.contains(CHIP, na=False)]
    ours = ours[(ours["task"] == "forward") & ours["time_per_pass_s"].notna()]
    if ours.empty:
        return []
    rows: list[list[Entry]] = []
    order = list(styles(ours["solver"]))
    for _, cell in ours.sort_values(["d", "n", "m", "solver"], key=lambda column: _ranked(column, order)).iterrows():
        least, bound = floor_s(cell["solver"], cell["n"] * cell["m"], int(cell["d"]))
        taken = cell["time_per_pass_s"]
        rows.append([cell["d"], cell["n"], label(cell["solver"]), taken, least, bound, taken / least])
    columns = [Column("d", Unit.EXACT), Column("n", Unit.EXACT), Column("solver")]
    columns += [Column("time per pass", Unit.SECONDS, "time"), Column("floor", Unit.SECONDS, "time"), Column("bound")]
    columns += [Column("time / floor", Unit.RATIO)]
    formula = f"max(n m / {EXPONENTIALS_PER_S:.3g}, 2 K n m products / {FP16_DOT_FLOPS:.3g}) s"
    notes = [
        f"n m / {EXPONENTIALS_PER_S:.3g}: one exponential a pair, 16 per clock on each of 132 multiprocessors at"
        " 1.98 GHz (sweeps of low d take an eighth by polynomial, without it). 2 K n m products: dense fp16 dot"
        " products at the data sheet's rate, one product with 10-bit points, two if mixed, three"
        " FP32-grade, K = d and at least 16.",
        f"Low d: exponentials only where FP32-grade differences are direct (d <= {LARGEST_DIRECT_DIMENSION}), K = 16"
        f" and one product where the others pack pairs (d <= {LARGEST_PACKED_DIMENSION}).",
        "Time per pass is that of the whole solve over its passes: set-up and launches are in it, and count at small"
        " n.",
    ]
    return [Table(f"Time per pass over the chip's floor, {formula}, {where}", columns, rows, notes, key_columns=3)]


def _ranked(column: pd.Series, order: list[str]) -> pd.Series:
    return column.map(order.index) if column.name == "solver" else column

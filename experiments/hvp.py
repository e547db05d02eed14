"""How long does one Hessian-vector product take at equal tolerance, and how accurate is it?

The question of the HVP experiment of FlashSinkhorn (arXiv 2602.03067): n = m = 50,000, d = 64 and 128. Every solver
gets the same float64-converged potentials, the same direction and the same tolerance on its linear system; its product
is scored against float64.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import PUBLISHED, memory_notes
from fsbench.api import PRODUCT_MARGIN
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, memory_columns, speedups
from fsbench.report.style import count_text, label, number_text, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

OURS = "flash_sinkhorn"
PUBLISHED_ROWS: tuple[tuple[str, Entry], ...] = (("FlashSinkhorn", 4.2), ("KeOps", 14.5), ("OTT-JAX", "OOT"))
_PUBLISHED_N = 50_000


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (a block for each d and eps), and time against n and, where it varies, d."""
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        blocks = [_block(cells, device) for _, cells in part.groupby(["d", "eps"])]
        tables += blocks or [_block(part, device)]
        for x in ("n", "d") if part["d"].nunique() > 1 else ("n",):
            drawn = figures.scaling(part, x=x, y=TIME, title=f"One Hessian-vector product on {device}")
            paths += figures.save(drawn, out_dir, f"time_{x}{suffix}")
    return write(tables, out_dir) + paths


def _block(cells: pd.DataFrame, device: str) -> Table:
    """Every solver at every n of one d and eps."""
    memory = memory_columns(cells)
    columns = [Column("n", Unit.EXACT), Column("solver"), Column("time", Unit.SECONDS)]
    columns += [Column(f"time / {label(OURS)}", Unit.RATIO), Column("iterations", Unit.EXACT)]
    columns += [Column("passes", Unit.PASSES), Column("error", Unit.NUMBER), Column("residual, own", Unit.NUMBER)]
    columns += [Column(f"peak memory, {figures.MEMORY_NAMES[name]}", Unit.BYTES, "memory") for name in memory]
    ratios = speedups(cells, OURS)
    rows: list[list[Entry]] = []
    for (n, group), at_n in cells.sort_values("n", kind="stable").groupby(["n", "group_id"], sort=False):
        records = {record["solver"]: record for _, record in at_n.iterrows()}
        for name in styles(records):
            record = records[name]
            ratio = 1.0 if name == OURS and record["status"] == Status.OK else None
            if name in ratios and not pd.isna(ratios[name].get(group)):
                ratio = float(ratios[name][group])
            rest = ["n_iterations", "n_passes", "hvp_rel_err", "hvp_residual_self", *memory]
            rows.append([float(n), label(name), entry(record, TIME), ratio, *(entry(record, key) for key in rest)])
        if n == _PUBLISHED_N:
            nothing: list[Entry] = [None] * (len(columns) - 3)
            rows += [[float(n), f"{name}, {PUBLISHED}", time, *nothing] for name, time in PUBLISHED_ROWS]
    notes = [
        "Error: |h - reference| / |reference| against float64 at the same potentials; a product counts if it is at most"
        f" {PRODUCT_MARGIN:g} times the tolerance of the linear system. Residual, own: of that system, as the solver"
        " says.",
        *memory_notes(cells, memory),
    ]
    if (cells["n"] == _PUBLISHED_N).any():
        notes.append(f"Rows marked {PUBLISHED} are of the FlashSinkhorn paper at n = 50k, not measured here.")
    facts = cells.iloc[0] if len(cells) else None
    what = "" if facts is None else f": d = {count_text(facts['d'])}, eps = {number_text(facts['eps'])}"
    tolerance = "" if facts is None else f", tolerance {number_text(facts['tol'])}"
    title = f"Hessian-vector product{what}{tolerance}, on {device}"
    return Table(title, columns, rows, [*notes, *legend(rows)], key_columns=2)

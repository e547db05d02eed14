"""How does peak memory grow with n and with d?

Two numbers on a GPU: the framework's allocator, and the device's memory by NVML, which also sees what was allocated
past the allocator. On a CPU: the resident set. Exponents are fitted over the cells that finished.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.report import figures
from fsbench.report.analysis import MEMORY, by_device, counted, memory_columns, power_fit
from fsbench.report.style import count_text, exponent_text, label, styles
from fsbench.report.tables import Column, Entry, Table, Unit, summary, write


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (peak memory of every cell), exponents.*, and figures against n and d for each memory number."""
    tables, exponents, paths = [], [], []
    for device, suffix, part in by_device(df):
        for column in memory_columns(part):
            name = figures.MEMORY_NAMES[column]
            tables += summary(part, value=column, unit=Unit.BYTES, title=f"Peak memory, {name} ({MEMORY[column]})")
            exponents.append(_exponents(part, column, f"Growth of peak memory, {name}, on {device}"))
            for x in ("n", "d"):
                if x == "n" or part["d"].nunique() > 1:
                    title = f"Peak memory, {name}, against {x} on {device}"
                    figure = figures.scaling(part, x=x, y=column, title=title, fit=True)
                    paths += figures.save(figure, out_dir, f"{column.removesuffix('_bytes')}_{x}{suffix}")
    return write([*tables, *exponents], out_dir) + write(exponents, out_dir, "exponents") + paths


def _exponents(df: pd.DataFrame, column: str, title: str) -> Table:
    """A row a solver: exponent of n at each d, and of d at the largest n at which the solver finished every d."""
    dimensions = sorted(df["d"].dropna().unique())
    columns = [Column("solver")]
    columns += [Column(f"n^p, d = {count_text(d)}") for d in dimensions] + [Column("d^p, largest complete n")]
    rows: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        cells = counted(df[df["solver"] == name], column)
        at_n = cells.groupby("n")["d"].nunique()
        complete = at_n[at_n == len(dimensions)].index
        row: list[Entry] = [label(name)]
        row += [_fit(cells[cells["d"] == d], "n", column) for d in dimensions]
        row.append(_fit(cells[cells["n"] == complete.max()], "d", column) if len(complete) else None)
        rows.append(row)
    return Table(title, columns, rows, ["Fitted exponent p (cells used), over the cells that finished."])


def _fit(cells: pd.DataFrame, x: str, column: str) -> Entry:
    fitted = power_fit(cells[x], cells[column])
    return f"{exponent_text(fitted[0])} ({fitted[1]})" if fitted else None

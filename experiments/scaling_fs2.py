"""How do time, memory and passes of FlashSinkhorn2 grow with the number of points?

A uniform and a clustered cloud, at a blur of one mean spacing and of ten: eps falls with n, so that a point meets as
many others at every size. Exponents are fitted over the cells that finished.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import BLUR, BLUR_NOTE, PASSES_NOTE, memory_notes, problem_cells, with_counts
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, counted, memory_columns, power_fit
from fsbench.report.style import exponent_text, label, styles
from fsbench.report.tables import Column, Entry, Table, Unit, write

_CELL = {
    TIME: Column("time", Unit.SECONDS),
    "n_passes": Column("passes", Unit.PASSES),
    "kept_pairs": Column("kept pairs a point", Unit.NUMBER),
    "screens": Column("masks chosen", Unit.EXACT),
    "bytes_per_point": Column("peak memory a point", Unit.BYTES),
    "residual_l1": Column("residual L1", Unit.NUMBER),
}
_GROWTH = {TIME: "time", "bytes_per_point": "memory a point", "n_passes": "passes", "kept_pairs": "kept pairs a point"}
_FIGURES = {TIME: "Time to the residual target", "bytes_per_point": "Peak memory a point", "n_passes": "Passes"}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """exponents.* (of n, for each problem and blur), table.* (these, and a row a cell), figures against n."""
    exponents: list[Table] = []
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        memory = memory_columns(part)[0]
        part = with_counts(part)
        part = part.assign(bytes_per_point=part[memory] / (part["n"] + part["m"]))
        exponents.append(_exponents(part, device))
        notes = [BLUR_NOTE, PASSES_NOTE, "Points: of both clouds together.", *memory_notes(part, [memory])]
        tables.append(problem_cells(part, _CELL, title=f"Every cell, on {device}", notes=notes))
        for column, title in _FIGURES.items():
            drawn = figures.scaling(part, x="n", y=column, title=f"{title} on {device}", fit=True, by=(BLUR,))
            paths += figures.save(drawn, out_dir, f"{_stem(column)}_n{suffix}")
    return write([*exponents, *tables], out_dir) + write(exponents, out_dir, "exponents") + paths


def _stem(column: str) -> str:
    return {TIME: "time", "n_passes": "passes"}.get(column, column)


def _exponents(df: pd.DataFrame, device: str) -> Table:
    """A row a solver, problem and blur: exponents p of n^p, with the cells used."""
    columns = [Column("solver"), Column("problem"), Column(BLUR, Unit.EXACT), *map(Column, _GROWTH.values())]
    rows: list[list[Entry]] = []
    for name in styles(df["solver"].dropna()):
        for (problem, blur), cells in df[df["solver"] == name].groupby(["problem", BLUR]):
            rows.append([label(name), problem, blur, *(_fit(cells, column) for column in _GROWTH)])
    notes = ["Fitted exponent p of n^p (cells used), over the cells that finished.", BLUR_NOTE]
    return Table(f"Growth with the number of points, on {device}", columns, rows, notes, key_columns=3)


def _fit(cells: pd.DataFrame, column: str) -> Entry:
    valid = counted(cells, column)
    fitted = power_fit(valid["n"], valid[column])
    return f"{exponent_text(fitted[0])} ({fitted[1]})" if fitted else None

"""What does one throughput run cost in memory traffic, time and kernel launches?

The question of Table 2 of FlashSinkhorn (arXiv 2602.03067): n = m = 10,000, d = 64, eps 0.1, 10 iterations. Rows are
solvers; counters come from Nsight Compute on a GPU and are marked where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import (
    FP32,
    PUBLISHED,
    TEN_BIT,
    counter,
    counter_notes,
    memory_notes,
    precision,
    throughput_note,
)
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, memory_columns
from fsbench.report.style import label, shape_text, status_word, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

# Solver, precision, HBM read + write (B), time (s), SM utilisation (%), memory stalls (%), kernel launches.
PUBLISHED_ROWS: tuple[tuple[str, str, float, float, float, float, float | None], ...] = (
    ("FlashSinkhorn", TEN_BIT, 0.08e9, 8.2e-3, 74, 3, 130),
    ("KeOps", FP32, 0.14e9, 125.5e-3, 49, 8, 854),
    ("tensorized", FP32, 98e9, 54.0e-3, 98, 79, None),
)
_COUNTERS: tuple[tuple[str, Unit, tuple[str, ...]], ...] = (
    ("HBM read + write", Unit.GIGABYTES, ("hbm_read_bytes", "hbm_write_bytes")),
    ("SM use", Unit.PERCENT, ("sm_throughput_pct",)),
    ("memory stalls", Unit.PERCENT, ("memory_stall_pct",)),
    ("kernel launches", Unit.EXACT, ("kernel_launches",)),
)


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.{md,csv,tex,txt} and time.{png,svg}; failed and unmeasured cells are marked in place."""
    tables, paths = [], []
    for device, suffix, part in by_device(df):
        groups = [group for _, group in part.groupby("group_id", sort=False)] or [part]
        tables += [_table(group, device) for group in groups]
        paths += figures.save(
            figures.bars(part, y=TIME, title=f"Time of one throughput run on {device}"), out_dir, f"time{suffix}"
        )
    return write(tables, out_dir) + paths


def _table(group: pd.DataFrame, device: str) -> Table:
    memory = memory_columns(group)
    columns = [Column("solver"), Column("precision"), Column("time", Unit.SECONDS)]
    columns += [Column(name, unit) for name, unit, _ in _COUNTERS]
    columns += [Column("passes", Unit.PASSES)]
    columns += [Column(f"peak memory, {figures.MEMORY_NAMES[name]}", Unit.BYTES, "memory") for name in memory]
    columns += [Column("half-step error / eps", Unit.NUMBER), Column("residual L1", Unit.NUMBER)]
    by_solver = {record["solver"]: record for _, record in group.iterrows()}
    grade = precision(group)
    grades = dict(zip(group["solver"], grade, strict=True))
    rows = [[label(name), grades[name], *_measured(by_solver[name], memory)] for name in styles(by_solver)]
    if not rows:
        return Table(f"Table 2 on {device}", columns, [], ["No records yet."])
    nothing: list[Entry] = [None] * (3 + len(memory))
    for name, its_grade, hbm, seconds, sm, stalls, launches in PUBLISHED_ROWS:
        rows.append([f"{name}, {PUBLISHED}", its_grade, seconds, hbm, sm, stalls, launches, *nothing])
    title = f"Table 2 on {device}: {shape_text(group.iloc[0])}"
    notes = [
        throughput_note(group),
        f"Rows marked {PUBLISHED} are figures of the FlashSinkhorn paper at n = 10k, d = 64 on an A100-80GB, not"
        " measured here; compare rows of one precision only.",
        *memory_notes(group, memory),
    ]
    return Table(title, columns, rows, [*notes, *counter_notes(group), *legend(rows)])


def _measured(record: pd.Series, memory: list[str]) -> list[Entry]:
    time = entry(record, TIME)
    if record["status"] not in (Status.OK, Status.NOT_CONVERGED):
        return [status_word(record)] * (len(_COUNTERS) + len(memory) + 4)
    counters = [counter(record, columns) for _, _, columns in _COUNTERS]
    rest = ["n_passes", *memory, "half_step_error", "residual_l1"]
    return [time, *counters, *(entry(record, column) for column in rest)]

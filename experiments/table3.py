"""How fast is a forward solve, or one with the gradient in both clouds, against every baseline, over n and d?

The question of Table 3 of FlashSinkhorn (arXiv 2602.03067): x, y ~ N(0, I_d), eps 0.1, 10 iterations. Solvers are
compared within one precision: a 10-bit table and an FP32-grade table.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd

from experiments.common import (
    FP32,
    PUBLISHED,
    TEN_BIT,
    crossed_note,
    memory_notes,
    precision,
    ratio_entry,
    throughput_note,
)
from fsbench.api import Task
from fsbench.records import Status
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, geometric_means, memory_columns, speedups
from fsbench.report.style import count_text, label, number_text, styles
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

OURS = {FP32: ["flash_sinkhorn"], TEN_BIT: ["flash_sinkhorn_fast", "flash_sinkhorn_mixed"]}
_SLUGS = {FP32: "fp32", TEN_BIT: "10bit"}

_NAMES = {Task.FORWARD: "Forward", Task.FORWARD_BACKWARD: "Forward + backward"}
_TASK_SLUGS = {Task.FORWARD: "", Task.FORWARD_BACKWARD: "backward_"}

# (n, d) -> speed-up over each.
PUBLISHED_AGAINST = ("KeOps", "tensorized", "OTT-JAX")
PUBLISHED_SPEEDUPS: dict[Task, dict[tuple[int, int], tuple[Entry, Entry, Entry]]] = {
    Task.FORWARD: {
        (10_000, 128): ("9.4", "3.2", "2.0"),
        (10_000, 512): ("31.7", "1.7", "1.3"),
        (40_000, 128): ("12.5", "OOM", "3.0"),
        (40_000, 512): ("OOT", "OOM", "1.6"),
    },
    Task.FORWARD_BACKWARD: {(10_000, 512): ("161", None, None)},
}
_GRADIENT_NOTE = (
    "Each solver's gradient is in both clouds; its error is against float64 at the solver's own potentials, the larger"
    " of the two clouds'. Solvers normalise the plan's rows or not, which differs until convergence: the error is to"
    " the nearer."
)


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (a block for each precision and d), speedups.*, and figures of time against n and against d."""
    blocks, ratios, paths = [], [], []
    for device, suffix, part in by_device(df):
        tasks = [task for task in _NAMES if (part["task"] == task).any()]
        for task, grade in itertools.product(tasks or [Task.FORWARD], (FP32, TEN_BIT)):
            cells = part[(precision(part) == grade) & (part["task"].fillna(Task.FORWARD) == task)]
            if cells.empty and grade == TEN_BIT:
                continue  # no solver of this grade runs on a CPU
            ratios.append(_speedups(cells, task, grade, device))
            blocks += [_block(of_d, task, grade, device) for _, of_d in cells.groupby("d")]
            for x in ("n", "d"):
                title = f"{_NAMES[task]} solve, {grade}: time against {x} on {device}"
                if x == "n" or cells["d"].nunique() > 1:
                    figure = figures.scaling(cells, x=x, y=TIME, title=title)
                    paths += figures.save(figure, out_dir, f"time_{_TASK_SLUGS[task]}{x}_{_SLUGS[grade]}{suffix}")
    return write([*ratios, *blocks], out_dir) + write(ratios, out_dir, "speedups") + paths


def _block(cells: pd.DataFrame, task: Task, grade: str, device: str) -> Table:
    """Every solver at every n of one d."""
    ours, memory = OURS[grade][0], memory_columns(cells)
    ratios = speedups(cells, ours)
    columns = [Column("n", Unit.EXACT), Column("solver"), Column("time", Unit.SECONDS)]
    columns += [Column(f"time / {label(ours)}", Unit.RATIO)]
    columns += [Column(f"peak memory, {figures.MEMORY_NAMES[name]}", Unit.BYTES, "memory") for name in memory]
    errors = {"half_step_error": "half-step error / eps", "residual_l1": "residual L1"}
    if task is Task.FORWARD_BACKWARD:
        errors["gradient_rel_err"] = "gradient error"
    columns += [Column(name, Unit.NUMBER) for name in errors.values()]
    rows: list[list[Entry]] = []
    for (n, group), at_n in cells.sort_values("n", kind="stable").groupby(["n", "group_id"], sort=False):
        records = {record["solver"]: record for _, record in at_n.iterrows()}
        for name in styles(records):
            record = records[name]
            measured = ratios[name].get(group) if name in ratios else None
            ratio = 1.0 if name == ours and record["status"] == Status.OK else measured
            quality = [entry(record, column) for column in (*memory, *errors)]
            rows.append([float(n), label(name), entry(record, TIME), ratio, *quality])
    first = cells.iloc[0]
    title = f"{_NAMES[task]}, {grade}: d = {count_text(first['d'])}, eps = {number_text(first['eps'])}, on {device}"
    notes = [throughput_note(cells), *memory_notes(cells, memory)]
    notes += [_GRADIENT_NOTE] if task is Task.FORWARD_BACKWARD else []
    return Table(title, columns, rows, [*notes, *legend(rows)], key_columns=2)


def _speedups(cells: pd.DataFrame, task: Task, grade: str, device: str) -> Table:
    """Ours against each other solver, published figures in columns of their own, and a mean over what both finished."""
    solvers = list(styles(cells["solver"].dropna()))
    pairs = [(ours, other) for ours in OURS[grade] if ours in solvers for other in solvers if other not in OURS[grade]]
    known = {
        ours: speedups(cells, ours).reindex(index=cells["group_id"].unique(), columns=solvers) for ours in OURS[grade]
    }
    ratios = pd.DataFrame(
        {pair: known[pair[0]][pair[1]].astype(float) for pair in pairs}, index=cells["group_id"].unique()
    )
    published = PUBLISHED_AGAINST if grade == FP32 else ()
    columns = [Column("d", Unit.EXACT), Column("n", Unit.EXACT)]
    columns += [Column(f"{label(ours)} over {label(other)}", Unit.RATIO) for ours, other in pairs]
    columns += [Column(f"over {name}, {PUBLISHED}", Unit.RATIO) for name in published]
    records = {(record["group_id"], record["solver"]): record for _, record in cells.iterrows()}
    groups = cells.sort_values(["d", "n"]).drop_duplicates("group_id")
    rows: list[list[Entry]] = []
    for _, group in groups.iterrows():
        key = group["group_id"]
        measured = [
            ratio_entry(ratios[pair].get(key), records.get((key, pair[1])), records.get((key, pair[0])))
            for pair in pairs
        ]
        theirs = PUBLISHED_SPEEDUPS[task].get((group["n"], group["d"]), (None,) * len(PUBLISHED_AGAINST))
        rows.append([float(group["d"]), float(group["n"]), *measured, *(theirs if published else ())])
    means, counts = geometric_means(ratios)
    if len(rows) > 1:
        mean_row: list[Entry] = [None if pd.isna(means[pair]) else float(means[pair]) for pair in pairs]
        count_row: list[Entry] = [str(counts[pair]) for pair in pairs]
        total = f"of {len(rows)} cells"
        rows.append(["geometric mean", None, *mean_row, *[None] * len(published)])
        rows.append(["over", total, *count_row, *[None] * len(published)])
    notes = [
        "Time of the other solver over that of ours, only where both finished; each mean is over the cells of its own"
        " column, so that means of columns with different counts do not compare.",
        throughput_note(cells),
    ]
    notes += crossed_note(cells, {pair: ratios[pair] for pair in pairs})
    if published:
        notes.append(
            f"Columns marked {PUBLISHED} are the FlashSinkhorn paper's, TF32 products against FP32 baselines on an"
            " A100-80GB, not measured here."
        )
    title = f"{_NAMES[task]}, {grade}: speed-ups on {device}"
    return Table(title, columns, rows, [*notes, *legend(rows)], key_columns=2)

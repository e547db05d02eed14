"""How fast is a throughput run against the published flash-sinkhorn package, over every n and d?

Ten-bit products against the package's TF32, and FP32-grade ones against both its TF32 and its FP32. Without a GPU,
where the package does not run, against KeOps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import floor
from experiments.common import crossed_note, ratio_entry, throughput_note
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, speedups, time_words
from fsbench.report.style import count_text, label, number_text
from fsbench.report.tables import Column, Entry, Table, Unit, cells, legend, write

# (ours, theirs) on each kind of device.
PAIRS = {
    "cuda": (
        ("flash_sinkhorn_fast", "flash_sinkhorn_pypi_tf32"),
        ("flash_sinkhorn", "flash_sinkhorn_pypi_tf32"),
        ("flash_sinkhorn", "flash_sinkhorn_pypi_fp32"),
    ),
    "cpu": (("flash_sinkhorn", "keops"),),
}
_SETTINGS = ("problem", "eps", "dtype", "task", "mode", "tol", "max_iterations", "seed", "cost_scale", "shape")
_WHAT = "Speed-up: time of the other solver over that of ours, only where both finished."
_EXACT_OVER_TF32 = "FlashSinkhorn without a suffix is FP32-grade: against TF32 it does the more accurate work."


@dataclass(frozen=True)
class Quality:
    """values: columns of the table of every cell. error: the record column that stands for accuracy; note says what it
    is, ending before "the largest over the cells that both finished".
    """

    values: dict[str, Column]
    error: str
    note: str


FORWARD = Quality(
    values={
        TIME: Column("time", Unit.SECONDS),
        "time_per_pass_s": Column("time per pass", Unit.SECONDS),
        "half_step_error": Column("half-step error / eps", Unit.NUMBER),
        "residual_l1": Column("residual L1", Unit.NUMBER),
    },
    error="half_step_error",
    note="Error: half-step error / eps against the points as given",
)


def report(df: pd.DataFrame, out_dir: Path, quality: Quality = FORWARD) -> list[Path]:
    """speedups.* (a summary, then an n x d table a pair), table.* (these and every cell), time against n and d; and
    floor.* where the chip's own limits are known."""
    floors: list[Table] = []
    ratios: list[Table] = []
    every_cell: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        for setting, of_setting in _settings(part):
            pairs = _pairs(of_setting)
            ratios.append(_summary(of_setting, pairs, quality, f"Speed-ups on {device}{setting}"))
            ratios += [_grid(of_setting, pair, f"on {device}{setting}") for pair in pairs]
            floors += floor.tables(of_setting, f"on {device}{setting}")
        every_cell += cells(part, quality.values, title=f"{time_words(part)}, median", notes=[throughput_note(part)])
        for x in ("n", "d"):
            if x == "n" or part["d"].nunique() > 1:
                drawn = figures.scaling(part, x=x, y=TIME, title=f"{time_words(part)} on {device}")
                paths += figures.save(drawn, out_dir, f"time_{x}{suffix}")
    paths += write(floors, out_dir, "floor") if floors else []
    return write([*ratios, *floors, *every_cell], out_dir) + write(ratios, out_dir, "speedups") + paths


def _settings(df: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Parts that differ in n and d alone, each with the end of a title that says what it holds fixed."""
    # m counts only where it is a choice of its own.
    df = df.assign(shape=["m = n" if n == m else f"m = {count_text(m)}" for n, m in zip(df["n"], df["m"], strict=True)])
    if df.empty:
        yield "", df
        return
    told = [key for key in _SETTINGS if key in ("problem", "eps") or df[key].nunique(dropna=False) > 1]
    for _, part in df.groupby(told, dropna=False):
        facts = part[told].iloc[0].items()
        said = [fact if isinstance(fact, str) else f"{key} = {number_text(fact)}" for key, fact in facts]
        yield f" ({', '.join(said)})", part


def _pairs(part: pd.DataFrame) -> list[tuple[str, str]]:
    device = "cuda" if (part["device"] == "cuda").any() else "cpu"
    return [pair for pair in PAIRS[device] if pair[0] in set(part["solver"])]


def _ratios(part: pd.DataFrame, pair: tuple[str, str]) -> pd.Series:
    """Speed-ups of a pair by group_id: a number for every comparison, NaN unless both finished."""
    ours, theirs = pair
    known = speedups(part, ours).reindex(index=part["group_id"].unique(), columns=[theirs])
    return known[theirs].astype(float)


def _summary(part: pd.DataFrame, pairs: list[tuple[str, str]], quality: Quality, title: str) -> Table:
    """A row a pair: geometric mean, median and least cell, and the largest error of each over the cells they share."""
    columns = [Column("ours"), Column("over"), Column("cells")]
    columns += [Column(name, Unit.RATIO) for name in ("geometric mean", "median", "least")]
    columns += [Column("least at"), Column("cells not faster", Unit.EXACT)]
    columns += [Column(f"error, {whose}", Unit.NUMBER) for whose in ("ours", "other")]
    groups = part.drop_duplicates("group_id").set_index("group_id")
    rows: list[list[Entry]] = []
    for ours, theirs in pairs:
        ratios = _ratios(part, (ours, theirs))
        both = ratios.dropna()
        row: list[Entry] = [label(ours), label(theirs), f"{len(both)} of {len(ratios)}"]
        if both.empty:
            rows.append([*row, *[None] * (len(columns) - len(row))])
            continue
        least = groups.loc[both.idxmin()]
        shared = part[part["group_id"].isin(both.index)]
        errors = [shared.loc[shared["solver"] == name, quality.error].max() for name in (ours, theirs)]
        row += [float(np.exp(np.log(both).mean())), float(both.median()), float(both.min())]
        row += [f"n = {count_text(least['n'])}, d = {count_text(least['d'])}", float((both <= 1).sum())]
        rows.append([*row, *(None if pd.isna(error) else float(error) for error in errors)])
    notes = [_WHAT, f"{quality.note}, the largest over the cells that both finished.", throughput_note(part)]
    notes += crossed_note(part, {pair: _ratios(part, pair) for pair in pairs})
    if ("flash_sinkhorn", "flash_sinkhorn_pypi_tf32") in pairs:
        notes.append(_EXACT_OVER_TF32)
    return Table(title, columns, rows, notes, key_columns=2)


def _grid(part: pd.DataFrame, pair: tuple[str, str], where: str) -> Table:
    """Rows n, columns d: the pair's speed-up, or how the run that is missing ended."""
    ours, theirs = pair
    ratios = _ratios(part, pair)
    records = {(record["group_id"], record["solver"]): record for _, record in part.iterrows()}
    group_at = {(row["n"], row["d"]): row["group_id"] for _, row in part.drop_duplicates("group_id").iterrows()}
    sizes, dimensions = (sorted(part[axis].dropna().unique()) for axis in ("n", "d"))
    columns = [Column("n", Unit.EXACT), *(Column(f"d = {count_text(d)}", Unit.RATIO) for d in dimensions)]
    rows: list[list[Entry]] = []
    for n in sizes:
        groups = [group_at.get((n, d)) for d in dimensions]
        entries = [
            ratio_entry(ratios.get(group), records.get((group, theirs)), records.get((group, ours))) for group in groups
        ]
        rows.append([float(n), *entries])
    title = f"Speed-up of {label(ours)} over {label(theirs)} {where}"
    return Table(title, columns, rows, legend(rows))

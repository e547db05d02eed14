"""Up to which dimension does leaving out pairs of points pay, against the dense solver at the same residual?

The same family from d = 1 to 10, at blurs of so many mean spacings: at small d few tiles of points meet, at large d all
do, and what is then left of the multiscale solver is its overhead and its faster iterations.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import BLUR, BLUR_NOTE, PASSES_NOTE, ratio_entry, with_counts
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, speedups
from fsbench.report.style import label
from fsbench.report.tables import Column, Entry, Table, Unit, entry, legend, write

OURS, DENSE = "flash_sinkhorn2", "flash_sinkhorn"
_FIGURES = {"share_kept": "Share of pairs kept", TIME: "Time to the residual target"}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (a row a dimension and blur), figures of the share kept and of times against d."""
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        part = with_counts(part)
        part = part.assign(share_kept=(part["kept_pairs"] / part["m"]).clip(upper=1.0))  # tiles are padded
        tables.append(_dimensions(part, device))
        for column, title in _FIGURES.items():
            shown = part[part["share_kept"].notna()] if column == "share_kept" else part
            drawn = figures.scaling(shown, x="d", y=column, title=f"{title} on {device}", by=(BLUR, "n"))
            stem = "time" if column == TIME else column
            paths += figures.save(drawn, out_dir, f"{stem}_d{suffix}")
    return write(tables, out_dir) + paths


def _dimensions(df: pd.DataFrame, device: str) -> Table:
    """A row a dimension and blur: the share of pairs kept, both solvers' times, passes and residuals, their ratio."""
    shared = {
        TIME: ("time", Unit.SECONDS),
        "n_passes": ("passes", Unit.PASSES),
        "residual_l1": ("residual", Unit.NUMBER),
    }
    columns = [Column("n", Unit.EXACT), Column(BLUR, Unit.EXACT), Column("d", Unit.EXACT)]
    columns += [Column("pairs kept", Unit.PERCENT)]
    columns += [
        Column(f"{name}, {who}", unit, name) for name, unit in shared.values() for who in ("multiscale", "dense")
    ]
    columns += [Column("dense over multiscale", Unit.RATIO)]
    ratios = speedups(df, OURS)
    dense_over_ours = ratios[DENSE] if DENSE in ratios else pd.Series(dtype=float)
    records = {(record["group_id"], record["solver"]): record for _, record in df.iterrows()}
    rows: list[list[Entry]] = []
    losses: dict[float, list[str]] = {}
    facts = df.drop_duplicates("group_id").sort_values(["n", BLUR, "d"]).set_index("group_id")
    for group, fact in facts.iterrows():
        ours, dense = records.get((group, OURS)), records.get((group, DENSE))
        share = entry(ours, "share_kept")
        ratio = dense_over_ours.get(group)
        rows.append(
            [
                fact["n"], fact[BLUR], fact["d"], 100 * share if isinstance(share, float) else share,
                *(entry(record, column) for column in shared for record in (ours, dense)),
                ratio_entry(ratio, dense, ours),
            ]
        )  # fmt: skip
        if ratio is not None and ratio < 1:
            losses.setdefault(fact[BLUR], []).append(f"{fact['d']:.0f}")
    where = "; ".join(f"d = {', '.join(at)} at blur {blur:g}" for blur, at in losses.items()) or "none"
    notes = [
        f"Multiscale: {label(OURS)}, for d of at most 6; dense: {label(DENSE)}, faster where both finished: {where}.",
        BLUR_NOTE,
        PASSES_NOTE,
        *legend(rows),
    ]
    return Table(f"Share of pairs kept and time over dimension, on {device}", columns, rows, notes, key_columns=3)

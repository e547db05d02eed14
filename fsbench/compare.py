"""Two sets of records, cell by cell: what broke first, then how the times moved."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fsbench import collect, stats
from fsbench.progress import busy_machine, describe, format_seconds
from fsbench.records import Record, Status

_GOOD = (Status.OK, Status.NOT_CONVERGED)
# A residual moves with the order of summation; twice as large is another computation.
_RESIDUAL_FACTOR = 2.0
_RESIDUAL_FLOOR = 1e-6
# Slower means all three: by this much, hardly by chance, and by more than the old samples' own spread.
_SLOWER_RATIO = 1.05
_SLOWER_P = 0.002
_AGREES = 0.03  # two runs of the same code agree where their medians differ by no more


@dataclass(frozen=True)
class Comparison:
    """`broken`: cells that lost their result or their accuracy. `pairs`: (old, new, time ratio new / old, p).

    `busy`: a line for each side some of whose times other processes may have made longer.
    """

    broken: tuple[str, ...]
    pairs: tuple[tuple[Record, Record, float, float], ...]
    n_only_old: int
    n_only_new: int
    busy: tuple[str, ...]

    @property
    def slower(self) -> tuple[tuple[Record, Record, float, float], ...]:
        """The pairs whose slowdown is significant: ratio, Mann-Whitney p, and more than the old interquartile range."""

        def spread(record: Record) -> float:
            found = stats.quartiles(record["samples_s"])
            return (found.q75 - found.q25) / found.median

        return tuple(
            pair
            for pair in self.pairs
            if pair[2] > _SLOWER_RATIO and pair[3] < _SLOWER_P and pair[2] - 1 > spread(pair[0])
        )

    @property
    def passes(self) -> bool:
        """Nothing broke, nothing is slower, and no cell of the old records is missing."""
        return not (self.broken or self.slower or self.n_only_old)


def baseline_for(new: Path, root: Path) -> Path:
    """The folder <gpu> under `root` for the machine that measured `new`. FileNotFoundError if there is none."""
    measurements, environments = collect.read(new)
    slug = collect.gpu_slug(next(row for row in environments if row["env_id"] == measurements[-1]["env_id"]))
    if not (root / slug).is_dir():
        raise FileNotFoundError(f"no baseline {root / slug}: make one with fsbench collect {new} --out {root}")
    return root / slug


def compare(old: Path, new: Path) -> Comparison:
    """Match the newest record of each cell. Raises FileNotFoundError or ValueError as `collect.read` does."""
    (old_rows, old_machines), (new_rows, new_machines) = collect.read(old), collect.read(new)
    before = {record["cell_id"]: record for record in collect.newest(old_rows)}
    after = {record["cell_id"]: record for record in collect.newest(new_rows)}
    broken, pairs = [], []
    for cell_id in before.keys() & after.keys():
        a, b = before[cell_id], after[cell_id]
        if reason := _worse(a, b):
            broken.append(f"{describe(b)}: {reason}")
        elif a["status"] in _GOOD and b["status"] in _GOOD:
            pairs.append((a, b, *stats.compare(a["samples_s"], b["samples_s"])))
    pairs.sort(key=lambda pair: (pair[0]["problem"], pair[0]["n"], pair[0]["d"], pair[0]["eps"], pair[0]["solver"]))
    sides = (("old", [pair[0] for pair in pairs], old_machines), ("new", [pair[1] for pair in pairs], new_machines))
    busy = [f"{name}: {line}" for name, timed, machines in sides for line in busy_machine(timed, machines)]
    n_only_old, n_only_new = len(before.keys() - after.keys()), len(after.keys() - before.keys())
    return Comparison(tuple(sorted(broken)), tuple(pairs), n_only_old, n_only_new, tuple(busy))


def show(comparison: Comparison, console: Console) -> None:
    """Print what broke, each cell's median times and their relative difference, slowdowns marked, and a summary."""
    if comparison.broken:
        console.print(Text(f"{len(comparison.broken)} cells got worse; their times are not compared:", style="red"))
        console.print(Group(*(Text(f"  {line}") for line in comparison.broken)), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", overflow="fold")
    for name in ("old", "new", "difference", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for a, b, ratio, p in comparison.pairs:
        name = describe(b) + _params_of_twins(b, comparison.pairs)
        times = [format_seconds(record["time_to_solution_s"]) for record in (a, b)]
        mark = "  slower" if (a, b, ratio, p) in comparison.slower else ""
        table.add_row(name, *times, f"{_percent(ratio)}{mark}", f"{p:.2g}", style="red" if mark else None)
    console.print(table)
    console.print(
        f"{len(comparison.pairs)} cells compared, {comparison.n_only_old} only in the old records, "
        f"{comparison.n_only_new} only in the new"
    )
    if comparison.pairs:
        console.print(Text(_differences(comparison.pairs)), soft_wrap=True)
    for line in comparison.busy:
        console.print(Text(line, style="red"), soft_wrap=True)


def _differences(pairs: tuple[tuple[Record, Record, float, float], ...]) -> str:
    """How far apart the medians are: one line. A cell that halves and one that doubles are equally far."""
    worst = max(pairs, key=lambda pair: abs(math.log(pair[2])))
    sizes = [abs(pair[2] - 1) for pair in pairs]
    agree = sum(size <= _AGREES for size in sizes)
    return (
        f"median time, new against old: differs by {100 * stats.quartiles(sizes).median:.1f} % in the median cell, "
        f"worst {_percent(worst[2])} ({describe(worst[1])}); {agree} of {len(pairs)} within {100 * _AGREES:g} %"
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _worse(old: Record, new: Record) -> str | None:
    if old["status"] in _GOOD and new["status"] not in _GOOD:
        return f"{old['status']} -> {new['status']}: {new['status_detail']}"
    if old["status"] == Status.OK and new["status"] == Status.NOT_CONVERGED:
        return "ok -> not_converged"
    was, now = old["residual_l1"], new["residual_l1"]
    if was is not None and now is not None and now > max(_RESIDUAL_FACTOR * was, _RESIDUAL_FLOOR):
        return f"residual {was:.1e} -> {now:.1e}"
    return None


def _params_of_twins(record: Record, pairs: tuple[tuple[Record, Record, float, float], ...]) -> str:
    """The settings, where one solver was run with several at one size."""
    twins = [pair[1] for pair in pairs if describe(pair[1]) == describe(record)]
    if len(twins) < 2:
        return ""
    return " " + " ".join(f"{key}={value}" for key, value in json.loads(record["solver_params"]).items())

"""Do error and time stay flat as eps falls, at fixed iterations and to a residual?

The question of the low-eps experiment of FlashSinkhorn (arXiv 2602.03067): n = 10,000, d = 64, eps 0.1, 0.05, 0.01.
The half-step error, over eps, is the arithmetic's own: an exact update has none, whatever eps and however far from
convergence. Published in FP32: 4e-5 to 7.7e-4.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common import FP32, PUBLISHED, TEN_BIT, precision, throughput_note
from experiments.general import LOOKS
from fsbench.report import figures
from fsbench.report.analysis import TIME, by_device, time_words
from fsbench.report.tables import Column, Table, Unit, cells, write

PUBLISHED_ERRORS = (4e-5, 7.7e-4)  # half-step error in FP32, from the largest eps to the smallest
_SLUGS = {FP32: "fp32", TEN_BIT: "10bit"}
_VALUES = {
    TIME: Column("time", Unit.SECONDS),
    "n_passes": Column("passes", Unit.PASSES),
    "time_per_pass_s": Column("time per pass", Unit.SECONDS),
    "half_step_error": Column("half-step error / eps", Unit.NUMBER),
    "residual_l1": Column("residual L1", Unit.NUMBER),
}


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """table.* (a block for each precision and budget), and figures of error and time against eps."""
    tables: list[Table] = []
    paths = []
    for device, suffix, part in by_device(df):
        for grade in (FP32, TEN_BIT):
            of_grade = part[precision(part) == grade]
            if of_grade.empty and grade == TEN_BIT:
                continue  # no solver of this grade runs on a CPU
            for mode in [mode for mode in ("fixed_iterations", "to_residual") if (of_grade["mode"] == mode).any()]:
                budget = of_grade[of_grade["mode"] == mode]
                fixed = mode == "fixed_iterations"
                notes = [throughput_note(budget) if fixed else LOOKS]
                if fixed and grade == FP32:
                    low, high = PUBLISHED_ERRORS
                    notes.append(f"Half-step error, {PUBLISHED}: {low:g} to {high:g} in FP32, not measured here.")
                tables += cells(budget, _VALUES, title=f"{time_words(budget)}, {grade}, median", notes=notes)
                error = f"Half-step error {'at fixed iterations' if fixed else 'at the residual target'}"
                for column, name, what in ((TIME, "time", time_words(budget)), ("half_step_error", "error", error)):
                    title = f"{what}, {grade}, on {device}"
                    drawn = figures.scaling(budget, x="eps", y=column, title=title)
                    paths += figures.save(drawn, out_dir, f"{name}_{mode}_{_SLUGS[grade]}{suffix}")
    return write(tables or cells(df, _VALUES), out_dir) + paths

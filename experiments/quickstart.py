"""How long does each solver take to bring the colours of two photographs to a given residual?

Pixel clouds of two photographs in the unit colour cube, d = 3. Time counts only where the residual, measured by the
harness, is at the target or below.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import general
from fsbench.report import figures
from fsbench.report.analysis import by_device

_LOOKS = (
    "Solvers look at their residual at different intervals (FlashSinkhorn and the torch baselines every iteration on a"
    " CPU, OTT-JAX and POT every 10th), so compare time per pass as well."
)


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """The general report (time and passes of every cell, memory, counts reached) and anytime curves."""
    paths = general.report(df, out_dir, looks=_LOOKS)
    for device, suffix, part in by_device(df):
        figure = figures.anytime(part, title=f"Residual against time on {device}")
        paths += figures.save(figure, out_dir, f"anytime{suffix}")
    return paths

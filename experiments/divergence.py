"""How long does a debiased Sinkhorn divergence take, its value alone, against the published flash-sinkhorn package?

S_eps = OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2 after a fixed number of iterations of each of the three
problems. FlashSinkhorn's iteration of a self problem is one sweep, the package's two.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments import forward
from experiments.forward import Quality
from fsbench.report.analysis import TIME
from fsbench.report.tables import Column, Unit

DIVERGENCE = Quality(
    values={
        TIME: Column("time", Unit.SECONDS),
        "n_passes": Column("passes", Unit.PASSES),
        "value": Column("value", Unit.NUMBER),
        "value_rel_err": Column("value error", Unit.NUMBER),
        "half_step_error": Column("half-step error / eps", Unit.NUMBER),
        "residual_l1": Column("residual L1", Unit.NUMBER),
        "self_residual_l1": Column("self residual L1", Unit.NUMBER),
    },
    error="value_rel_err",
    note="Error: of the value, relative, against the float64 dual values of the solver's own potentials on the points"
    " as given",
)


def report(df: pd.DataFrame, out_dir: Path) -> list[Path]:
    """As `forward.report`, with the value and its error; self residual: the larger of the two self problems'."""
    return forward.report(df, out_dir, DIVERGENCE)

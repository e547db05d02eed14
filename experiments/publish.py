"""Published records to the tables and figures beside them: results/published/<gpu>/<experiment>/ from its Parquet."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fsbench import compose
from fsbench.report import load

PUBLISHED = compose.ROOT / "results" / "published"


def report_of(experiment: str) -> Callable[[pd.DataFrame, Path], list[Path]]:
    """report(df, out_dir) as conf/experiment/<experiment>.yaml names it, else experiments.<experiment>.report."""
    dotted = compose.experiment_value(experiment, "report") or f"experiments.{experiment}.report"
    module, _, function = dotted.rpartition(".")
    return getattr(importlib.import_module(module), function)


def publish(parquet: Path, out_dir: Path | None = None) -> list[Path]:
    """Write the report of one <gpu>/<experiment>.parquet into out_dir, by default the folder of that name beside it."""
    return report_of(parquet.stem)(load(parquet), out_dir or parquet.with_suffix(""))


def published(root: Path | None = None) -> list[Path]:
    """The measurement files <gpu>/<experiment>.parquet under `root`, by default results/published."""
    return sorted(path for path in (root or PUBLISHED).glob("*/*.parquet") if path.stem != "environments")

"""Published records to the tables and figures beside them: results/published/<gpu>/<experiment>/ from its Parquet."""

from __future__ import annotations

from pathlib import Path

from fsbench import compose
from fsbench.find_report import report_function, report_name
from fsbench.report import load

PUBLISHED = compose.ROOT / "results" / "published"


def publish(parquet: Path, out_dir: Path | None = None) -> list[Path]:
    """Write the report of one <gpu>/<experiment>.parquet into out_dir, by default the folder of that name beside it."""
    write = report_function(report_name(parquet.stem))
    return write(load(parquet), out_dir or parquet.with_suffix(""))


def published(root: Path | None = None) -> list[Path]:
    """The measurement files <gpu>/<experiment>.parquet under `root`, by default results/published."""
    return sorted(path for path in (root or PUBLISHED).glob("*/*.parquet") if path.stem != "environments")

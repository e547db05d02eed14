"""Records from disk into one data frame: measurements joined with their environments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fsbench.records import ENVIRONMENTS, MEASUREMENTS, Status, read_lines, upgraded

_IDENTITY = ["cell_id", "code_id", "env_id"]
_ENVIRONMENT_ONLY = [name for name in ENVIRONMENTS.names if name not in MEASUREMENTS.names]


def load(path: str | Path) -> pd.DataFrame:
    """The latest record of each (cell_id, code_id, env_id) under `path`, with its environment's columns.

    `path` is a run folder (measurements*.jsonl, environments*.jsonl), a Parquet file, or a folder of Parquet files.
    Every column of both schemas is present; numbers are float64 with NaN for missing (inf and text included), flags
    are pandas booleans, text is str or None. Raises FileNotFoundError if there are no records at `path`, ValueError
    if they follow a schema version that is not known.
    """
    path = Path(path)
    measurements, environments = _read(path)
    try:
        return join(map(upgraded, measurements), environments)
    except ValueError as error:
        raise ValueError(f"{path} has {error}") from error


def join(measurements: Iterable[dict[str, Any]], environments: Iterable[dict[str, Any]] = ()) -> pd.DataFrame:
    """The data frame `load` returns, from rows in memory."""
    frame = _typed(list(measurements), pa.schema([*MEASUREMENTS, *[ENVIRONMENTS.field(n) for n in _ENVIRONMENT_ONLY]]))
    by_id = {row.get("env_id"): row for row in environments}
    known = frame["env_id"].isin(by_id)
    if known.any():
        looked_up = _typed([by_id[env_id] for env_id in frame.loc[known, "env_id"]], ENVIRONMENTS)
        looked_up.index = frame.index[known]
        for name in _ENVIRONMENT_ONLY:
            column = looked_up[name].reindex(frame.index)
            frame[name] = frame[name].where(frame[name].notna(), column)
    frame.loc[~frame["status"].isin(list(Status)), "status"] = None
    frame = frame.sort_values("started_at", kind="stable", na_position="first")
    return frame.drop_duplicates(_IDENTITY, keep="last").sort_index().reset_index(drop=True)


def _read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if path.is_dir():
        if lines := sorted(path.glob("measurements*.jsonl")):
            rows = [row for file in lines for row in read_lines(file) if isinstance(row, dict)]
            environments = [row for file in sorted(path.glob("environments*.jsonl")) for row in read_lines(file)]
            return rows, [row for row in environments if isinstance(row, dict)]
        if files := sorted(path.glob("*.parquet")):
            return _read_parquet(files, files)
        raise FileNotFoundError(f"no records in {path}: expected measurements.jsonl or *.parquet there")
    if path.is_file():
        return _read_parquet([path], sorted(path.parent.glob("*.parquet")))
    raise FileNotFoundError(f"no records at {path}: give a run folder or a Parquet file")


def _read_parquet(files: list[Path], environment_files: list[Path]) -> tuple[list[dict], list[dict]]:
    """Rows of the measurement files among `files`, and of the environment files among `environment_files`."""

    def rows(candidates: list[Path], measured: bool) -> list[dict]:
        chosen = [file for file in candidates if ("cell_id" in pq.read_schema(file).names) is measured]
        return [row for file in chosen for row in pq.ParquetFile(file).read().to_pylist()]

    return rows(files, True), [row for row in rows(environment_files, False) if row.get("env_id")]


def _typed(rows: list[dict[str, Any]], schema: pa.Schema) -> pd.DataFrame:
    columns = {field.name: _column([row.get(field.name) for row in rows], field.type) for field in schema}
    return pd.DataFrame(columns, index=range(len(rows)))


def _column(values: list[Any], kind: pa.DataType) -> pd.Series:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce").astype("float64")
        return numbers.where(np.isfinite(numbers))
    if pa.types.is_boolean(kind):
        flags = {"true": True, "false": False}
        return pd.Series([flags.get(str(value).lower()) for value in values], dtype="boolean")
    if pa.types.is_list(kind):
        return pd.Series([list(v) if isinstance(v, list | tuple) else [] for v in values], dtype=object)
    return pd.Series([value if isinstance(value, str) else None for value in values], dtype=object)

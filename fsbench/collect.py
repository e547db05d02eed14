"""Run folders into the published tables: one Parquet file a GPU and experiment, one row a cell."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fsbench.records import (
    ENVIRONMENTS,
    MEASUREMENTS,
    Record,
    check_record,
    environments_in,
    holds_a_run,
    read_lines,
    upgraded,
)


def read(path: Path) -> tuple[list[Record], list[Record]]:
    """(measurements, environments) of a run folder, of a Parquet file and its folder, or of a folder of Parquet files.

    Raises FileNotFoundError if nothing is there, ValueError if a record has a schema version that is not known.
    """
    if path.is_file() and path.suffix == ".parquet":
        measurements, environments = _parquet([path]), _parquet([path.parent / "environments.parquet"])
    elif lines := sorted(path.glob("measurements*.jsonl")):
        measurements = [record for file in lines for record in read_lines(file)]
        environments = environments_in(path)
    elif files := sorted(path.glob("*.parquet")):
        measurements = _parquet([file for file in files if file.stem != "environments"])
        environments = _parquet([path / "environments.parquet"])
    else:
        below = [folder for folder in path.glob("*/") if holds_a_run(folder) or any(folder.glob("*.parquet"))]
        hint = f"; did you mean {below[0]}?" if len(below) == 1 else ""
        raise FileNotFoundError(f"no records in {path}: expected measurements.jsonl or Parquet files there{hint}")
    try:
        return [upgraded(record) for record in measurements], environments
    except ValueError as error:
        raise ValueError(f"{path} has {error}") from error


def newest(measurements: Iterable[Record]) -> list[Record]:
    """One record a cell_id, the one started last, in order of first appearance: a later failure replaces a success."""
    last: dict[str, Record] = {}
    for record in sorted(measurements, key=lambda record: record["started_at"]):
        last[record["cell_id"]] = record
    order = dict.fromkeys(record["cell_id"] for record in measurements)
    return [last[cell_id] for cell_id in order]


def collect(folders: Iterable[Path], out_dir: Path) -> list[Path]:
    """Merge run folders, and what `out_dir` already holds, into out_dir/<gpu>/<experiment>.parquet.

    Of several records of a cell the newest stays. Environments are kept in out_dir/<gpu>/environments.parquet.
    Returns the files written. Raises as `read` does, and ValueError for a record without its environment.
    """
    measurements: list[Record] = []
    environments: dict[str, Record] = {}
    for folder in folders:
        found, rows = read(folder)
        measurements += found
        environments |= {row["env_id"]: row for row in rows}
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in measurements:
        check_record(record)
        if record["env_id"] not in environments:
            raise ValueError(f"record {record['record_id']} has no environment {record['env_id']}: copy both files")
        groups[gpu_slug(environments[record["env_id"]]), record["experiment"]].append(record)
    written = []
    for (gpu, experiment), records in sorted(groups.items()):
        path = out_dir / gpu / f"{experiment}.parquet"
        before, rows = read(path) if path.exists() else ([], [])
        kept = newest([*before, *records])
        known = {row["env_id"]: row for row in rows} | environments
        _write(kept, MEASUREMENTS, path)
        environment_path = path.parent / "environments.parquet"
        others = {row["env_id"]: row for row in _parquet([environment_path])}
        used = {record["env_id"] for record in kept}
        _write([*(others | {e: known[e] for e in used}).values()], ENVIRONMENTS, environment_path)
        written += [path, environment_path]
    return list(dict.fromkeys(written))


def gpu_slug(environment: Record) -> str:
    """'NVIDIA H200' -> 'h200'; 'cpu' without a GPU."""
    name = environment.get("gpu_name")
    if not name:
        return "cpu"
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def _parquet(files: Iterable[Path]) -> list[Record]:
    return [row for file in files if file.exists() for row in pq.ParquetFile(file).read().to_pylist()]


def _write(rows: list[Record], schema: pa.Schema, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), unfinished)
    unfinished.replace(path)

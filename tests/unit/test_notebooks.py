"""Notebooks read published results and run from top to bottom, with results and without."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_factory import GPU, record

from experiments import publish
from fsbench.records import ENVIRONMENTS, MEASUREMENTS, Status

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def run(path: Path) -> list[Any]:
    """Execute the code cells in one namespace; returns what they displayed."""
    shown: list[Any] = []
    namespace = {"display": shown.append, "__name__": "__main__"}
    for number, source in enumerate(code_cells(path)):
        exec(compile(source, f"{path.name}[{number}]", "exec"), namespace)
    return shown


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_the_published_results_of_this_repository(path):
    run(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_says_so_when_nothing_is_published(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(publish, "PUBLISHED", tmp_path)
    assert run(path) == []
    assert "No published results yet" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_shows_tables_and_figures(path, tmp_path, monkeypatch):
    rows = [record(s, n=n, eps=0.1, mode="to_residual", tol=1e-2) for s in ("keops", "toy") for n in (1000, 2000)]
    rows.append(record("tensorized", status=Status.OOM, n=2000, mode="to_residual", tol=1e-2))
    folder = tmp_path / "h200"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=MEASUREMENTS), folder / "quickstart.parquet")
    pq.write_table(pa.Table.from_pylist([GPU], schema=ENVIRONMENTS), folder / "environments.parquet")
    monkeypatch.setattr(publish, "PUBLISHED", tmp_path)
    shown = run(path)
    texts = [one._repr_markdown_() for one in shown if hasattr(one, "_repr_markdown_")]
    pictures = [one._repr_png_() for one in shown if hasattr(one, "_repr_png_")]
    assert len(texts) + len(pictures) == len(shown)
    assert any("OOM" in text and "NVIDIA H200" in text for text in texts)
    assert len(pictures) >= 4 and all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_reads_published_results_only_and_carries_no_output(path):
    source = "\n".join(code_cells(path))
    assert "jsonl" not in source and "results/raw/" not in source.replace("fsbench collect results/raw/", "")
    assert not any(word in source for word in ("import torch", "import jax", "solvers."))
    assert all(not cell.get("outputs") for cell in json.loads(path.read_text())["cells"])

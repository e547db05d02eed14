"""The README's generated blocks are the records' own tables."""

from pathlib import Path

import pytest
from record_factory import record
from test_report_load import write_parquet

from experiments import readme
from experiments.publish import publish, published

ROOT = Path(__file__).parents[2]
TEXT = """# Title

before
<!-- generated: table2/h200 -->
typed by hand
<!-- end -->
between
<!-- generated: table2/h200/time.png -->
<!-- end -->
after
"""


@pytest.fixture(autouse=True)
def figures_by_name(monkeypatch):
    """READMEs link figures and hold nothing of them; drawing takes most of a report's time."""

    def save(figure, out_dir, stem):
        out_dir.mkdir(parents=True, exist_ok=True)
        paths = [out_dir / f"{stem}.png", out_dir / f"{stem}.svg"]
        for path in paths:
            path.touch()
        return paths

    monkeypatch.setattr("fsbench.report.figures.save", save)


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "results" / "published" / "h200", "table2", [record("keops", n=10_000, time_s=0.123)])
    (tmp_path / "README.md").write_text(TEXT)
    return tmp_path


def run(folder, *more):
    place = ["--readme", str(folder / "README.md"), "--published", str(folder / "results" / "published")]
    return readme.main([*place, *more])


def test_blocks_are_filled_and_the_rest_is_left(folder, capsys):
    assert run(folder, "--check") == 1
    assert "table2/h200" in capsys.readouterr().err and (folder / "README.md").read_text() == TEXT
    assert run(folder) == 0
    text = (folder / "README.md").read_text()
    assert "typed by hand" not in text and "| KeOps | FP32-grade | 123 |" in text
    assert "](results/published/h200/table2/time.png)" in text
    assert [line for line in text.splitlines() if line in ("before", "between", "after")] == [
        "before",
        "between",
        "after",
    ]
    assert run(folder, "--check") == 0
    assert run(folder) == 0 and (folder / "README.md").read_text() == text


def test_figures_are_linked_from_where_a_readme_is(folder):
    path = folder / "solvers" / "README.md"
    path.parent.mkdir()
    path.write_text("<!-- generated: table2/h200/time.png -->\n<!-- end -->\n")
    assert readme.main(["--readme", str(path), "--published", str(folder / "results" / "published")]) == 0
    assert "](../results/published/h200/table2/time.png)" in path.read_text()


def test_a_changed_number_is_found(folder, capsys):
    run(folder)
    path = folder / "README.md"
    path.write_text(path.read_text().replace("| 123 |", "| 12 |"))
    assert run(folder, "--check") == 1
    said = capsys.readouterr().err
    assert "'table2/h200' of" in said and "README.md differs" in said


@pytest.mark.parametrize("name", ["table9/h200", "table2", "table2/h100", "table2/h200/nothing", "a/b/c/d"])
def test_a_block_that_no_report_fills_is_an_error(folder, name, capsys):
    (folder / "README.md").write_text(TEXT.replace("table2/h200 -->", f"{name} -->", 1))
    assert run(folder) == 2
    assert f"'{name}'" in capsys.readouterr().err


def test_publish_writes_beside_the_parquet(folder):
    (parquet,) = published(folder / "results" / "published")
    paths = publish(parquet)
    assert {path.parent for path in paths} == {parquet.with_suffix("")}


def test_the_readme_of_this_repository_agrees_with_its_records():
    assert not (ROOT / "README.md").exists() or readme.main(["--check"]) == 0

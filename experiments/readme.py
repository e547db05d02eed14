"""Keep the READMEs' tables equal to the published records, so that none of their numbers is typed by hand.

`python -m experiments.readme` writes every published report again and fills the marked blocks of all READMEs;
`--check` changes nothing and fails if a block differs from the records. A block is

    <!-- generated: EXPERIMENT/GPU[/TABLE] -->
    ...
    <!-- end -->

where TABLE names a table of the report (default: table) or, ending in .png or .svg, one of its figures.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.publish import PUBLISHED, publish, published
from fsbench.compose import ROOT

READMES = [ROOT / "README.md", *sorted((ROOT / "solvers").glob("*/README.md"))]
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(readme: str, block: Callable[[str], str]) -> str:
    """`readme` with each marked block replaced by block(name)."""
    return _BLOCK.sub(lambda match: f"{match[1]}{block(match[2])}{match[4]}", readme)


def stale(readme: str, block: Callable[[str], str]) -> list[str]:
    """Names of the blocks whose text differs from block(name)."""
    return [name for _, name, text, _ in _BLOCK.findall(readme) if text != block(name)]


def block_from(reports: Path, linked: str) -> Callable[[str], str]:
    """A function from a block's name to its text, out of reports/<gpu>/<experiment>/; `linked` leads figures' links."""

    def block(name: str) -> str:
        experiment, gpu, table = (*name.split("/"), "table")[:3] if name.count("/") in (1, 2) else ("", "", "")
        is_figure = table.endswith((".png", ".svg"))
        path = reports / gpu / experiment / (table if is_figure else f"{table}.md")
        if not experiment or not path.is_file():
            raise ValueError(f"README block '{name}': no such report; blocks are EXPERIMENT/GPU[/TABLE]")
        if is_figure:
            return f"![{experiment} on {gpu}: {path.stem}]({linked}/{gpu}/{experiment}/{table})\n"
        return "\n" + path.read_text(encoding="utf-8") + "\n"

    return block


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 up to date or written, 1 stale blocks under --check, 2 a block that no report fills."""
    parser = argparse.ArgumentParser(prog="python -m experiments.readme", description="Fill READMEs from records.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a README differs")
    parser.add_argument("--readme", type=Path, nargs="+", default=READMES)
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="folder of <gpu>/<experiment>.parquet")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            for parquet in published(options.published):
                publish(parquet)
            for path in options.readme:
                block = block_from(options.published, _link(path, options.published))
                path.write_text(filled(path.read_text(encoding="utf-8"), block), encoding="utf-8")
            return 0
        old = []
        with tempfile.TemporaryDirectory() as folder:
            for parquet in published(options.published):
                publish(parquet, Path(folder) / parquet.parent.name / parquet.stem)
            for path in options.readme:
                block = block_from(Path(folder), _link(path, options.published))
                old += [(path, name) for name in stale(path.read_text(encoding="utf-8"), block)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path, name in old:
        found = f"block '{name}' of {os.path.relpath(path)} differs from the records"
        print(f"{found}: run python -m experiments.readme", file=sys.stderr)
    return 1 if old else 0


def _link(readme: Path, published: Path) -> str:
    """From the folder of a README to that of the reports."""
    return Path(os.path.relpath(published, readme.parent)).as_posix()


if __name__ == "__main__":
    sys.exit(main())

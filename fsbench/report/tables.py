"""One table model, and its Markdown, CSV, LaTeX and terminal forms."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable

from fsbench.records import Status
from fsbench.report.analysis import TIME, by_device, is_counted
from fsbench.report.style import INFERRED, MEANINGS, MISSING, label, status_word, styles

TERMINAL_WIDTH = 100
_GAP = 3  # what rich draws between two columns

Entry = float | str | None  # a number in the column's base unit, a status word or other text, or nothing known


class Unit(Enum):
    """What a column holds, and so how it prints."""

    TEXT = "text"
    EXACT = "exact"  # printed as it is: sizes, eps, counts
    PASSES = "passes"  # whole numbers as they are, others with one decimal: a pass over a sample is a part of one
    NUMBER = "number"
    RATIO = "ratio"
    PERCENT = "percent"
    SECONDS = "seconds"
    BYTES = "bytes"
    GIGABYTES = "gigabytes"  # bytes whose header always says GB


_BASE = {Unit.RATIO: "×", Unit.PERCENT: "%", Unit.SECONDS: "s", Unit.BYTES: "B", Unit.GIGABYTES: "B"}
_MULTIPLES: dict[Unit, list[tuple[float, str]]] = {  # large to small
    Unit.SECONDS: [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")],
    Unit.BYTES: [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")],
    Unit.GIGABYTES: [(1e9, "GB")],
}


@dataclass(frozen=True)
class Column:
    """`scale_with`: columns that name the same scale print in one unit, so that a row can be read across."""

    name: str
    unit: Unit = Unit.TEXT
    scale_with: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of numbers in base units (s, B) or words; how they print is up to the column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()
    key_columns: int = 1  # leading columns that say what a row is: repeated where a table is cut to fit

    def _repr_markdown_(self) -> str:
        return to_markdown(self)


def significant(value: float, digits: int = 3) -> str:
    """`value` at so many significant digits: 1.23, 45.6, 789, 12345, and 1.23e-05 under a thousandth."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    power = math.floor(math.log10(abs(rounded)))
    if power < -3:
        return f"{rounded:.{digits - 1}e}"
    return f"{rounded:.{digits - 1 - power}f}" if power < digits - 1 else f"{value:.0f}"


def entry(record: pd.Series | None, column: str) -> Entry:
    """The number in `column` of a record where it is valid, a dash where it could not be measured, or a status word.

    A cell that did not converge has no time to show; its other numbers are as good as any.
    """
    if record is None:
        return MISSING
    if not is_counted(record["status"], column):
        return status_word(record)
    return MISSING if pd.isna(record[column]) else float(record[column])


def legend(rows: Iterable[Sequence[Entry]]) -> list[str]:
    """A note that explains the status words these rows use; no note if they use none."""
    words = [entry for row in rows for entry in row if isinstance(entry, str)]
    used = [mark for mark in MEANINGS if any(word == mark or word.removesuffix(INFERRED) == mark for word in words)]
    if any(word.endswith(INFERRED) for word in words):
        used.append(INFERRED)
    return ["; ".join(f"{mark} {MEANINGS[mark]}" for mark in dict.fromkeys(used)) + "."] if used else []


def summary(df: pd.DataFrame, *, value: str = TIME, unit: Unit = Unit.SECONDS, title: str = "") -> list[Table]:
    """Every cell of every comparison in its place: rows problem, eps, d and n, columns solvers, failures as words."""
    return [_summary(part, value, unit, f"{title or _TITLE}, on {device}") for device, _, part in by_device(df)]


def cells(df: pd.DataFrame, values: Mapping[str, Column], *, title: str = "", notes: Iterable[str] = ()) -> list[Table]:
    """A row for each cell, the solvers of a comparison next to each other; `values`: record column -> how it prints."""
    return [_cells(part, values, f"{title or _TITLE}, on {device}", notes) for device, _, part in by_device(df)]


def unmeasured(df: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """A note that says why some of these memory columns hold nothing."""
    missing = df["peak_host_bytes"].isna() & df["status"].isin([Status.OK, Status.NOT_CONVERGED])
    if "peak_host_bytes" in columns and (missing & (df["framework"] == "jax") & (df["device"] == "cpu")).any():
        return ["Host memory of JAX on a CPU cannot be measured in its process."]
    return []


# What tells comparisons apart, in the order of rows and columns.
_KEYS = {
    "problem": Unit.TEXT, "dtype": Unit.TEXT, "task": Unit.TEXT, "mode": Unit.TEXT, "tol": Unit.EXACT,
    "max_iterations": Unit.EXACT, "eps": Unit.EXACT, "d": Unit.EXACT, "n": Unit.EXACT, "m": Unit.EXACT,
    "seed": Unit.EXACT,
}  # fmt: skip
_TITLE = "Time to solution, median"


def _summary(df: pd.DataFrame, value: str, unit: Unit, title: str) -> Table:
    solvers = list(styles(df["solver"].dropna()))
    facts, shown, fixed = _comparisons(df)
    columns = [Column(key, _KEYS[key]) for key in shown]
    if not solvers:
        return Table(title, columns, [], ["No records yet."])
    records = {(record["group_id"], record["solver"]): record for _, record in df.iterrows()}
    columns += [Column(label(solver), unit, "value") for solver in solvers]
    rows = [
        [_known(fact[key]) for key in shown] + [entry(records.get((fact["group_id"], name)), value) for name in solvers]
        for _, fact in facts.iterrows()
    ]
    return Table(title + fixed, columns, rows, [*unmeasured(df, [value]), *legend(rows)], len(shown))


def _cells(df: pd.DataFrame, values: Mapping[str, Column], title: str, notes: Iterable[str]) -> Table:
    solvers = list(styles(df["solver"].dropna()))
    facts, shown, fixed = _comparisons(df)
    columns = [*(Column(key, _KEYS[key]) for key in shown), Column("solver"), *values.values()]
    if not solvers:
        return Table(title, columns, [], ["No records yet."])
    records = {(record["group_id"], record["solver"]): record for _, record in df.iterrows()}
    rows = [
        [*(_known(fact[key]) for key in shown), label(name), *(entry(record, column) for column in values)]
        for _, fact in facts.iterrows()
        for name in solvers
        if (record := records.get((fact["group_id"], name))) is not None
    ]
    return Table(title + fixed, columns, rows, [*notes, *unmeasured(df, values), *legend(rows)], len(shown) + 1)


def _comparisons(df: pd.DataFrame) -> tuple[pd.DataFrame, list[str], str]:
    """One row for each comparison in order, the keys that tell them apart, and the end of a title with the others."""
    facts = df.drop_duplicates("group_id")
    facts = facts.sort_values(list(_KEYS), ascending=[key not in ("eps", "tol") for key in _KEYS])
    shown = [key for key in _KEYS if key == "n" or (key != "m" and facts[key].nunique(dropna=False) > 1)]
    if (facts["m"] != facts["n"]).any():
        shown.insert(shown.index("n") + 1, "m")
    if facts.empty:
        return facts, shown, ""
    fixed = ", ".join(_fact(key, facts[key].iloc[0]) for key in ("problem", "eps", "d") if key not in shown)
    return facts, shown, f" ({fixed})" if fixed else ""


def _known(fact: object) -> Entry:
    return MISSING if pd.isna(fact) else fact if isinstance(fact, str) else float(fact)  # type: ignore[arg-type]


def _fact(key: str, value: object) -> str:
    known = _known(value)
    shown = f"{known:g}" if isinstance(known, float) else known
    return str(shown) if key == "problem" else f"{key} = {shown}"


def texts(table: Table) -> tuple[list[str], list[list[str]]]:
    """Headers with units, and every entry as it prints."""
    scales = [_scale(table, index) for index in range(len(table.columns))]
    headers = [f"{c.name} ({name})" if name else c.name for c, (_, name) in zip(table.columns, scales, strict=True)]
    body = [[_text(e, scales[i][0], table.columns[i].unit) for i, e in enumerate(row)] for row in table.rows]
    return headers, body


def _scale(table: Table, index: int) -> tuple[float, str]:
    """The multiple of the column's unit that suits the middle of its numbers."""
    column = table.columns[index]
    multiples = _MULTIPLES.get(column.unit, [(1.0, _BASE.get(column.unit, ""))])
    together = [
        i
        for i, other in enumerate(table.columns)
        if i == index or (column.scale_with is not None and other.scale_with == column.scale_with)
    ]
    entries = [row[i] for row in table.rows for i in together]
    numbers = sorted(e for e in entries if not isinstance(e, str | None) and math.isfinite(e) and e > 0)
    middle = numbers[len(numbers) // 2] if numbers else math.inf
    return next((multiple for multiple in multiples if middle >= multiple[0]), multiples[-1])


def _text(entry: Entry, scale: float, unit: Unit) -> str:
    if isinstance(entry, str):
        return entry
    if entry is None or not math.isfinite(entry):
        return MISSING
    if unit is Unit.EXACT or (unit is Unit.PASSES and entry == round(entry)):
        return f"{entry:.10g}"
    if unit is Unit.PASSES:
        return f"{entry:.1f}"
    return f"{entry:.3g}" if unit is Unit.PERCENT else significant(entry / scale)


def to_markdown(table: Table) -> str:
    """GitHub Markdown: title, table, notes."""
    headers, body = texts(table)
    rule = [":--" if column.unit is Unit.TEXT else "--:" for column in table.columns]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [headers, rule, *body]]
    return "\n".join([f"**{table.title}**", "", *lines, "", *[f"{note}  " for note in table.notes]]).rstrip() + "\n"


def to_csv(table: Table) -> str:
    """Ten digits in base units (s, B), status words in place, nothing for missing."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    base = [_BASE.get(column.unit, "") for column in table.columns]
    writer.writerow([f"{c.name} ({unit})" if unit else c.name for c, unit in zip(table.columns, base, strict=True)])
    for row in table.rows:
        exact = [_text(e, 1.0, Unit.EXACT) for e in row]
        writer.writerow(["" if e == MISSING else e for e in exact])
    return out.getvalue()


_LATEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
    | {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$", "|": "$|$"}
    | {"†": r"$^\dagger$", "×": r"$\times$", "µ": r"\textmu{}", "–": "--", "≈": r"$\approx$"}
)


def to_latex(table: Table) -> str:
    """A booktabs tabular in a table float; needs \\usepackage{booktabs}."""
    headers, body = texts(table)
    layout = "".join("l" if column.unit is Unit.TEXT else "r" for column in table.columns)
    rows = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in [headers, *body]]
    notes = [rf"\par\smallskip\footnotesize {note.translate(_LATEX)}" for note in table.notes]
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{table.title.translate(_LATEX)}}}"]
    lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", *notes, r"\end{table}", ""])


def to_terminal(table: Table, width: int = TERMINAL_WIDTH) -> str:
    """Plain text of at most `width` columns; a wider table is cut into blocks that repeat the key columns."""
    headers, body = texts(table)
    headers = [header.replace(" (", "\n(") for header in headers]
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table.title)
    columns = [[headers[i], *(row[i] for row in body)] for i in range(len(headers))]
    least = [max(len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    for block in _blocks(least, table.key_columns, width):
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        left = width - sum(least[i] + _GAP for i in block)
        for i in sorted(block, key=lambda i: table.columns[i].unit is not Unit.TEXT):  # text is widened first
            extra = min(max(len(line) for text in columns[i] for line in text.splitlines() or [""]) - least[i], left)
            least[i], left = least[i] + max(extra, 0), left - max(extra, 0)
        for i in block:
            justify: JustifyMethod = "left" if table.columns[i].unit is Unit.TEXT else "right"
            drawn.add_column(headers[i], justify=justify, width=least[i])
        for row in body:
            drawn.add_row(*[row[i] for i in block])
        console.print(drawn)
    for note in table.notes:
        console.print(note)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _blocks(least: list[int], key_columns: int, width: int) -> list[list[int]]:
    """Column numbers of each block: as many as fit without breaking a word."""
    keys = list(range(key_columns))
    blocks = [keys.copy()]
    for i in range(key_columns, len(least)):
        if len(blocks[-1]) > key_columns and sum(least[j] + _GAP for j in [*blocks[-1], i]) > width:
            blocks.append(keys.copy())
        blocks[-1].append(i)
    return blocks


_FORMS = {"md": to_markdown, "csv": to_csv, "tex": to_latex, "txt": to_terminal}


def write(tables: Sequence[Table], out_dir: Path, stem: str = "table") -> list[Path]:
    """Write `tables`, one after another, as stem.{md,csv,tex,txt}; returns the paths."""
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, form in _FORMS.items():
        path = out_dir / f"{stem}.{suffix}"
        path.write_text("\n".join(form(table) for table in tables), encoding="utf-8")
        paths.append(path)
    return paths

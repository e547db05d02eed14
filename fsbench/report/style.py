"""How a solver looks in every figure: its label, colour, marker and line never depend on what else is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from fsbench.records import Status

MISSING = "–"
INFERRED = "†"
LATE = "late"
WORDS = {
    Status.OOM: "OOM",
    Status.TIMEOUT: "OOT",
    Status.UNSUPPORTED: "n/s",
    Status.ERROR: "err",
    Status.NOT_CONVERGED: "n/c",
}
MEANINGS = {
    "OOM": "out of memory",
    "OOT": "out of time",
    "n/s": "not supported by this solver",
    "err": "error",
    "n/c": "residual target not reached",
    LATE: "residual target reached, but after max_seconds",
    INFERRED: "inferred: a smaller size of the series already ended so",
    MISSING: "no measurement",
}


@dataclass(frozen=True)
class SolverStyle:
    label: str
    colour: str
    marker: str
    line: Literal["-", "--", ":"] = "-"


# Okabe & Ito (2008) without yellow, and shades of Paul Tol's muted set: told apart in all common colour blindness.
_SOLVERS = {
    "flash_sinkhorn": SolverStyle("FlashSinkhorn", "#D55E00", "o"),
    "flash_sinkhorn_fast": SolverStyle("FlashSinkhorn, 10-bit", "#E69F00", "o", "--"),
    "flash_sinkhorn_mixed": SolverStyle("FlashSinkhorn, mixed", "#A6611A", "o", ":"),
    "flash_sinkhorn2": SolverStyle("FlashSinkhorn2 (ours)", "#882255", "D"),
    "flash_sinkhorn2_published": SolverStyle("published method, our tiles", "#0072B2", "D", ":"),
    "flash_sinkhorn2_plain": SolverStyle("FlashSinkhorn2, alternating", "#777777", "<", ":"),
    "flash_sinkhorn2_anderson": SolverStyle("FlashSinkhorn2, Anderson alone", "#44AA99", ">", ":"),
    "flash_sinkhorn2_lite": SolverStyle("FlashSinkhorn2, lite correction", "#117733", "d", "--"),
    "flash_sinkhorn2_unthinned": SolverStyle("FlashSinkhorn2, brief masks, not thinned", "#DDCC77", "8", "--"),
    "flash_sinkhorn2_brief": SolverStyle("FlashSinkhorn2, brief masks", "#E69F00", "X", "--"),
    "flash_sinkhorn2_tile16": SolverStyle("FlashSinkhorn2, tiles of 16", "#CC6677", "H", ":"),
    "flash_sinkhorn2_tile64": SolverStyle("FlashSinkhorn2, tiles of 64", "#661100", "H", "--"),
    "flash_sinkhorn_pypi_fp32": SolverStyle("flash-sinkhorn PyPI, FP32", "#0072B2", "s"),
    "flash_sinkhorn_pypi_tf32": SolverStyle("flash-sinkhorn PyPI, TF32", "#56B4E9", "s", "--"),
    "flash_sinkhorn_pypi_symmetric_tf32": SolverStyle("flash-sinkhorn PyPI symmetric, TF32", "#332288", "s", ":"),
    "flash_sinkhorn_pypi_multiscale": SolverStyle("flash-sinkhorn PyPI multiscale, TF32", "#88CCEE", "D", "--"),
    "keops": SolverStyle("KeOps", "#009E73", "^"),
    "tensorized": SolverStyle("tensorized", "#000000", "v"),
    "ott_jax_dense": SolverStyle("OTT-JAX dense", "#CC79A7", "P"),
    "ott_jax_online": SolverStyle("OTT-JAX online", "#AA4499", "p", "--"),
    "geomloss_multiscale": SolverStyle("GeomLoss multiscale", "#999933", "*"),
    "pot": SolverStyle("POT", "#777777", "h"),
}
_OTHERS = tuple(
    zip(
        ("#117733", "#44AA99", "#661100", "#6699CC", "#AA4466", "#4B0092", "#B8860B", "#5A5A5A"),
        ("<", ">", "d", "H", "8", "X", "*", "h"),
        strict=True,
    )
)


def styles(solvers: Iterable[str]) -> dict[str, SolverStyle]:
    """A style for each solver, known ones first; others start from a place their name fixes and avoid each other."""
    names = list(dict.fromkeys(solvers))
    chosen = {name: _SOLVERS[name] for name in _SOLVERS if name in names}
    taken: set[int] = set()
    for name in sorted(set(names) - set(chosen)):
        place = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(_OTHERS)
        rounds = len(taken) // len(_OTHERS)  # once the colours are used up they come again with other markers
        while place + rounds * len(_OTHERS) in taken:
            place = (place + 1) % len(_OTHERS)
        taken.add(place + rounds * len(_OTHERS))
        marker = _OTHERS[(place + rounds) % len(_OTHERS)][1]
        chosen[name] = SolverStyle(name, _OTHERS[place][0], marker, ":")
    return chosen


def label(solver: str) -> str:
    """The name that tables and legends print."""
    return _SOLVERS[solver].label if solver in _SOLVERS else solver


def status_word(record: pd.Series) -> str:
    """What stands in a cell without a number: OOM, OOT, n/s, err, n/c or late, with a dagger if inferred."""
    return reason_word(record) + (INFERRED if isinstance(record["inferred_from"], str) else "")


def reason_word(record: pd.Series) -> str:
    """`status_word` without the dagger."""
    status = record["status"]
    if pd.isna(status) or status == Status.OK:
        return MISSING
    reached = record["residual_reached"]
    if status == Status.NOT_CONVERGED and pd.notna(reached) and bool(reached):
        return LATE
    return WORDS[Status(status)]


def count_text(count: float) -> str:
    """A size as axes and headings print it: 500, 1024, 2k, 2.5k, 100k, 1M."""
    for scale, suffix in ((1e6, "M"), (1e3, "k")):
        if count >= scale and f"{count / scale:.3g}" == f"{count / scale:.10g}":
            return f"{count / scale:.3g}{suffix}"
    return number_text(count)


def number_text(value: float) -> str:
    """A parameter as headings print it: 0.1, 1e-05, 1024."""
    return MISSING if pd.isna(value) else f"{value:.10g}"


def exponent_text(exponent: float) -> str:
    """Two decimals, without a minus before zero."""
    return f"{round(exponent, 2) + 0.0:.2f}"


def shape_text(record: pd.Series) -> str:
    """n, d and eps of a record, for a heading."""
    return f"n = {count_text(record['n'])}, d = {count_text(record['d'])}, eps = {number_text(record['eps'])}"

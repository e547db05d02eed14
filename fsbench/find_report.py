"""Which function writes an experiment's report: found by name without importing it, or imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import symtable
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsbench import compose
from fsbench.compose import ConfigError

GENERAL = "experiments.general.report"


def report_name(experiment: str, config_dirs: Iterable[Path] = (), *, given: str | None = None) -> str:
    """Dotted name of report(df, out_dir) of an experiment, known to be there.

    The one given, else the one in the experiment's yaml, else experiments.<experiment>.report, else the general one.
    Its module is not imported. Raises ConfigError if a report that was asked for cannot be found.
    """
    dotted = given or compose.experiment_value(experiment, "report", config_dirs)
    if dotted:
        if problem := _problem(dotted):
            raise ConfigError(f"report '{dotted}' of experiment '{experiment}' cannot be used: {problem}")
        return dotted
    own = f"experiments.{experiment}.report"
    return GENERAL if _problem(own) else own


def report_function(dotted: str) -> Callable[..., list[Path]]:
    """The function that report_name found."""
    _search_here()
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ConfigError(f"report '{dotted}' cannot be used: {module} has no '{name}'") from error


def _problem(dotted: Any) -> str:
    """Why there is no such function, or nothing. ConfigError if its module cannot be read."""
    module, _, name = dotted.rpartition(".") if isinstance(dotted, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in dotted.split(".")):
        return "write a dotted name like package.module.function"
    _search_here()
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # ValueError: a module that nothing says where it came from
        spec = None
    if spec is None:
        return f"there is no module {module}"
    source: str = getattr(spec.loader, "get_source", lambda _: None)(module) or ""
    if not source:
        return ""  # compiled: known once it is imported
    try:
        found = symtable.symtable(source, module, "exec")
    except SyntaxError as error:
        raise ConfigError(f"report '{dotted}': {module} has a syntax error in line {error.lineno}") from error
    if name not in found.get_identifiers() and "import *" not in source:
        return f"{module} has no '{name}'{compose.nearest(name, _public(found))}"
    return ""


def _public(module: symtable.SymbolTable) -> list[str]:
    return [child.get_name() for child in module.get_children() if child.get_type() == "function"]


def _search_here() -> None:
    """Reports are looked for in the working folder and in this checkout, as by `python -m`."""
    sys.path[:0] = [path for path in (os.getcwd(), str(compose.ROOT)) if path not in sys.path]

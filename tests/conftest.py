"""Which tests one process runs after the other, and which are for `make test-gpu` alone."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

COMPILERS = {"pykeops": "keops", "geomloss": "keops", "jax": "jax", "ott-jax": "jax"}  # by requirement of a solver
SOLVERS = Path(__file__).parents[1] / "conf" / "solver"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process runs the tests of one file; but of solvers whose formulas are compiled those of all files, so that each
    is compiled once."""
    from xdist.scheduler import LoadFileScheduling

    class ByCompiler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _compiler(nodeid) or super()._split_scope(nodeid)

    return ByCompiler(config, log)


def pytest_collection_modifyitems(items):
    """Of those solvers float32 in three dimensions stands for what a test has besides, which is thorough."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if (params.get("d", 3), params.get("dtype", "float32")) != (3, "float32") and _compiler(item.nodeid):
            item.add_marker(pytest.mark.thorough)


def _compiler(nodeid: str) -> str | None:
    solver = re.search(r"\[(\w+)-(cpu|cuda)\b", nodeid)
    return _compiler_of(solver[1]) if solver else None


@cache
def _compiler_of(solver: str) -> str | None:
    path = SOLVERS / f"{solver}.yaml"
    requires = yaml.safe_load(path.read_text()).get("requires", []) if path.is_file() else []
    return next((COMPILERS[name] for name in requires if name in COMPILERS), None)

"""From a composed configuration to ordered cells. Composed once, expanded in plain Python."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsbench import compose
from fsbench.api import Budget, Cell, Task, Timing, ToResidual, budget_from_dict
from fsbench.compose import ConfigError
from fsbench.env import constructor_arguments, has_gpu
from fsbench.problems import parameters

_DTYPES = ("float32", "float64")
_DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class Plan:
    """All that a run needs: the cells in the order they are measured, and the run's own settings."""

    experiment: str
    question: str
    report: str  # dotted name of report(df, out_dir), or "" for the experiment's module
    cells: tuple[Cell, ...]
    timeout_s: float | None
    budget_s: float | None
    fail_fast: bool
    retries: int
    out_dir: Path
    launcher: dict[str, Any]
    config: dict[str, Any]  # the effective configuration, kept beside the records
    notices: tuple[str, ...]
    redo: bool = False

    @property
    def folder(self) -> Path:
        return self.out_dir / self.experiment


@dataclass(frozen=True, order=True)
class _Eps:
    """An eps as it was given: a number, or a multiple of the squared spacing of n points in the unit box."""

    in_spacings: bool
    number: float

    @classmethod
    def read(cls, name: str, value: Any) -> _Eps:
        words = re.fullmatch(r"(.+?)( *\*? *spacing\*\*2)?", str(value).strip())
        try:
            number = math.nan if words is None or isinstance(value, bool) else float(words[1])
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ConfigError(
                f"{name} must be a positive number or a positive multiple like '16 spacing**2', got '{value}'"
            )
        assert words is not None
        return cls(words[2] is not None, number)

    def at(self, n: int, d: int) -> float:
        """In units of |x - y|^2; spacing: n^(-1/d). Six digits, which every machine's power function agrees on."""
        if not self.in_spacings:
            return self.number
        eps = float(f"{self.number * n ** (-2 / d):.6g}")
        if not 0 < eps < math.inf:
            raise ConfigError(f"eps = '{self.number:g} spacing**2' is {eps:g} at n={n}, d={d}: choose another multiple")
        return eps


def make_plan(overrides: Iterable[str], config_dirs: Iterable[Path] = (), *, gpu: bool | None = None) -> Plan:
    """Compose conf/ with the overrides and expand the grid.

    Cells come grid by grid, problem by problem, sizes increasing, and the solvers of one comparison next to each other.
    `gpu` says whether this machine has one (None: ask NVML). Raises ConfigError, one line.
    """
    overrides, config_dirs = list(overrides), list(config_dirs)
    config = compose.composed(overrides, config_dirs)
    device = _one_of("device", config["device"], _DEVICES)
    notices = []
    if device == "auto":
        device = "cuda" if (has_gpu() if gpu is None else gpu) else "cpu"
        if device == "cpu":
            notices.append("no GPU here: using the CPU profile (device=cpu)")
    timeout_s = compose.seconds(config["timeout_s"], "timeout_s")
    own = compose.experiment_value(config["experiment"], "timeout_s", config_dirs)
    if own is not None and str(own) != str(config["timeout_s"]):
        notices.append(f"timeout_s={config['timeout_s']} replaces the experiment's own {own}")
    return Plan(
        experiment=config["experiment"],
        question=config["question"],
        report=config["report"] or "",
        cells=_expand(config, config_dirs, device, timeout_s),
        timeout_s=timeout_s,
        budget_s=compose.seconds(config["budget_s"], "budget_s"),
        fail_fast=_boolean("fail_fast", config["fail_fast"]),
        redo=_boolean("redo", config["redo"]),
        retries=_integer("retries", config["retries"], least=0),
        out_dir=Path(config["out_dir"]),
        launcher=config["launcher"],
        config=config,
        notices=tuple(notices),
    )


def _expand(config: dict[str, Any], config_dirs: list[Path], device: str, timeout_s: float | None) -> tuple[Cell, ...]:
    grids = _grids(config, device)
    solvers = {name: compose.load_solver(name, config_dirs) for axes in grids for name in axes["solver"]}
    problems = {name: compose.load_problem(name, config_dirs) for axes in grids for name in axes["problem"]}
    solver_params = _extra_params("solver", config["solver_params"], list(solvers))
    problem_params = _extra_params("problem", config["problem_params"], list(problems))
    families = {name: _own_family(each) for name, each in problems.items()}
    for name, extra in problem_params.items():
        _check_family(families[name], f"problem_params.{name}", extra)
    for solver in solvers.values():
        known = constructor_arguments(solver.target)
        unknown = [] if known is None else [key for key in solver_params.get(solver.name, {}) if key not in known]
        if unknown:
            nearest = compose.nearest(unknown[0], known or ())
            raise ConfigError(f"solver_params.{solver.name}.{unknown[0]}: no such argument{nearest}")
    timing = _timing(config["timing"])
    budgets = _budgets(config["budget"])
    cost_scale = _positive("cost_scale", config["cost_scale"])
    task = Task(_one_of("task", config["task"], tuple(Task)))

    if task is Task.HVP and not all(isinstance(budget, ToResidual) for budget in budgets):
        raise ConfigError("task=hvp needs a budget of kind to_residual, whose tol is that of the linear system")

    cells: dict[str, Cell] = {}
    sizes = ((axes["solver"], *size) for axes in grids for size in _sizes(axes, budgets))
    for compared, name, budget, dtype, n, m, d, eps, seed in sizes:
        problem = problems[name]
        m = max(1, round(n * problem.m_per_n)) if m is None else m
        size = {"n": n, "m": m, "d": d, "eps": eps.at(n, d), "seed": seed}
        settings = problem.params | problem_params.get(problem.name, {})
        _check_family(families[problem.name], f"problem={problem.name}", settings | size)
        for solver in map(solvers.__getitem__, compared):
            cell = Cell(
                experiment=config["experiment"],
                solver=solver.name,
                solver_target=solver.target,
                solver_params=solver.params | solver_params.get(solver.name, {}),
                ladder=() if task is Task.HVP else solver.ladder,  # rungs are of solves
                matmul_precision=solver.matmul_precision,
                problem=problem.name,
                problem_target=problem.target,
                problem_params=settings,
                **size,
                cost_scale=cost_scale,
                dtype=dtype,
                device=device,
                budget=budget,
                timing=timing,
                timeout_s=timeout_s,
                requires=solver.requires + problem.requires,
                task=task,
            )
            twin = cells.setdefault(cell.cell_id, cell)
            if twin.solver != cell.solver or twin.problem != cell.problem:
                raise ConfigError(
                    f"{twin.solver} on {twin.problem} and {cell.solver} on {cell.problem} are the same measurement: "
                    "give them different params or drop one"
                )
    return tuple(cells.values())


def _sizes(axes: dict[str, list[Any]], budgets: list[Budget]) -> Iterable[tuple[Any, ...]]:
    return itertools.product(
        axes["problem"], budgets, axes["dtype"], axes["n"], axes["m"] or [None], axes["d"], axes["eps"], axes["seed"]
    )


def _grids(config: dict[str, Any], device: str) -> list[dict[str, list[Any]]]:
    """The axes of each grid for this machine. Of several grids, each made for its problems, problem= picks some."""
    profiles = ("gpu", "cpu") if device == "cpu" else ("gpu",)
    own = [{k: v for name in profiles for k, v in (grid.get(name) or {}).items()} for grid in compose.grids(config)]
    problems, wanted = [_listed(axes.get("problem")) for axes in own], _listed(config["problem"])
    if wanted and len(own) > 1:
        for name in wanted:
            _one_of("problem", name, tuple(dict.fromkeys(itertools.chain(*problems))))
        picked = ([name for name in wanted if name in known] for known in problems)
        own = [axes | {"problem": names} for axes, names in zip(own, picked, strict=True) if names]
        config = config | {"problem": None}
    return [_axes(config, axes) for axes in own]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _axes(config: dict[str, Any], own: dict[str, Any]) -> dict[str, list[Any]]:
    """One list an axis: the command line's, else the grid's own. Numbers sorted, names as given."""
    convert: dict[str, Callable[[str, Any], Any]] = {
        "n": _integer, "m": _integer, "d": _integer, "eps": _Eps.read,
        "seed": lambda name, value: _integer(name, value, least=0),
        "dtype": lambda name, value: _one_of(name, value, _DTYPES),
    }  # fmt: skip
    axes = {}
    for axis in compose.AXES:
        values = _listed(config[axis] if config[axis] is not None else own.get(axis))
        if not values and axis != "m":
            raise ConfigError(f"{axis} is empty: give {axis}=[...] or list it in the experiment's grid")
        if axis in convert:
            values = [convert[axis](axis, item) for item in values]
        axes[axis] = list(dict.fromkeys(values if axis in ("solver", "problem", "dtype") else sorted(values)))
    return axes


def _budgets(raw: Any) -> list[Budget]:
    budgets = []
    for entry in raw if isinstance(raw, list) else [raw]:
        if not isinstance(entry, dict):
            raise ConfigError(f"budget must be like {{kind: fixed_iterations, iterations: 10}}, got {entry!r}")
        kind = _one_of("budget.kind", entry.get("kind"), tuple(compose.BUDGET_KEYS))
        compose.check_keys(entry, compose.BUDGET_WORDS, "budget")
        # A command line that changes the kind leaves the other kind's keys behind.
        used = {key: entry[key] for key in compose.BUDGET_KEYS[kind] if key in entry}
        target = compose.BUDGET_KEYS[kind][0]
        if used.get(target) in (None, []):
            raise ConfigError(f"budget of kind {kind} needs {target}")
        # The target, iterations or tol, may be a list: one budget each.
        for one in used[target] if isinstance(used[target], list) else [used[target]]:
            numbers = {
                key: (_integer if key in ("iterations", "max_iterations") else _positive)(f"budget.{key}", value)
                for key, value in (used | {target: one}).items()
            }
            budgets.append(budget_from_dict({"kind": kind, **numbers}))
    return budgets


def _timing(raw: dict[str, Any]) -> Timing:
    values: dict[str, Any] = {}
    for field in fields(Timing):
        if field.name not in raw:
            continue
        name, value = f"timing.{field.name}", raw[field.name]
        if isinstance(field.default, bool):
            values[field.name] = _boolean(name, value)
        elif isinstance(field.default, int):
            values[field.name] = _integer(name, value, least=0 if field.name == "warmup_calls" else 1)
        else:
            values[field.name] = _number(name, value)
            if values[field.name] < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
    timing = Timing(**values)
    if timing.max_samples < timing.min_samples:
        raise ConfigError(f"timing.max_samples={timing.max_samples} is below min_samples={timing.min_samples}")
    return timing


def _extra_params(kind: str, raw: Any, used: list[str]) -> dict[str, dict[str, Any]]:
    """solver_params.NAME.key=value and problem_params.NAME.key=value, by name."""
    if not isinstance(raw or {}, dict):
        raise ConfigError(f"{kind}_params={raw} must be {kind}_params.NAME.KEY=VALUE")
    for name, params in (raw or {}).items():
        if name not in used:
            raise ConfigError(f"{kind}_params.{name}: no such {kind} in this plan{compose.nearest(name, used)}")
        if not isinstance(params, dict):
            raise ConfigError(f"{kind}_params.{name} must be {kind}_params.{name}.KEY=VALUE")
    return raw or {}


def settings_of(problem: compose.ProblemConf) -> dict[str, tuple[Any, str]]:
    """Value and range, in words, of each setting of one of fsbench's own families; of others nothing is known."""
    family = _own_family(problem)
    if family is None:
        return {}
    return {
        name: (problem.params.get(name, value), words) for name, (value, words) in parameters.settings(family).items()
    }


def _check_family(family: Callable[..., Any] | None, name: str, given: dict[str, Any]) -> None:
    """ConfigError that begins with the name unless the family, if it is fsbench's own, takes what is given."""
    if family is None:
        return
    try:
        parameters.check(family, given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _own_family(problem: compose.ProblemConf) -> Callable[..., Any] | None:
    """fsbench's own families say what they take, and import no GPU framework until they are called."""
    module, _, name = problem.target.rpartition(".")
    if not module.startswith("fsbench.problems."):
        return None
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"_target_ in problem/{problem.name}.yaml: {error}") from error
    return found


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be a number, got '{value}'")
    return number


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ConfigError(f"{name} must be positive, got {value}")
    return number


def _integer(name: str, value: Any, *, least: int = 1) -> int:
    number = _number(name, value)
    if number != int(number) or number < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value}")
    return int(number)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got '{value}'")
    return value


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(
            f"{name} must be one of {', '.join(known)}, got '{value}'{compose.nearest(str(value), known)}"
        )
    return value

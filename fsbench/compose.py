"""Compose conf/ with Hydra and check it: every mistake is one line that names the nearest right word."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsbench.api import FixedIterations, Timing, ToResidual

if TYPE_CHECKING:  # Hydra is imported where something is composed: listing and reporting do without
    from hydra.core.override_parser.types import Override

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

AXES = ("solver", "problem", "n", "m", "d", "eps", "seed", "dtype")
BUDGET_KEYS = {
    "fixed_iterations": [field.name for field in fields(FixedIterations)],
    "to_residual": [field.name for field in fields(ToResidual)],
}
BUDGET_WORDS = {"kind", *BUDGET_KEYS["fixed_iterations"], *BUDGET_KEYS["to_residual"]}
TIMING_KEYS = [field.name for field in fields(Timing)]
_GROUPS = ("experiment", "timing", "launcher")
_OPEN = ("solver_params", "problem_params", "budget")  # keys under these need not be in the composed file


class ConfigError(ValueError):
    """A configuration that cannot be run; its text is one line for the user."""


@dataclass(frozen=True)
class SolverConf:
    """One file of conf/solver."""

    name: str
    target: str
    params: dict[str, Any]
    ladder: tuple[dict[str, Any], ...]
    matmul_precision: str
    requires: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class ProblemConf:
    """One file of conf/problem."""

    name: str
    target: str
    params: dict[str, Any]
    requires: tuple[str, ...]
    label: str
    m_per_n: float = 1.0  # points of y for each of x, where m is not given


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error line: the closest known word, or all of them if none is close."""
    known = sorted(set(known))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known) or 'none'}"


def check_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first key that is not known."""
    known = list(known)
    for key in found:
        if key not in known:
            raise ConfigError(f"unknown key '{key}' in {where}{nearest(str(key), known)}")


def names(group: str, config_dirs: Iterable[Path] = ()) -> dict[str, Path]:
    """Name -> file of conf/<group> and of the same folder in config_dirs; the first found wins, as in Hydra."""
    found: dict[str, Path] = {}
    for base in (CONF, *config_dirs):
        for path in sorted((base / group).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain Python. ConfigError if it is not a mapping."""
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except yaml.YAMLError as error:
        raise ConfigError(_one_line(error)) from error
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {_one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold key: value lines")
    return {str(key): value for key, value in raw.items()}


def load_solver(name: str, config_dirs: Iterable[Path] = ()) -> SolverConf:
    """conf/solver/<name>.yaml, checked. ConfigError names the nearest solver or key."""
    known = ("_target_", "matmul_precision", "requires", "params", "ladder", "label")
    raw, where = _load_named("solver", name, known, config_dirs)
    ladder = raw.get("ladder") or []
    if not isinstance(ladder, list) or not all(isinstance(rung, dict) for rung in ladder):
        raise ConfigError(f"ladder in {where} must be a list of mappings")
    return SolverConf(
        name=name,
        target=_target(raw, where),
        params=_mapping(raw, "params", where),
        ladder=tuple(ladder),
        matmul_precision=str(raw.get("matmul_precision", "")) or "native",
        requires=tuple(raw.get("requires") or ()),
        label=str(raw.get("label", "")),
    )


def load_problem(name: str, config_dirs: Iterable[Path] = ()) -> ProblemConf:
    """conf/problem/<name>.yaml, checked. ConfigError names the nearest problem or key."""
    known = ("_target_", "requires", "params", "label", "m_per_n")
    raw, where = _load_named("problem", name, known, config_dirs)
    params, label, m_per_n = _mapping(raw, "params", where), str(raw.get("label", "")), raw.get("m_per_n", 1.0)
    if isinstance(m_per_n, bool) or not isinstance(m_per_n, int | float) or not 0 < m_per_n < math.inf:
        raise ConfigError(f"m_per_n in {where} must be a positive number, got {m_per_n!r}")
    return ProblemConf(name, _target(raw, where), params, tuple(raw.get("requires") or ()), label, float(m_per_n))


def folders(config_dirs: Iterable[Path]) -> list[Path]:
    """Whole paths of the folders of --config-dir. ConfigError if one is none."""
    found = [Path(folder).resolve() for folder in config_dirs]
    for folder in found:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder} is not a folder")
    return found


def composed(overrides: Iterable[str], config_dirs: Iterable[Path] = ()) -> dict[str, Any]:
    """The whole configuration for these command-line overrides as a plain dict, keys checked.

    `solver=` and `problem=` name files of conf/ but select from the grid, so they are not handed to Hydra, which
    would take them for config groups; nor is a whole `budget=`, which it would merge. Raises ConfigError.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    config_dirs = folders(config_dirs)
    known = [*(key for key in load_yaml(CONF / "config.yaml") if key != "defaults"), *_GROUPS]
    selected: dict[str, Any] = {}
    passed: list[str] = []
    for override in _parse(overrides):
        key, line = override.key_or_group, override.input_line or ""
        _check_override(override, known, config_dirs)
        if key in ("solver", "problem", "budget"):
            selected[key] = override.value()
        else:
            passed.append(f"++{line}" if key.split(".")[0] in _OPEN and not line.startswith(("+", "~")) else line)
    if config_dirs:
        passed.append(f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in config_dirs)}]")
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(CONF), version_base="1.3"):
            warnings.simplefilter("ignore", UserWarning)  # a --config-dir without some group is fine
            config = OmegaConf.to_container(compose("config", overrides=passed), resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_one_line(error)) from error
    config = {str(key): value for key, value in config.items()} | selected  # type: ignore[union-attr]
    if config["experiment"] not in list(names("experiment", config_dirs)):
        raise ConfigError("an experiment's file must begin with '# @package _global_' and say experiment: ITS_NAME")
    where = f"experiment '{config['experiment']}'"
    check_keys(config, known, where)
    check_keys(config["timing"], TIMING_KEYS, f"timing of {where}")
    for grid in grids(config):
        check_keys(grid, ("gpu", "cpu"), f"grid of {where}")
        for profile, axes in grid.items():
            check_keys(axes or {}, AXES, f"grid.{profile} of {where}")
    return config


def grids(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The experiment's grids: mostly one; several where what goes with what is no product. ConfigError otherwise."""
    raw = config["grid"]
    found = raw if isinstance(raw, list) else [raw]
    if not found or not all(isinstance(grid, dict) for grid in found):
        where = f"experiment '{config['experiment']}'"
        raise ConfigError(f"grid of {where} must hold gpu: and cpu: lists, or be a list of such grids")
    return found


def experiment_value(name: str, key: str, config_dirs: Iterable[Path] = ()) -> Any:
    """What the experiment's own file says of a top-level key, or None."""
    path = names("experiment", config_dirs).get(name)
    return load_yaml(path).get(key) if path else None


def seconds(value: Any, name: str) -> float | None:
    """A time limit in seconds from 90, '90', '90s', '10m', '3h' or 'none' (no limit). ConfigError otherwise."""
    text = str(value).strip().lower()
    if text == "none":
        return None
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        limit = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        limit = math.nan
    if not (limit > 0 and math.isfinite(limit)):
        raise ConfigError(f"{name} must be a positive time like 90, 90s, 10m, 3h or none, got '{value}'")
    return limit


def _parse(overrides: Iterable[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            raise ConfigError(f"cannot read '{text}': write key=value or key=[a,b]") from error
    return parsed


def _check_override(override: Override, known: list[str], config_dirs: list[Path]) -> None:
    key = override.key_or_group
    head, _, rest = key.partition(".")
    if head == "hydra":
        raise ConfigError(f"'{key}' is Hydra's own; add a folder of configuration with --config-dir DIR")
    check_keys([head], known, "the command line")
    if override.is_sweep_override():
        raise ConfigError(f"'{override.input_line}' looks like a sweep; write a list: {key}=[a,b]")
    if override.is_delete():
        raise ConfigError(f"'{override.input_line}' would remove a key; give it a value instead")
    if key in _GROUPS:
        found = names(key, config_dirs)
        choice = override.value()
        if not isinstance(choice, str) or choice not in found:
            raise ConfigError(f"unknown {key} '{choice}'{nearest(str(choice), found)}")
    if head == "timing" and rest:
        check_keys([rest], TIMING_KEYS, "timing")
    if head == "budget" and rest:
        check_keys([rest], BUDGET_WORDS, "budget")


def _load_named(group: str, name: str, known: Iterable[str], config_dirs: Iterable[Path]) -> tuple[dict[str, Any], str]:
    found = names(group, config_dirs)
    if name not in found:
        raise ConfigError(f"unknown {group} '{name}'{nearest(str(name), found)}")
    raw, where = load_yaml(found[name]), f"{group}/{name}.yaml"
    check_keys(raw, known, where)
    return raw, where


def _target(raw: dict[str, Any], where: str) -> str:
    target = raw.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"_target_ in {where} must be a dotted name like package.module.Class, got {target!r}")
    return target


def _mapping(raw: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} in {where} must hold key: value lines, got {value!r}")
    return value


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"cannot read {error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__

"""The command line: run, report, list, doctor, collect, compare."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.text import Text

from fsbench import compose, records
from fsbench.compose import ConfigError, nearest
from fsbench.find_report import report_function, report_name
from fsbench.progress import RunProgress, busy_machine, describe, failures, make_console, summary

_RAW = Path("results/raw")
_PUBLISHED = compose.ROOT / "results" / "published"
_NO_EXPERIMENT = "no experiment given: quickstart"


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as the rest of fsbench does: one line."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            options = [option for action in self._actions for option in action.option_strings]
            message = f"unknown option '{unknown.split()[0]}'{nearest(unknown.split()[0].split('=')[0], options)}"
        raise ConfigError(message)


def _parser(command: str) -> _Parser:
    parser = _Parser(prog=f"fsbench {command}", description=_COMMANDS[command].__doc__, allow_abbrev=False)
    if command in ("run", "report", "list", "doctor"):
        text = "a folder laid out like conf/, with your own solvers, problems, experiments"
        parser.add_argument("--config-dir", type=Path, action="append", default=[], metavar="DIR", help=text)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Measure an experiment's cells that are not done yet, then write its report."""
    from fsbench.plan import make_plan
    from fsbench.runner import Runner

    parser = _parser("run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. experiment=table2 n=[1000] solver=pot")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and measure nothing")
    options = parser.parse_intermixed_args(arguments)
    plan = make_plan(options.overrides, options.config_dir)
    report_by = report_name(plan.experiment, options.config_dir, given=plan.report)
    console = make_console()
    if not any(word.startswith("experiment=") for word in options.overrides):
        console.print(_NO_EXPERIMENT)
    limit = "no limit" if plan.timeout_s is None else f"at most {plan.timeout_s:g} s each"
    for line in (f"{plan.experiment}: {plan.question}", *plan.notices, f"{len(plan.cells)} cells, {limit}"):
        console.print(Text(line), soft_wrap=True)
    if options.dry_run:
        for cell in plan.cells:
            console.print(Text(f"{cell.cell_id}  {describe(records.describe(cell))}"), soft_wrap=True)
        return 0
    if plan.launcher["kind"] == "slurm":
        from fsbench.launcher import run_shards

        outcome = run_shards(plan)
    else:
        with RunProgress(console, len(plan.cells)) as progress:
            outcome = Runner(plan, progress).run()
    console.print(summary(outcome.rows))
    if lines := failures(outcome.rows):
        console.print(Text("\n".join(["Without a result:", *(f"  {line}" for line in lines)])), soft_wrap=True)
    counts = Counter("not run" if record is None else record["status"] for _, record in outcome.rows)
    console.print(Text(", ".join(f"{count} {status}" for status, count in counts.items())))
    shown = [record for _, record in outcome.rows if record is not None]
    for line in busy_machine(shown, records.environments_in(plan.folder)):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"records: {plan.folder}"), soft_wrap=True)
    if outcome.stopped:
        console.print(Text(f"stopped: {outcome.stopped}. The same command continues where this run ended."))
    if outcome.exit_code < 128 and shown:
        # A process of its own: plotting libraries stay out of this one, and a broken report cannot undo a run.
        dirs = [f"--config-dir={folder}" for folder in options.config_dir]
        what = [plan.experiment, f"--records={plan.folder}", f"--report={report_by}"]
        command = [sys.executable, "-m", "fsbench", "report", *what, *dirs]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": _import_path()}, check=False)
    return outcome.exit_code


def report(arguments: Sequence[str]) -> int:
    """Write an experiment's tables and figures from its records."""
    parser = _parser("report")
    parser.add_argument("experiment", nargs="?")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--records", type=Path, metavar="PATH", help="a run folder or a Parquet file")
    source.add_argument("--out-dir", type=Path, metavar="DIR", help="out_dir=DIR, as given to run: read DIR/EXPERIMENT")
    text = "where to write; default: report/ in the run folder, results/raw/EXPERIMENT/report for Parquet files"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--report", metavar="NAME", help="dotted name of report(df, out_dir) (default: its own)")
    options = parser.parse_intermixed_args([re.sub("^out_dir=", "--out-dir=", argument) for argument in arguments])
    if options.experiment is None:
        options.experiment = "quickstart"
        print(_NO_EXPERIMENT)
    known = compose.names("experiment", options.config_dir)
    unknown = ConfigError(f"unknown experiment '{options.experiment}'{nearest(options.experiment, known)}")
    if options.experiment not in known and not options.records:
        raise unknown
    write = report_function(report_name(options.experiment, options.config_dir, given=options.report))
    path = options.records or _records_of(options.experiment, options.out_dir)
    from fsbench.report.load import load

    try:
        frame = load(path)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if options.experiment not in known and options.experiment not in set(frame["experiment"]):
        raise unknown  # records of an experiment whose yaml is not here are enough for a report
    # Records of older code stay in a run folder; a report shows each cell once.
    frame = frame.sort_values("started_at", kind="stable").drop_duplicates("cell_id", keep="last").sort_index()
    # Parquet files are kept ones, several experiments side by side: their folder gets no report.
    out = options.out or (path if records.holds_a_run(path) else _RAW / options.experiment) / "report"
    if not options.records:
        print(f"records: {path}")
    out.mkdir(parents=True, exist_ok=True)
    for file in write(frame.reset_index(drop=True), out):
        print(f"report: {file}")
    return 0


def list_all(arguments: Sequence[str]) -> int:
    """Solvers, problems with their settings, and experiments."""
    from fsbench.plan import settings_of

    options = _parser("list").parse_args(arguments)
    config_dirs = compose.folders(options.config_dir)
    console = make_console()
    for group, key in (("solver", "label"), ("problem", "label"), ("experiment", "question")):
        console.print(Text(f"{group}s", style="bold"))
        found = compose.names(group, config_dirs)
        width = max(map(len, found), default=0)
        for name, path in sorted(found.items()):
            if group == "problem":
                problem = compose.load_problem(name, config_dirs)
                what, own = problem.label or problem.target, settings_of(problem)
            else:
                raw = compose.load_yaml(path)
                what, own = raw.get(key) or raw.get("_target_", ""), {}
            console.print(Text(f"  {name:<{width}}  {what}"), soft_wrap=True)
            for setting, (value, words) in own.items():
                line = f"  {'':<{width}}    problem_params.{name}.{setting}={value}: {words}"
                console.print(Text(line, style="dim"), soft_wrap=True)
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """What is installed, and which solvers run on this machine: each is tried on a tiny problem."""
    from fsbench.doctor import examine

    options = _parser("doctor").parse_args(arguments)
    return 0 if examine(make_console(), compose.folders(options.config_dir)) else 130


def collect(arguments: Sequence[str]) -> int:
    """Merge run folders into results/published/<gpu>/<experiment>.parquet; the newest record of a cell stays."""
    from fsbench.collect import collect as merge

    parser = _parser("collect")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="e.g. results/raw/table2")
    text = "where to write <gpu>/; default: results/published"
    parser.add_argument("--out", type=Path, default=_PUBLISHED, metavar="DIR", help=text)
    options = parser.parse_intermixed_args(arguments)
    try:
        for path in merge(options.folders, options.out):
            print(path)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return 0


def compare(arguments: Sequence[str]) -> int:
    """Time ratios between two record sets, cell by cell, and first what got wrong. Exit code 1 if anything did."""
    from fsbench.compare import baseline_for, show
    from fsbench.compare import compare as match

    parser = _parser("compare")
    parser.add_argument("old", type=Path, help="a run folder or a Parquet file")
    parser.add_argument("new", type=Path, help="a run folder or a Parquet file")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="OLD holds a folder for each GPU; a significant slowdown or a missing cell fails too",
    )
    options = parser.parse_args(arguments)
    try:
        old = baseline_for(options.new, options.old) if options.gate else options.old
        comparison = match(old, options.new)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    show(comparison, make_console())
    return int(not comparison.passes if options.gate else bool(comparison.broken))


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run, "report": report, "list": list_all, "doctor": doctor, "collect": collect, "compare": compare,
}  # fmt: skip


def _records_of(experiment: str, out_dir: Path | None) -> Path:
    """What `run` wrote into out_dir; where none is given, into results/raw, else the published table."""
    run_folder = (out_dir or _RAW) / experiment
    if records.holds_a_run(run_folder):
        return run_folder
    if out_dir is not None:
        raise ConfigError(f"no records in {run_folder}: fsbench run experiment={experiment} out_dir={out_dir}")
    published = sorted(_PUBLISHED.glob(f"*/{experiment}.parquet"))
    if not published:
        raise ConfigError(f"no records of '{experiment}' yet: fsbench run experiment={experiment}, or give --records")
    return published[0]


def _import_path() -> str:
    return os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), str(compose.ROOT)) if path)


def _usage() -> str:
    lines = [f"  {name:<8}  {(function.__doc__ or '').strip()}" for name, function in _COMMANDS.items()]
    return "\n".join(["usage: fsbench COMMAND ...", *lines, "fsbench COMMAND --help says more."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 a cell ended in error, 2 a mistake in the request, 130 interrupted."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command in ("", "-h", "--help"):
        print(_usage())
        return 0 if command else 2
    try:
        if command not in _COMMANDS:
            raise ConfigError(f"unknown command '{command}'{nearest(command, _COMMANDS)}")
        return _COMMANDS[command](rest)
    except ConfigError as error:
        print(f"fsbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""Hand shards of one plan to a scheduler through submitit. Nothing here schedules by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from fsbench.compose import ConfigError
from fsbench.plan import Plan
from fsbench.progress import RunProgress, make_console
from fsbench.runner import Outcome, Runner


def shard(plan: Plan, index: int, count: int) -> Plan:
    """Part `index` of `count`: every count-th comparison, so that sizes spread evenly and no comparison is split."""
    groups = [list(group) for _, group in itertools.groupby(plan.cells, key=lambda cell: cell.group_id)]
    return replace(plan, cells=tuple(cell for group in groups[index::count] for cell in group))


def run_shards(plan: Plan) -> Outcome:
    """Run the plan as an array of jobs and wait for them. Raises ConfigError for settings that submitit refuses.

    Every shard writes files of its own into the plan's folder, so a later run, in shards or not, continues.
    """
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("launcher=slurm needs submitit: pip install submitit") from error
    settings = plan.launcher
    count = settings["shards"]
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"launcher.shards must be a whole number of at least 1, got '{count}'")
    executor = submitit.AutoExecutor(folder=plan.folder / "submitit", cluster=settings["cluster"])
    try:
        executor.update_parameters(**settings["parameters"])
    except (NameError, TypeError) as error:
        raise ConfigError(f"launcher.parameters: {error}") from error
    jobs: list[Any] = executor.map_array(_run_shard, [plan] * count, range(count), [count] * count)
    broken = [str(reason).strip().splitlines()[-1] for job in jobs if (reason := job.exception()) is not None]
    ended = [job.result() for job in jobs if job.exception() is None]
    latest = {cell.cell_id: record for outcome in ended for cell, record in outcome.rows}
    rows = tuple((cell, latest.get(cell.cell_id)) for cell in plan.cells)
    if broken:
        return Outcome(rows, f"{len(broken)} of {count} shards failed: {broken[0]}", 1)
    return Outcome(rows, next((o.stopped for o in ended if o.stopped), None), max(o.exit_code for o in ended))


def _run_shard(plan: Plan, index: int, count: int) -> Outcome:
    part = shard(plan, index, count)
    with RunProgress(make_console(), len(part.cells)) as progress:
        return Runner(part, progress, shard=f"shard-{index + 1}-of-{count}").run()

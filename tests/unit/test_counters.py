"""Hardware counters: reading Nsight Compute's table, and saying why there is none."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsbench import counters, counters_child
from fsbench.api import Budget, Cell, FixedIterations, Framework, Problem, Solution, Spec, Timing

CELL = Cell(
    "test", "solver", "module.Class", {}, (), "exact", "gaussian", "fsbench.problems.gaussian.gaussian", {}, 0,
    100, 100, 3, 0.1, 1.0, "float32", "cuda", FixedIterations(10), Timing(), 60.0,
)  # fmt: skip
COLUMNS = {"hbm_read_bytes", "hbm_write_bytes", "sm_throughput_pct", "memory_stall_pct", "kernel_launches"}

# The raw page: metrics in the tool's own (alphabetical) order, a row of units under the header, launch columns between.
TABLE = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "rows_fwd_kernel" - 0: 0%....50%....100% - 2 passes
==PROF== Profiling "columns" - 1: 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed","smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct"
"","","","","","","","","","","","byte","byte","ns","%","%"
"0","4711","python3.12","127.0.0.1","rows_fwd_kernel(float *, ""x"")","1","7","(128, 1, 1)","(79, 1, 1)","0","9.0","1,048,576","2,048","3,000.00","80.00","10"
"1","4711","python3.12","127.0.0.1","columns","1","7","(128, 1, 1)","(79, 1, 1)","0","9.0","524,288","1,024","1,000.00","40.00","30"
"""  # noqa: E501 - one line a row is the format


def test_parse_sums_bytes_and_weighs_percentages_by_duration() -> None:
    assert counters.parse(TABLE) == {
        "hbm_read_bytes": 1_572_864.0,
        "hbm_write_bytes": 3_072.0,
        "sm_throughput_pct": pytest.approx(70.0),
        "memory_stall_pct": pytest.approx(15.0),
        "kernel_launches": 2,
        "counters_detail": "Nsight Compute",
    }


@pytest.mark.parametrize("reading", ["n/a", "", "nan"])
def test_a_metric_that_is_not_there_leaves_its_column_empty(reading: str) -> None:
    text = TABLE.replace('"10"\n', f'"{reading}"\n').replace('"30"\n', f'"{reading}"\n')
    got = counters.parse(text)
    assert got["memory_stall_pct"] is None and got["kernel_launches"] == 2
    assert got["counters_detail"] == f"Nsight Compute; not available: {counters.STALL}"


def test_a_sum_that_misses_a_kernel_is_not_given() -> None:
    assert counters.parse(TABLE.replace('"524,288"', '"n/a"'))["hbm_read_bytes"] is None


def test_without_permission_the_tool_s_own_words_are_kept() -> None:
    text = (
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
        "==PROF== Disconnected from process 4711\n"
    )
    got = counters.parse(text)
    assert {got[name] for name in COLUMNS} == {None}
    assert got["counters_detail"].startswith("not measured (ERR_NVGPUCTRPERM")


def test_nothing_profiled() -> None:
    assert counters.parse("")["counters_detail"] == "not measured (no kernel seen)"


def test_without_a_gpu_or_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got = counters.measure(replace(CELL, device="cpu"), timeout_s=1.0)
    assert got == dict.fromkeys(COLUMNS) | {"counters_detail": "not measured (no GPU)"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on PATH" in counters.measure(CELL, timeout_s=1.0)["counters_detail"]


def _tool(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ncu on PATH; "$LOG" is the file it is told to write."""
    tool = folder / "ncu"
    find = 'while [ $# -gt 0 ]; do [ "$1" = --log-file ] && LOG=$2; LAST=$1; shift; done'
    tool.write_text(f"#!/bin/sh\n{find}\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_tool_gets_the_cell_and_its_log_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    _tool(tmp_path, 'echo "$LAST" > $FOLDER/cell.json; cat $FOLDER/table.csv > "$LOG"', monkeypatch)
    environment = {**os.environ, "FOLDER": str(tmp_path)}
    got = counters.measure(CELL, timeout_s=30.0, environment=environment)
    assert got["kernel_launches"] == 2 and got["counters_detail"] == "Nsight Compute"
    assert Cell.from_json((tmp_path / "cell.json").read_text()) == CELL


def test_the_child_s_own_stages_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    said = f"echo solving; echo '{counters.STAGES}imports 9.0 s, profiled solve 20.0 s'"
    _tool(tmp_path, f'{said}; cat {tmp_path}/table.csv > "$LOG"', monkeypatch)
    detail = counters.measure(CELL, timeout_s=30.0)["counters_detail"]
    assert detail == "Nsight Compute; 0 s: imports 9.0 s, profiled solve 20.0 s"


def test_a_failed_or_hanging_tool_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _tool(tmp_path, 'cat > "$LOG" </dev/null; echo "CUDA went away" >&2; exit 9', monkeypatch)
    assert counters.measure(CELL, timeout_s=30.0)["counters_detail"] == "not measured (exit code 9: CUDA went away)"
    _tool(tmp_path, "sleep 60", monkeypatch)
    assert counters.measure(CELL, timeout_s=0.5)["counters_detail"] == "not measured (stopped after 0.5 s)"


def test_exactly_one_warm_solve_lies_between_the_marks(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: EVENTS.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: EVENTS.append("stop"))
    cell = replace(CELL, device="cpu", solver_target=f"{__name__}.Notes", timing=Timing(slope=True, memory=True))
    monkeypatch.setattr(sys, "argv", ["counters_child", cell.to_json()])
    counters_child.main()
    assert EVENTS == ["solve", "solve", "solve", "start", "solve", "stop"]
    stages = capsys.readouterr().out.splitlines()[-1]
    assert stages.startswith(counters.STAGES) and stages.count(" s") >= 3 and "profiled solve" in stages


EVENTS: list[str] = []


class Notes:
    framework = Framework.TORCH

    def supports(self, spec: Spec, budget: Budget) -> None: ...

    def prepare(self, spec: Spec, budget: Budget) -> None: ...

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        EVENTS.append("solve")
        return Solution(problem.a, problem.b, 1, 2.0)


def test_parent_side_loads_no_framework() -> None:
    code = "import sys, fsbench.counters; sys.exit(any(name in sys.modules for name in ('torch', 'jax', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

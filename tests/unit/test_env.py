"""The fingerprints: what changes them and what must not."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fsbench import env
from fsbench.records import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A small checkout on the import path, in place of the real one."""
    for name, text in {
        "fsbench/api.py": "", "fsbench/cell.py": "", "fsbench/runner.py": "", "fsbench/problems/cube.py": "",
        "solvers/__init__.py": "raise RuntimeError('imported')", "solvers/common/__init__.py": "",
        "solvers/common/shared.py": "", "solvers/fast/__init__.py": "raise RuntimeError('imported')",
        "solvers/fast/bench.py": "", "solvers/fast/kernels.py": "", "solvers/adapters/__init__.py": "",
        "solvers/adapters/one.py": "", "solvers/adapters/two.py": "", "solvers/adapters/_arrays.py": "",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(env, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(checkout: Path, file: str, target: str) -> bool:
    """Whether an edit of `file` changes the code_id of a solver."""
    env.code_id.cache_clear()
    before = env.code_id(target, "fsbench.problems.cube.cube")
    (checkout / file).write_text("edited = True\n")
    env.code_id.cache_clear()
    after = env.code_id(target, "fsbench.problems.cube.cube")
    env.code_id.cache_clear()
    return before != after


@pytest.mark.parametrize(
    ("file", "package", "adapter"),
    [
        ("solvers/fast/bench.py", True, False),
        ("solvers/fast/kernels.py", True, False),
        ("solvers/common/shared.py", True, True),
        ("solvers/adapters/one.py", False, True),
        ("solvers/adapters/two.py", False, False),
        ("solvers/adapters/_arrays.py", False, True),
        ("fsbench/cell.py", True, True),
        ("fsbench/problems/cube.py", True, True),
        ("fsbench/runner.py", False, False),
    ],
)
def test_code_id_follows_solver_shared_and_measuring_code_only(checkout, file, package, adapter):
    assert changed(checkout, file, "solvers.fast.bench.Fast") is package
    (checkout / file).write_text("")
    assert changed(checkout, file, "solvers.adapters.one.One") is adapter


@pytest.mark.parametrize(
    ("line", "follows"),
    [
        ("from solvers.base.inputs.checks import whole", True),
        ("from solvers.base import inputs", True),
        ("from solvers import base", True),
        ("import solvers.base.inputs", True),
        ("def later():\n    import solvers.base.inputs", False),  # handed over to, if ever
        ("from base import inputs", False),
        ("import solvers.base.inputs (", False),  # no Python: its cells say so
    ],
)
def test_code_id_follows_what_a_solver_imports_of_others(checkout, line, follows):
    """Also over several packages, but not what merely imports the solver."""
    for name, text in {
        "base/inputs/checks.py": "from solvers.ground import floor",
        "base/__init__.py": "",
        "ground/floor.py": "",
        "other/bench.py": "import solvers.fast.bench",
    }.items():
        path = checkout / "solvers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (checkout / "solvers/fast/kernels.py").write_text(line)
    assert changed(checkout, "solvers/ground/floor.py", "solvers.fast.bench.Fast") is follows
    assert changed(checkout, "solvers/base/__init__.py", "solvers.fast.bench.Fast") is follows
    assert not changed(checkout, "solvers/other/bench.py", "solvers.fast.bench.Fast")


def test_code_id_of_a_users_own_file_and_of_no_file(checkout):
    (checkout / "toy.py").write_text("")
    assert changed(checkout, "toy.py", "toy.Toy")
    assert env.code_id("not_there.Toy", "fsbench.problems.cube.cube")


def test_code_id_is_the_same_in_another_copy(checkout, tmp_path_factory, monkeypatch):
    env.code_id.cache_clear()
    here = env.code_id("solvers.fast.bench.Fast", "fsbench.problems.cube.cube")
    copy = tmp_path_factory.mktemp("elsewhere") / "checkout"
    shutil.copytree(checkout, copy)
    monkeypatch.setattr(env, "ROOT", copy)
    monkeypatch.chdir(copy)
    env.code_id.cache_clear()
    assert env.code_id("solvers.fast.bench.Fast", "fsbench.problems.cube.cube") == here
    env.code_id.cache_clear()


def test_all_that_measures_is_in_the_code_id():
    """Whatever cell.py or worker.py imports of fsbench is hashed; the record's schema has a version of its own."""
    package = ROOT / "fsbench"
    hashed = {path for pattern in env.MEASURING_CODE for path in package.glob(pattern)}
    seen: set[Path] = set()
    queue = [package / "cell.py", package / "worker.py"]
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fsbench":
                base = ROOT.joinpath(*(node.module or "").split("."))
                candidates = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
                queue += [file for file in candidates if file.is_file()]
    assert seen - hashed <= {package / "records.py"}


def test_environment_row_has_every_column_and_plain_values():
    row = env.environment()
    assert list(row) == ENVIRONMENTS.names
    assert json.loads(json.dumps(row)) == row
    assert row["cpu_count"] >= 1
    assert json.loads(row["packages"])["numpy"]


def test_env_id_follows_what_changes_numbers_and_not_git(monkeypatch):
    base = env.environment()
    assert env.environment()["env_id"] == base["env_id"]
    monkeypatch.setattr(env, "_git", lambda *arguments: "" if "--show-prefix" in arguments else "another")
    monkeypatch.setattr(env, "_lock_hash", lambda: "another")
    edited = env.environment()
    assert (edited["git_commit"], edited["lock_hash"]) == ("another", "another")
    assert edited["env_id"] == base["env_id"]
    monkeypatch.setenv("OMP_NUM_THREADS", "37")
    assert env.environment()["env_id"] != base["env_id"]
    monkeypatch.undo()
    monkeypatch.setattr(env, "_packages", lambda: {"torch": "0.0"})
    assert env.environment()["env_id"] != base["env_id"]


def test_git_fields_are_null_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "ROOT", tmp_path)
    row = env.environment()
    assert row["git_commit"] is None
    assert row["git_dirty"] is None


def test_a_copy_within_another_repository_is_not_of_its_commit(monkeypatch, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    as_someone = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), (*as_someone, "commit", "-q", "--allow-empty", "-m", "other")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr(env, "ROOT", tmp_path)
    assert env.environment()["git_commit"]
    monkeypatch.setattr(env, "ROOT", copy)
    monkeypatch.setenv("FSBENCH_GIT_COMMIT", "the copy's")
    assert env.environment()["git_commit"] == "the copy's"


class FakeNvml:
    """Two GPUs, as nvidia-ml-py shows them."""

    class NVMLError(Exception):
        pass

    NAMES = ("NVIDIA H200", "NVIDIA A100")
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: {"GPU-b": 1}[uuid])
    nvmlDeviceGetName = staticmethod(lambda handle: FakeNvml.NAMES[handle])
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13010)

    class Memory:
        total = 100

    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: FakeNvml.Memory)


@pytest.mark.parametrize(
    ("visible", "name"),
    [(None, "NVIDIA H200"), ("1,0", "NVIDIA A100"), ("GPU-b", "NVIDIA A100"), ("", None), ("-1", None)],
)
def test_the_first_visible_gpu_is_the_one(monkeypatch, visible, name):
    monkeypatch.setattr(env, "pynvml", FakeNvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env._gpu.cache_clear()
    found = env._gpu()
    env._gpu.cache_clear()
    assert found["gpu_name"] == name
    assert found["cuda_version"] == (None if name is None else "13.1")


def test_arguments_of_solvers_are_read_from_their_source():
    assert "tile" in env.constructor_arguments("solvers.flash_sinkhorn2.bench.FlashSinkhorn2")
    assert env.constructor_arguments("solvers.adapters.keops.KeOps") == ["check_every"]
    assert env.constructor_arguments("solvers.adapters.pot.Pot") == []
    assert env.constructor_arguments("solvers.adapters.pot.Pott") is None
    assert env.constructor_arguments("nowhere.Solver") is None

"""What a result depends on besides its cell: the machine (env_id) and the code (code_id), found without imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pynvml

from fsbench.records import ENVIRONMENTS, SCHEMA_VERSION

ROOT = Path(__file__).resolve().parent.parent

# Distributions whose version can change a number; whatever else is installed cannot.
_DISTRIBUTIONS = (
    "flash-sinkhorn", "geomloss", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jaxopt", "keopscore",
    "numpy", "ott-jax", "POT", "pykeops", "scikit-learn", "scipy", "torch", "triton",
)  # fmt: skip
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64",
    "JAX_PLATFORMS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET",
    "XLA_FLAGS",
)  # fmt: skip
# Provenance only: a commit, a comment in the lock file or a kernel update must not void results.
_NOT_IN_ENV_ID = ("env_id", "schema_version", "git_commit", "git_dirty", "lock_hash", "os", "host_memory_bytes")

# What measures and scores a cell: patterns in fsbench/.
MEASURING_CODE = (
    "api.py", "cell*.py", "clock*.py", "counters*.py", "frameworks*.py", "memory*.py", "metrics*.py", "reference*.py",
    "stats.py", "worker.py", "problems/**/*.py",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """This machine as one row of the environments table.

    env_id is a hash of the GPU and its memory, driver, CUDA, CPU and its count, host memory in whole GiB, Python,
    packages and variables. Git, the lock file and the operating system's release are kept but not hashed.
    """
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    is_checkout = not _git("rev-parse", "--show-prefix")  # a copy within another repository is none of its commits
    commit = _git("rev-parse", "HEAD") if is_checkout else ""
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **_gpu(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory_bytes": total_bytes,
        "os": _os_name(),
        "python_version": platform.python_version(),
        "packages": json.dumps(_packages(), sort_keys=True),
        "git_commit": commit or os.environ.get("FSBENCH_GIT_COMMIT"),  # a copy without its repository names it
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        "lock_hash": _lock_hash(),
        "variables": json.dumps({k: os.environ[k] for k in _VARIABLES if k in os.environ}, sort_keys=True),
    }
    hashed = {key: value for key, value in row.items() if key not in _NOT_IN_ENV_ID}
    hashed["host_memory_gib"] = round(total_bytes / 2**30)  # to the byte it changes from boot to boot
    row["env_id"] = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]
    return {name: row[name] for name in ENVIRONMENTS.names}


def has_gpu() -> bool:
    """Whether NVML sees a GPU that CUDA_VISIBLE_DEVICES does not hide. Opens no CUDA context."""
    return _gpu()["gpu_name"] is not None


@cache
def code_id(solver_target: str, problem_target: str) -> str:
    """Hash of the sources a cell's numbers come from: solver, what solvers share, problem, measuring code.

    Found on the import path, not imported. A solver that is not found still has an id; its cells end in an
    import error.
    """
    files = {*_sources(solver_target), *_sources(problem_target)}
    for pattern in MEASURING_CODE:
        files.update((ROOT / "fsbench").glob(pattern))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{_relative(path)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(target: str) -> list[Path]:
    """Files of the module that holds `target`; for solvers/<package>/ the whole package, those that its modules import
    when they are imported, and what solvers share."""
    parts = target.split(".")[:-1]
    for base, file in _module_files(parts):
        module = base.joinpath(*parts)
        if parts[0] != "solvers" or len(parts) < 3:
            return _python_files(module) if file.name == "__init__.py" else [file]
        shared = _python_files(base / "solvers" / "common")
        if parts[1] == "adapters":
            return [file, *shared, *(base / "solvers" / "adapters").glob("_[!_]*.py")]
        packages, queue = dict.fromkeys(["common"]), [parts[1]]
        while queue:
            package = queue.pop()
            if package not in packages:
                packages[package] = None
                queue += _imported_solvers(_python_files(base / "solvers" / package))
        return [file for package in packages for file in _python_files(base / "solvers" / package)]
    return []


def _module_files(parts: list[str]) -> Iterator[tuple[Path, Path]]:
    """Each folder of the import path that has this module, and its file."""
    for base in (Path(entry).resolve() for entry in (os.getcwd(), *sys.path, str(ROOT))):
        module = base.joinpath(*parts)
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                yield base, file
                break


def constructor_arguments(target: str) -> list[str] | None:
    """What the class at `target` takes, read and not imported; None where its source does not say."""
    *parts, name = target.split(".")
    for _, file in _module_files(parts):
        try:
            statements = ast.parse(file.read_bytes()).body
        except SyntaxError:
            return None
        for found in statements:
            if isinstance(found, ast.ClassDef) and found.name == name:
                inits = [f.args for f in found.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                if not inits or inits[0].kwarg:
                    return None if inits or found.bases or found.decorator_list else []
                return [argument.arg for argument in (*inits[0].args[1:], *inits[0].kwonlyargs)]
        return None
    return None


def _imported_solvers(files: list[Path]) -> set[str]:
    """Packages of solvers/ that these modules import at their top level: what they import later, they hand over to."""
    found: set[str] = set()
    for file in files:
        try:
            statements = ast.parse(file.read_bytes()).body
        except SyntaxError:  # its cells end in an import error
            continue
        for statement in statements:
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            found.update(name.split(".")[1] for name in names if name.startswith("solvers."))
    return found


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []


def _relative(path: Path) -> str:
    # The same checkout elsewhere, or another user's folder, gives the same id.
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


@cache
def _gpu() -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver_version", "cuda_version"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return row
    try:
        handle = _first_visible()
        if handle is not None:
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            row["gpu_name"] = pynvml.nvmlDeviceGetName(handle)
            row["gpu_memory_bytes"] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            row["driver_version"] = pynvml.nvmlSystemGetDriverVersion()
            row["cuda_version"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return row


def _first_visible() -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(0) if pynvml.nvmlDeviceGetCount() else None
    first = visible.split(",")[0].strip()
    if not first or first == "-1":
        return None
    if first.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return pynvml.nvmlDeviceGetHandleByUUID(first)


def _packages() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _os_name() -> str:
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, Linux {platform.release()}"
    except OSError:
        return platform.platform()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _lock_hash() -> str | None:
    content = b"".join(path.read_bytes() for path in sorted(ROOT.glob("constraints*.txt")))
    return hashlib.sha256(content).hexdigest()[:16] if content else None

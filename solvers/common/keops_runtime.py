"""What every user of KeOps needs before its first formula. Import this module before torch.

KeOps compiles its GPU code with the CUDA toolkit's nvrtc. torch brings its own copy; if that one is loaded first the
first formula crashes the process, so the toolkit's copy is loaded here, at import.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from fsbench.api import Unsupported

_LIBRARIES = ("libnvrtc.so", "libnvrtc-builtins.so*", "libcudart.so")


def toolkit_root() -> Path | None:
    """Folder of the CUDA toolkit: $CUDA_PATH, $CUDA_HOME, the one nvcc belongs to, or None."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME")]
    candidates += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    candidates += ["/usr/local/cuda"]
    return next((Path(root) for root in candidates if root and (Path(root) / "lib64").is_dir()), None)


def preload_nvrtc() -> list[Path]:
    """Load the toolkit's nvrtc and runtime for all later libraries; returns what was loaded, if anything."""
    root = toolkit_root()
    if root is None:
        return []
    loaded = []
    for pattern in _LIBRARIES:
        for path in sorted((root / "lib64").glob(pattern))[:1]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            loaded.append(path)
    return loaded


def drop_cut_off_caches() -> None:
    """Remove the empty index files that a process killed at its end leaves behind: KeOps could not start with them."""
    own = os.environ.get("KEOPS_CACHE_FOLDER")
    for folder in [Path(own)] if own else Path.home().glob(".cache/keops*"):
        for index in folder.rglob("*_cache.pkl"):
            if index.stat().st_size == 0:
                index.unlink(missing_ok=True)


def check_device(device: str) -> None:
    """Raise Unsupported if KeOps would silently run a CUDA problem on the CPU."""
    if device != "cuda":
        return
    from pykeops.config import pykeops_cuda

    if not pykeops_cuda.get_use_cuda():
        raise Unsupported("KeOps found no CUDA toolkit and would run on the CPU: set CUDA_PATH to the toolkit's folder")


drop_cut_off_caches()
os.environ.setdefault("KEOPS_VERBOSE", "0")
os.environ.setdefault("PYKEOPS_VERBOSE", "0")
preload_nvrtc()

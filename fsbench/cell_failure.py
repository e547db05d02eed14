"""What a cell's exception is in its record: status, detail and phase."""

from __future__ import annotations

import os
import sys
import traceback

from fsbench.api import Unsupported
from fsbench.records import Phase, Record, Status


def describe_failure(exc: BaseException, phase: Phase) -> Record:
    """Status, detail, traceback and phase of a cell that raised `exc` in `phase`."""
    if isinstance(exc, Unsupported):
        reason = str(exc) or "no reason given"
        return {"status": Status.UNSUPPORTED.value, "status_detail": reason, "traceback": None, "phase": phase.value}
    return {
        "status": (Status.OOM if is_out_of_memory(exc) else Status.ERROR).value,
        "status_detail": without_folders(f"{type(exc).__name__}: {exc}".strip()),
        "traceback": without_folders("".join(traceback.format_exception(exc))),
        "phase": (Phase.IMPORT if isinstance(exc, ImportError) else phase).value,
    }


def without_folders(text: str) -> str:
    """text with files named relative to the folders that Python imports from: records are published."""
    folders = {os.path.abspath(folder) for folder in (*sys.path, os.getcwd())} - {os.sep}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return text


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc`, or the exception it was raised from, is a real allocation failure of device or host.

    A kernel that asks for more shared memory or registers than there are is a bug, not a lack of memory.
    """
    if isinstance(exc, ImportError):
        return False
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    text = str(exc).lower()
    marks = (
        "resource_exhausted", "out of memory", "out_of_memory", "cudaerrormemoryallocation", "cuda error 2:",
        "not enough memory", "defaultcpuallocator", "std::bad_alloc",
    )  # fmt: skip
    if "shared memory" not in text and any(mark in text for mark in marks):
        return True
    return exc.__cause__ is not None and is_out_of_memory(exc.__cause__)

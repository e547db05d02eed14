"""Run a script, named by the first argument, in Triton's interpreter without work that it repeats at every call.

At each call of a function inside a kernel, sums and maxima included, it patches all of `triton.language` anew, although
the kernel's launch has done so: half of its time. What kernels compute stays the same.
"""

from __future__ import annotations

import inspect
import runpy
import sys

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules_of: dict[object, set[str]] = {}
    patched: set[str] = set()  # modules, by the launch that runs

    def patch_new(fn):
        if fn not in modules_of:
            modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            modules_of[fn] = {module.__name__ for module in modules if module in (tl, tl.core)}
        if not modules_of[fn] or modules_of[fn] - patched:
            patched.update(modules_of[fn])
            return patch(fn)
        return None  # what calls inside a kernel do not use

    def launch_patched(*arguments, **options):
        patched.clear()
        return launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_patched


def look_types_up_by_name() -> None:
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(of: tl.dtype) -> np.dtype:
        if of.name not in found:
            found[of.name] = find(of)
        return found[of.name]

    interpreter._get_np_dtype = numpy_type


if __name__ == "__main__":
    if hasattr(interpreter, "_LangPatchScope"):  # as of Triton 3.7; of others the interpreter stays as it is
        patch_once_a_launch()
        look_types_up_by_name()
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")

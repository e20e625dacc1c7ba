"""Commands that run a module of moec in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import os
import sys

from moec.manifests.errors import ExecutionError

_PROGRAM = """\
import sys
sys.path[:] = [place for place in sys.path if place]
import ctypes, os, signal
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):
    raise SystemExit(1)  # the parent has ended before
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def own_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program, with this interpreter. This process must start it.

    Unlike with `python -m`, modules in the current folder are not imported. The system kills the program when the
    thread that started it ends, however that ends.
    Raises ExecutionError if the interpreter is not known.
    """
    if not sys.executable:
        raise ExecutionError("moec needs a Python interpreter, `sys.executable` names none", "set it")
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, *arguments]

"""Commands that run a module of moec in a process of its own."""

from __future__ import annotations

import sys

from moec.manifests.errors import ExecutionError

_PROGRAM = """\
import sys
sys.path[:] = [place for place in sys.path if place]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def own_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program, with this interpreter.

    Unlike with `python -m`, modules in the current folder are not imported.
    Raises ExecutionError if the interpreter is not known.
    """
    if not sys.executable:
        raise ExecutionError("moec needs a Python interpreter, `sys.executable` names none", "set it")
    return [sys.executable, "-c", _PROGRAM, module, *arguments]

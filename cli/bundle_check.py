"""Open a bundle and run its self-test, in a process of its own. As a program:

python -m moec.cli.bundle_check FOLDER [MEMORY]

It prints one JSON object: what was tested, or the error. A pull stays small that way, and a device with little memory
has it free for the next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from moec.manifests import errors
from moec.manifests.errors import ExecutionError, InputError, KernelUnavailable, MoecError, TryAgain

LIMIT_S = 3600
"""Longest time of a self-test, seconds. It takes seconds."""
_MAX_ERROR_CHARACTERS = 2000
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


def check_bundle(folder: Path, memory: str | None = None) -> str:
    """Check that a bundle opens here and computes what its compile computed. Return what was tested, as a sentence.

    memory: size of the budget, as `--memory` takes it.
    Raises the errors of opening and running a bundle. Raises ExecutionError if the process takes too long, and TryAgain
    if it ends in another way, for example because the system needs its memory.
    """
    command = own_command("moec.cli.bundle_check", str(folder), *([memory] if memory else []))
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ExecutionError(f"the self-test of `{folder}` takes longer than {LIMIT_S} s", "run it by hand") from error
    try:
        answer = json.loads(done.stdout)
        kind, message, hint = answer["kind"], answer["message"], answer["hint"]
    except (ValueError, KeyError, TypeError) as error:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:_MAX_ERROR_CHARACTERS]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise TryAgain(
            f"the self-test of `{folder}` ended with {ended}{': ' if last else ''}{last}",
            "check the memory of this device: moec verify --self-test",
        ) from error
    if kind is None:
        return str(message)
    raise getattr(errors, str(kind), ExecutionError)(message, hint)


def run_check(folder: Path, memory: str | None) -> str:
    """Open a bundle, compute its self-test, and return what was done, as a sentence."""
    from moec.manifests.self_test import SELF_TEST_NAME
    from moec.runtime import kernels
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.engine.self_test import run_self_test, self_test_of
    from moec.runtime.options.runtime import RuntimeOptions

    with open_bundle(folder) as bundle:
        device_of(bundle)
        if not bundle.has_file(SELF_TEST_NAME):
            return "the bundle opens; it has no self-test"
        test = self_test_of(bundle)
        options = RuntimeOptions() if memory is None else RuntimeOptions(memory=memory)
        with Engine(bundle, options) as engine:
            try:
                run_self_test(engine, test)
            except KernelUnavailable as error:  # numpy computes, or another version: nothing to compare with
                return f"the bundle runs; its self-test was left out: {error.message}"
            name = kernels.active()
    return f"self-test: the logits of {test.token_count} tokens are those of the compile, with the kernels {name}"


def main(arguments: list[str]) -> None:
    """See the head of this file."""
    try:
        if len(arguments) not in (1, 2):
            raise InputError("expected a folder, and perhaps a size of memory")
        message = run_check(Path(arguments[0]), arguments[1] if len(arguments) == 2 else None)
        answer = {"kind": None, "message": message, "hint": None}
    except MoecError as error:
        answer = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])


def own_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program, with this interpreter. This process must start it.

    Unlike with `python -m`, modules in the current folder are not imported. The system kills the program when the
    thread that started it ends, however that ends.
    Raises ExecutionError if the interpreter is not known.
    """
    if not sys.executable:
        raise ExecutionError("moec needs a Python interpreter, `sys.executable` names none", "set it")
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, *arguments]

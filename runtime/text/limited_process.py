"""A process that does one job with untrusted data, under limits of the system: start it, ask it, end it.

`limited_child.py` runs inside. A job is a file next to its caller, like `template_rendering.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moec.manifests.errors import ExecutionError, MissingDependency

_MAX_ANSWER_LINE = 64
_Process = TypeVar("_Process", bound="LimitedProcess")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    word: a word of the job; empty if the process of the request has ended.
    text: the text of the job.
    status: exit status of a process that has ended, as in subprocess; 0 for the others.
    """

    word: str
    text: str
    status: int = 0


class LimitedProcess:
    """A process for one job, which answers any number of requests. Leaving the `with` block ends it.

    The process starts at once and imports its packages. This costs no time if the caller has other work before `ask`.

    process: the process. Its `returncode` is None until `close` has collected it.
    """

    def __init__(self, job: Path, packages: Mapping[str, str], purpose: str) -> None:
        """job: the file of the job, as `limited_child.py` describes it.

        packages: names of the packages that it imports -> what installs them.
        purpose: what needs the process, for messages, like `chat templates`.
        Raises ExecutionError if it cannot be started, MissingDependency without a package.
        """
        if not sys.executable:
            raise ExecutionError(f"{purpose} need a Python interpreter, `sys.executable` names none", "set it")
        folders = list[str]()
        for name, requirement in packages.items():  # they are not imported here
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise MissingDependency(
                    f"{purpose} need the package `{name}`, which is not installed", f"pip install {requirement}"
                )
            folders.append(str(Path(spec.origin).parent.parent))
        child = Path(__file__).with_name("limited_child.py")
        command = [sys.executable, "-I", "-S", str(child), str(job), *dict.fromkeys(folders)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a group, so that processes of requests end with it
            )
        except OSError as error:
            raise ExecutionError(f"the process for {purpose} cannot start: {error.strerror}") from error
        self._is_begun, self._purpose = False, purpose

    def __enter__(self: _Process) -> _Process:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def kill(self) -> None:
        """End the process and those of its requests. Any thread may call this; `close` has to follow."""
        if self.process.returncode is None:  # else the number may be that of another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # data that was not sent is no longer needed
                if pipe is not None:
                    pipe.close()

    def ask(
        self, request: Mapping[str, Any], limit_bytes: int, settings: object = None, files: Sequence[bytes | None] = ()
    ) -> Answer:
        """Return the answer to a request.

        request: `memory_bytes`, `cpu_s`, and what the job reads.
        limit_bytes: most bytes of the text of the answer.
        settings, files: what the job begins with. Only those of the first request count.
        Raises ExecutionError if the system refuses limits of time and memory.
        """
        parts = [_line(request)]
        if not self._is_begun:
            self._is_begun = True
            sizes = [-1 if file is None else len(file) for file in files]
            parts = [_line({"settings": settings, "sizes": sizes}), *(file or b"" for file in files), *parts]
        source, target = self.process.stdout, self.process.stdin
        assert source is not None and target is not None  # both are pipes
        try:
            for message in parts:
                target.write(message)
            target.flush()
        except BrokenPipeError:
            pass  # the process has ended; its status is read below
        word, _, size = source.readline(_MAX_ANSWER_LINE).partition(b" ")
        if size.strip().isdigit() and int(size) <= limit_bytes:
            data = source.read(int(size))
            if len(data) == int(size) and word == b"ended":
                return Answer("", "", int(data))
            if len(data) == int(size) and word == b"unlimited":
                raise ExecutionError(
                    f"the system refuses limits of time and memory for {self._purpose} (prlimit64): {data.decode()}",
                    "allow the call in the sandbox",
                )
            if len(data) == int(size):
                return Answer(word.decode("ascii", errors="replace"), data.decode("utf-8", errors="surrogatepass"))
        if size:  # an answer that is too long
            self.kill()
        return Answer("", "", self.process.wait())


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process. status: exit status, as in subprocess, less than 0."""
    return next((member.name for member in signal.Signals if member == -status), str(-status))


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"

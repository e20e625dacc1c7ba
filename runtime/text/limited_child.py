"""Answer the requests of another process under limits of time and memory: the program of `limited_process.py`.

It imports only the standard library, because it is started with `python -I -S`. The arguments are the file of a job,
and the folders of the packages that the job imports. The job is a module with

- `prepare()`: one-time work before the first request,
- `Job(settings, files)`: the job, with `answer(request)`, which returns one word and a text,
- `IS_FORKED`: whether each request gets a process of its own, so that none leaves anything to the next one.

The first line on standard input is JSON with `settings` and `sizes`. The bytes of the files follow; a size of -1 means
that a file is missing. Each further line is a request: JSON with `memory_bytes`, `cpu_s` and what the job reads.
The answer on standard output is a line with the word and a number of bytes, then as many bytes of text in UTF-8.
The word `ended` says that the process of a request has ended; its text is the exit status, as in subprocess.
The word `unlimited` says that the system refuses the limits, so nothing was done; its text is the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from typing import Any

_STACK_BYTES = 4 << 20
"""Half of the stack of a thread, so that what passes here passes in the thread of a caller, too."""


def set_limits(memory_bytes: int, cpu_s: int) -> None:
    """Limit what the next request may take. A request cannot raise the limits.

    memory_bytes: address space in addition to what the process has.
    cpu_s: processor time in addition to what it used, whole seconds.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        held_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, held_bytes + memory_bytes)
    limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)  # a soft limit sends SIGXCPU
    limit(resource.RLIMIT_CORE, 0)


def limit(kind: int, soft: int) -> None:
    """Set a soft limit, but not above the hard one."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def answer(job: Any, line: bytes, is_forked: bool = False) -> None:
    """Answer one request. is_forked: whether this process answers no other one."""
    request = json.loads(line)
    try:
        if is_forked:
            limit(resource.RLIMIT_STACK, _STACK_BYTES)
        set_limits(request["memory_bytes"], request["cpu_s"])
    except OSError as error:
        write("unlimited", error.strerror or "")
        return
    write(*job.answer(request))


def _answer_apart(job: Any, line: bytes) -> None:
    """Answer one request in a process of its own. The end of that process is the answer if it gives none."""
    child = os.fork()
    if not child:
        answer(job, line, is_forked=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        write("ended", str(os.waitstatus_to_exitcode(status)))


def write(word: str, text: str) -> None:
    data = text.encode("utf-8", errors="surrogatepass")
    sys.stdout.buffer.write(f"{word} {len(data)}\n".encode() + data)
    sys.stdout.buffer.flush()


def _main() -> None:
    """Answer requests until the input ends. The one-time work is done while the caller does other work."""
    spec = importlib.util.spec_from_file_location("job", sys.argv[1])
    if spec is None or spec.loader is None:
        raise SystemExit(2)
    module: Any = importlib.util.module_from_spec(spec)
    sys.path += sys.argv[2:]
    spec.loader.exec_module(module)
    module.prepare()
    source = sys.stdin.buffer
    if not (line := source.readline()):
        return  # the caller has ended without a request
    first = json.loads(line)
    job = module.Job(first["settings"], [None if size < 0 else source.read(size) for size in first["sizes"]])
    while line := source.readline():
        (_answer_apart if module.IS_FORKED else answer)(job, line)
    os._exit(0)  # skip the clean-up of the interpreter: it takes time and may run out of memory


if __name__ == "__main__":
    _main()

"""Run command lines of moec in one process that has lm_eval, and print what each of them wrote.

The interpreter is that of the project. PYTHONPATH names the packages of build/serving-clients in addition. The process
notes every address that is asked for, and refuses it. Pauses before another try take no time.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from typing import Any

from moec.cli.main import cli

_ASKING = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
"""Events of the interpreter, and which of their arguments is the address."""
_asked: list[str] = []


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _ASKING:
        _asked.append(repr(arguments[_ASKING[event]]))
        raise OSError("there is no network in this test")


def run(arguments: list[str]) -> dict[str, Any]:
    """Return exit code, output and addresses of one command line."""
    _asked.clear()
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments, prog_name="moec")
        except SystemExit as end:
            code = end.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "asked": list(_asked)}


if __name__ == "__main__":
    sys.addaudithook(_refuse)
    time.sleep = lambda seconds: None
    found = [run(arguments) for arguments in json.load(sys.stdin)]
    print(json.dumps({"runs": found, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))

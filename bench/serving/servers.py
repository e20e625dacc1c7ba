"""Servers that a measurement starts, and clients that stream answers from them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..yardstick.limits import control_group

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
START_S = 300.0
"""Longest time until a server is ready. A file is read whole under a memory limit meanwhile."""


class Server:
    """A server in a process of its own. It ends with the `with` block.

    command: command line. The server prints its address to standard error, and has `/health`.
    limit_bytes: limit of its memory, page cache included; None for none.
    port: the port that it listens on, once entered.
    """

    def __init__(self, command: Sequence[str], limit_bytes: int | None = None) -> None:
        self._command, self._limit_bytes, self.port = command, limit_bytes, 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as stack:
            self._said = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "said"
            self._group = stack.enter_context(control_group(self._limit_bytes))
            with self._said.open("w") as said:
                process = self._group.start(self._command, said)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            self._wait_until_ready(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def memory(self) -> tuple[int | None, int | None]:
        """Return the largest memory under the limit, and how often the limit was reached; None without a limit."""
        return self._group.counts()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the address and for `/health`. Raises RuntimeError."""
        end_s = time.perf_counter() + START_S
        while process.poll() is None and time.perf_counter() < end_s:
            match = _ADDRESS.search(self._said.read_text(errors="replace"))
            self.port = int(match[1]) if match else 0
            if self.port and self._is_healthy():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self._command[0]} serves nothing: {self._said.read_text(errors='replace')[-500:]}")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class Load:
    """Requests of clients: each asks for a streamed answer to a prompt of its own.

    prompts: one prompt for each client, as token ids. So all servers compute the same tokens.
    tokens: tokens of an answer.
    end_token: a token that must not end an answer; None for servers with `ignore_eos`.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int
    end_token: int | None

    def body(self, client: int) -> dict[str, Any]:
        """Return the request of a client."""
        fixed: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False}
        if self.end_token is not None:
            fixed = {"logit_bias": {str(self.end_token): -100}}
        body = {"prompt": list(self.prompts[client]), "max_tokens": self.tokens, "temperature": 0, "stream": True}
        return body | {"stream_options": {"include_usage": True}} | fixed


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    tokens, pieces: in all. Text of incomplete characters is held back, so there may be fewer pieces than tokens.
    first_s, last_s: times of the first and the last piece, in seconds.
    """

    tokens: int
    pieces: int
    first_s: float
    last_s: float

    @property
    def rate(self) -> float | None:
        """Tokens per second from the first piece to the last. None if too few pieces tell the time of a token."""
        return (self.tokens - 1) / (self.last_s - self.first_s) if 2 * self.pieces > self.tokens else None


async def _answer(port: int, body: dict[str, Any]) -> Answer:
    """Ask for one answer."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    tokens, pieces, first_s = 0, 0, 0.0
    async for line in reader:
        if line.startswith(b"data: {"):
            pieces, first_s = pieces + 1, first_s or time.perf_counter()
            if b'"usage":{' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    last_s = time.perf_counter()
    writer.close()
    if not tokens:
        raise RuntimeError("a server ended an answer without its usage")
    return Answer(tokens, pieces, first_s, last_s)


async def _together(port: int, load: Load, clients: int) -> list[Answer]:
    return list(await asyncio.gather(*(_answer(port, load.body(client)) for client in range(clients))))


def rate(server: Server, load: Load, clients: int) -> tuple[float, float | None]:
    """Let clients ask at the same time.

    Returns two rates of all clients together, in tokens/s. The first has the prompts. The second is from the first
    piece of each client to its last; None if no answer has pieces for most of its tokens.
    """
    started_s = time.perf_counter()
    answers = asyncio.run(_together(server.port, load, clients))
    whole = sum(answer.tokens for answer in answers) / (max(answer.last_s for answer in answers) - started_s)
    steady = [answer.rate for answer in answers if answer.rate is not None]
    return whole, clients * sum(steady) / len(steady) if steady else None

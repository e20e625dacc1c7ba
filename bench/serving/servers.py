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
            found = _ADDRESS.search(self._said.read_text(errors="replace"))
            self.port = int(found[1]) if found else 0
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
        kept: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False}
        if self.end_token is not None:
            kept = {"logit_bias": {str(self.end_token): -100}}
        asked = {"prompt": list(self.prompts[client]), "max_tokens": self.tokens, "temperature": 0, "stream": True}
        return asked | {"stream_options": {"include_usage": True}} | kept


async def _answer(port: int, body: dict[str, Any]) -> tuple[int, float, float]:
    """Ask for one answer. Returns its tokens, and the times of its first and its last piece, in seconds."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    tokens, first_s = 0, 0.0
    async for line in reader:
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter()
            if b'"usage":{' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    last_s = time.perf_counter()
    writer.close()
    if not tokens:
        raise RuntimeError("a server ended an answer without its usage")
    return tokens, first_s, last_s


async def _together(port: int, load: Load, clients: int) -> list[tuple[int, float, float]]:
    return list(await asyncio.gather(*(_answer(port, load.body(client)) for client in range(clients))))


def rate(server: Server, load: Load, clients: int) -> tuple[float, float]:
    """Let clients ask at the same time.

    Returns two rates of all clients together, in tokens/s: with the prompts, and the sum of the clients' own rates from
    their first piece to their last.
    """
    started_s = time.perf_counter()
    found = asyncio.run(_together(server.port, load, clients))
    whole = sum(tokens for tokens, _, _ in found) / (max(last for _, _, last in found) - started_s)
    decoding = sum((tokens - 1) / (last - first) for tokens, first, last in found)
    return whole, decoding

"""Servers that a measurement starts, and clients that stream answers from them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Server:
    """A server in a process of its own. It ends with the `with` block.

    command: command line. The server prints its address to standard error.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port, said = 0, ""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            said += line
            if found := _ADDRESS.search(line):
                self.port = int(found[1])
                break
        if not self.port:
            raise RuntimeError(f"{command[0]} serves nothing: {said[-500:]}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        self._process.communicate()


@dataclass(frozen=True)
class Load:
    """Requests of clients: each asks for a streamed answer to a prompt of its own.

    prompts: one prompt for each client.
    tokens: tokens of an answer.
    end_token: a token that must not end an answer; None for servers with `ignore_eos`.
    """

    prompts: Sequence[str]
    tokens: int
    end_token: int | None

    def body(self, client: int) -> dict[str, Any]:
        """Return the request of a client."""
        kept: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False}
        if self.end_token is not None:
            kept = {"logit_bias": {str(self.end_token): -100}}
        asked = {"prompt": self.prompts[client], "max_tokens": self.tokens, "temperature": 0, "stream": True}
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

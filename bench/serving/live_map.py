"""Cost of the live feed, which moves the map of the page, in decoding speed.

    python -m bench.serving.live_map BUNDLE TEXT --results FILE [--share 50%] [--rounds N]

One server answers one client. In each round an answer is streamed without a listener of `/v1/moec/events`, and one with
a listener, in turns. The listener reads and drops what the server sends ten times a second. Prints the median of the
ratio of rates, with its quartiles, and the bytes and events that a listener gets in a second.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .arms import OwnArm, Room
from .servers import Load, Server, rate
from .throughput import prompts_of

_READ_BYTES = 1 << 16


class Listener:
    """A client of the live feed in a thread of its own. It counts bytes and events."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"GET /v1/moec/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        first = self._socket.recv(_READ_BYTES)
        if not first.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the live feed answers {first[:100]!r}")
        self.size_bytes, self.events, self._started_s = 0, 0, time.perf_counter()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := self._socket.recv(_READ_BYTES):
            self.size_bytes += len(piece)
            self.events += piece.count(b"data: ")

    def rates(self) -> tuple[float, float]:
        """Return bytes and events of a second."""
        elapsed_s = time.perf_counter() - self._started_s
        return self.size_bytes / elapsed_s, self.events / elapsed_s

    def close(self) -> None:
        """End the connection."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@contextmanager
def listening(port: int, rates: list[tuple[float, float]]) -> Iterator[None]:
    """Listen to the live feed meanwhile, and add what a second brought."""
    listener = Listener(port)
    try:
        yield
        rates.append(listener.rates())
    finally:
        listener.close()


def decoding_rate(server: Server, load: Load) -> float:
    """Return the rate of one answer after its first piece, in tokens/s. Raises RuntimeError if it is not known."""
    decoding = rate(server, load, 1)[1]
    if decoding is None:
        raise RuntimeError("the answer came in too few pieces: give another text")
    return decoding


def measure(server: Server, load: Load, rounds: int) -> list[dict[str, Any]]:
    """Return the rates of each round. A first round warms up."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        rates, fed = dict[bool, float](), list[tuple[float, float]]()
        for is_heard in (number % 2 == 0, number % 2 == 1):
            with listening(server.port, fed) if is_heard else nullcontext():
                rates[is_heard] = decoding_rate(server, load)
        ((fed_bytes, fed_events),) = fed
        row = {"alone": rates[False], "heard": rates[True], "bytes_per_s": fed_bytes, "events_per_s": fed_events}
        rows += [row] if number else []
        print(f"round {number} of {rounds}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description="Cost of the live feed in decoding speed.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--share", default="50%", help="experts in memory")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    prompts, end = prompts_of(options.bundle, options.text.read_text(encoding="utf-8"), 1, 120)
    arm = OwnArm("moec", sys.executable, options.bundle)
    with Server(arm.command(Room(options.share, None, 1, options.context))) as server:
        rows = measure(server, Load(prompts, options.tokens, end), options.rounds)
    low, middle, high = statistics.quantiles((row["heard"] / row["alone"] for row in rows), n=4)
    alone = statistics.median(row["alone"] for row in rows)
    fed = statistics.median(row["bytes_per_s"] for row in rows), statistics.median(row["events_per_s"] for row in rows)
    print(f"{options.share} of the experts: {alone:.1f} tokens/s alone; with a listener {middle:.4f} of it "
          f"(quartiles {low:.4f} to {high:.4f}); {fed[1]:.1f} events and {fed[0] / 1024:.1f} KiB a second")  # fmt: skip
    options.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

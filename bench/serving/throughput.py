"""Aggregate rate of `moec serve` with several clients, next to other versions of it and to llama-server.

    python -m bench.serving.throughput BUNDLE TEXT --arm before=PYTHON --arm after=PYTHON --results FILE

Next to llama-server, under a memory limit:

    python -m bench.serving.throughput BUNDLE TEXT --arm moec=PYTHON --peer llama-server=PROGRAM --gguf FILE --limited
        --results FILE --tokens 24 --characters 60

Each arm is a Python that has moec. A peer is llama-server of llama.cpp with the weights of the bundle. All servers run
at the same time, and clients ask them in turns, so that all meet the same state of the machine. A client asks for one
answer, streamed and greedy, to a prompt of its own. The rounds repeat this for every number of clients. Each share of
the experts in memory has servers of its own. With `--limited`, servers with less than all experts run in control groups
(root rights). Each has the memory that moec needs for this share, and 64 MiB.

Prints medians in tokens/s, all clients together, and writes every measurement as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moec.runtime import load

from ..yardstick.limits import drop_caches
from .arms import ALL, Arm, OwnArm, PeerArm, Room, short_read_ahead
from .servers import Load, Server, rate


def prompts_of(bundle: Path, text: str, clients: int, characters: int) -> tuple[list[list[int]], int]:
    """Return token ids of prompts that begin at different places of a text, and the end token.

    characters: length of a prompt.
    """
    step = max((len(text) - characters) // max(clients, 1), 1)
    with load(bundle, expert_cache="25%", context=64) as engine:
        (end, *_) = engine.bundle.manifest.model.eos_token_ids
        return [engine.encode(text[at * step : at * step + characters]) for at in range(clients)], end


def turns(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return the arms in the order of a round. Each is first in turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def measure(
    arms: Sequence[Arm], loads: dict[str, Load], room: Room, clients: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Return the rows of one share of the experts. The first round warms up."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = {arm.name: stack.enter_context(Server(arm.command(room), room.limit_bytes)) for arm in arms}
        for number in range(rounds + 1):
            for count in clients:
                for arm in turns(arms, number):
                    whole, decoding = rate(servers[arm.name], loads[arm.name], count)
                    asked = {"share": room.share, "clients": count, "arm": arm.name, "round": number}
                    rows += [asked | {"tokens_per_s": whole, "decoding_tokens_per_s": decoding}] if number else []
        for row in rows:
            peak, hits = servers[row["arm"]].memory()
            row.update({} if peak is None else {"peak_bytes": peak, "limit_hits": hits})
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line for the rows of one arm: median, least and most."""
    values = [row["tokens_per_s"] for row in rows]
    told = [row["decoding_tokens_per_s"] for row in rows if row["decoding_tokens_per_s"] is not None]
    decoding = f"; {statistics.median(told):.1f} decoding" if told else ""
    spread = f"{min(values):.1f} to {max(values):.1f}{decoding}"
    return f"{rows[0]['arm']} {statistics.median(values):.1f} ({spread})"


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description="Aggregate rate of `moec serve` with several clients.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM", help="llama-server")
    parser.add_argument("--gguf", type=Path, help="weights of the peers")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shares", nargs="+", default=[ALL, "50%", "25%"], help="experts in memory")
    parser.add_argument("--limited", action="store_true", help="limit the memory of the servers, page cache included")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--characters", type=int, default=240, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="options of all servers of moec")
    options = parser.parse_args()
    named = [each.split("=", 1) for each in options.arm]
    own = [OwnArm(name, python, options.bundle, tuple(options.extra)) for name, python in named]
    programs = [each.split("=", 1) for each in options.peer]
    peers = [PeerArm(name, program, options.gguf) for name, program in programs]
    arms: list[Arm] = [*own, *peers]
    slots = max(options.clients)
    prompts, end = prompts_of(options.bundle, options.text.read_text(encoding="utf-8"), slots, options.characters)
    loads = {arm.name: Load(prompts, options.tokens, None if arm.ignores_end else end) for arm in arms}
    rows: list[dict[str, Any]] = []
    for share in options.shares:
        is_limited = options.limited and share != ALL
        needed = own[0].needed_mib(share, slots, options.context) if is_limited else None
        with short_read_ahead(options.bundle) if is_limited else contextlib.nullcontext():
            if is_limited:
                drop_caches()
            found = measure(arms, loads, Room(share, needed, slots, options.context), options.clients, options.rounds)
        rows += found
        for clients in options.clients:
            told = [
                summary([row for row in found if (row["clients"], row["arm"]) == (clients, arm.name)]) for arm in arms
            ]
            limit = "" if needed is None else f", `--memory {needed}MiB`"
            print(f"{share} of the experts{limit}, {clients} clients: " + ", ".join(told), flush=True)
        options.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

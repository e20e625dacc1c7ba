"""Aggregate rate of `moec serve` with several clients.

    python -m bench.serving.throughput BUNDLE TEXT --arm before=PYTHON --arm after=PYTHON --results FILE

Each arm is a Python that has moec. Its server and those of the other arms run at the same time, and clients ask them in
turns, so that all meet the same state of the machine. A client asks for one answer, streamed and greedy, to a prompt of
its own. The rounds repeat this for every number of clients. Each share of the experts in memory has servers of its own.
Prints medians in tokens/s, all clients together, and writes every measurement as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from pathlib import Path
from typing import Any

from moec.runtime import load

from .servers import Load, Server, rate


def load_of(bundle: Path, text: str, clients: int, tokens: int, characters: int = 240) -> Load:
    """Return prompts that begin at different places of a text.

    characters: length of a prompt.
    """
    step = max((len(text) - characters) // max(clients, 1), 1)
    prompts = [text[at * step : at * step + characters] for at in range(clients)]
    with load(bundle, expert_cache="25%", context=64) as engine:
        (end, *_) = engine.bundle.manifest.model.eos_token_ids
    return Load(prompts, tokens, end)


def command(python: str, bundle: Path, share: str, slots: int, extra: list[str]) -> list[str]:
    """Return the command line of a server."""
    arguments = ["serve", str(bundle), "--port", "0", "--slots", str(slots), "--context", "512"]
    return [python, "-m", "moec.cli.main", *arguments, *([] if share == "100%" else ["--expert-cache", share]), *extra]


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description="Aggregate rate of `moec serve` with several clients.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shares", nargs="+", default=["100%", "50%", "25%"], help="experts in memory")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--characters", type=int, default=240, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="options of all servers")
    options = parser.parse_args()
    arms = dict(each.split("=", 1) for each in options.arm)
    text = options.text.read_text(encoding="utf-8")
    asked = load_of(options.bundle, text, max(options.clients), options.tokens, options.characters)
    rows: list[dict[str, Any]] = []
    for share in options.shares:
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(
                    Server(command(python, options.bundle, share, max(options.clients), options.extra))
                )
                for name, python in arms.items()
            }
            for number in range(options.rounds + 1):  # the first round warms up
                for clients in options.clients:
                    names = list(servers)
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        whole, decoding = rate(servers[name], asked, clients)
                        row = {"share": share, "clients": clients, "arm": name, "round": number}
                        rows += [row | {"tokens_per_s": whole, "decoding_tokens_per_s": decoding}] if number else []
        for clients in options.clients:
            told = []
            for name in arms:
                own = [row for row in rows if (row["share"], row["clients"], row["arm"]) == (share, clients, name)]
                values = [row["tokens_per_s"] for row in own]
                decoding = statistics.median(row["decoding_tokens_per_s"] for row in own)
                least, most = min(values), max(values)
                told.append(
                    f"{name} {statistics.median(values):.1f} ({least:.1f} to {most:.1f}; {decoding:.1f} decoding)"
                )
            print(f"{share} of the experts, {clients} clients: " + ", ".join(told), flush=True)
    options.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compare options in turns.

    python -m bench.runs.side_by_side BUNDLE TEXT expert_cache=75% expert_cache=75%,prefetch=off

Each setting has an engine. All engines run in one process and decode the same forced tokens in turns (`turns.py`). A
setting is a list of options of `moec.runtime.RuntimeOptions`, NAME=VALUE, separated by commas. Memory must hold all
engines. Prints medians per token, and the times of each setting divided by those of the first, paired by round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moec.runtime import Engine, load

from .turns import FIRST_POSITION, TURN_TOKENS, begin, decode_in_turns, print_turns


def setting(text: str) -> tuple[str, dict[str, Any]]:
    """Return a text like `readers=2,prefetch=off`, and its options as keywords of `load`.

    Raises argparse.ArgumentTypeError for another form. `true` and `false` become booleans, digits integers.
    """
    pairs = [part.split("=", 1) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of NAME=VALUE separated by commas")
    words: dict[str, Any] = {"true": True, "false": False}
    return text, {name: int(value) if value.isdecimal() else words.get(value, value) for name, value in pairs}


def main() -> None:
    """Read the command line, decode and print."""
    parser = argparse.ArgumentParser(description="Compare options in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("settings", nargs="+", type=setting, metavar="NAME=VALUE,...", help="options of one engine")
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    if options.rounds < 2 or len(dict(options.settings)) < len(options.settings):
        parser.error("expected at least two rounds, and no setting twice")
    context = FIRST_POSITION + options.rounds * TURN_TOKENS
    engines = dict[str, Engine]()
    for name, keywords in options.settings:
        engines[name] = load(options.bundle, **({"context": context} | keywords))
    base = options.settings[0][0]
    tokens = engines[base].encode(options.text.read_text(encoding="utf-8"))
    if len(tokens) < context:
        parser.error(f"{options.text} has {len(tokens)} tokens, {context} are needed: use fewer `--rounds`")
    for engine in engines.values():
        begin(engine, tokens)
    print_turns(decode_in_turns(engines, tokens, options.rounds), base)


if __name__ == "__main__":
    main()

"""Options side by side: ``python bench/side_by_side.py BUNDLE TEXT expert_cache=75% expert_cache=75%,prefetch=off``.

An engine for every setting, all in one process, decodes the same forced tokens in turns (`turns.py`). A setting is
options of `moec.runtime.RuntimeOptions`, NAME=VALUE with commas between; the first is what the others are divided by.
Memory must hold all of them. Prints medians per token and the quotients of the times, paired by round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turns import FIRST_POSITION, TURN_TOKENS, begin, decode_in_turns, print_turns

from moec.runtime import Engine, load


def setting(text: str) -> tuple[str, dict[str, Any]]:
    """`readers=2,prefetch=off` itself, and as keywords of `load`; `true` and `false` are what they say."""
    pairs = [part.split("=", 1) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=VALUE with commas between")
    words: dict[str, Any] = {"true": True, "false": False}
    return text, {name: int(value) if value.isdecimal() else words.get(value, value) for name, value in pairs}


def main() -> None:
    """Read the command line, decode, print."""
    parser = argparse.ArgumentParser(description="Options side by side, in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("settings", nargs="+", type=setting, metavar="NAME=VALUE,...", help="options of one engine")
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    if options.rounds < 2 or len(dict(options.settings)) < len(options.settings):
        parser.error("two rounds at least, and no setting twice")
    context = FIRST_POSITION + options.rounds * TURN_TOKENS
    engines = dict[str, Engine]()
    for name, keywords in options.settings:
        engines[name] = load(options.bundle, **({"context": context} | keywords))
    base = options.settings[0][0]
    tokens = engines[base].encode(options.text.read_text(encoding="utf-8"))
    if len(tokens) < context:
        parser.error(f"{options.text} has {len(tokens)} tokens, {context} are needed: take fewer `--rounds`")
    for engine in engines.values():
        begin(engine, tokens)
    print_turns(decode_in_turns(engines, tokens, options.rounds), base)


if __name__ == "__main__":
    main()

"""The expert cache in Python and in the extension.

    python -m bench.expert_cache.native_cache BUNDLE TEXT --expert-cache 61%

Two engines in one process decode the same forced tokens in turns (`runs/side_by_side.py`). Prints medians per
token and the quotient of the times, paired by round. Takes a minute for a gigabyte of experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

from moec.runtime import Engine, load
from moec.runtime.expert_cache import open_cache as choice_of_cache

from ..runs.side_by_side import begin, decode_in_turns, print_turns


def opened(path: Path, expert_cache: str, is_native: bool) -> Engine:
    """Return an engine whose cache is in the extension, or in Python."""
    with mock.patch.object(choice_of_cache, "why_not_native", return_value=None if is_native else "a comparison"):
        return load(path, expert_cache=expert_cache, context=1024)


def main() -> None:
    """Read the command line, decode and print."""
    parser = argparse.ArgumentParser(description="The cache in Python and in the extension, in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--expert-cache", default="61%")
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    engines = {
        "python": opened(options.bundle, options.expert_cache, is_native=False),
        "native": opened(options.bundle, options.expert_cache, is_native=True),
    }
    tokens = engines["python"].encode(options.text.read_text(encoding="utf-8"))
    for engine in engines.values():
        begin(engine, tokens)
    print_turns(decode_in_turns(engines, tokens, options.rounds), "python")


if __name__ == "__main__":
    main()

"""A layer's attention or experts in one call and in steps.

    python -m bench.kernels.layer_in_steps experts BUNDLE TEXT

One engine decodes forced tokens in turns of twenty. In every other turn Python calls the steps of one part of the
layers one by one. Both ways give the same bits. The first of a pair changes from pair to pair. Prints medians per
token and the paired quotient of the times. Takes a minute for a gigabyte of experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from moec.runtime import Engine, kernels, load

from ..runs.side_by_side import FIRST_POSITION, TURN_TOKENS, Rows, begin, print_turns, turn


@contextmanager
def attention_in_steps(engine: Engine) -> Iterator[None]:
    """Call every step of attention by itself, with checks of its arguments."""
    attend = kernels.attend

    def by_steps(
        layer: kernels.AttentionLayer | kernels.LatentLayer,
        hidden: np.ndarray,
        state: Sequence[np.ndarray],
        places: kernels.TokenPlaces,
    ) -> None:
        layer.mix_in_steps(kernels, hidden, state, places)

    kernels.attend = by_steps
    try:
        yield
    finally:
        kernels.attend = attend


@contextmanager
def experts_in_steps(engine: Engine) -> Iterator[None]:
    """Let Model call router, cache, advice, experts and sum one by one."""
    one_call, engine.model.pass_experts = engine.model.pass_experts, None
    try:
        yield
    finally:
        engine.model.pass_experts = one_call


PARTS = {"attention": attention_in_steps, "experts": experts_in_steps}


def main() -> None:
    """Read the command line, decode and print."""
    parser = argparse.ArgumentParser(description="A part of every layer in one call and in steps, in turns.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--expert-cache", help="as for `moec run`; by default all experts are in memory")
    parser.add_argument("--pairs", type=int, default=16)
    options = parser.parse_args()
    limit = {} if options.expert_cache is None else {"expert_cache": options.expert_cache}
    engine = load(options.bundle, context=2048, **limit)
    tokens = engine.encode(options.text.read_text(encoding="utf-8"))
    begin(engine, tokens)
    rows: Rows = {"one call": [], "steps": []}
    position = FIRST_POSITION
    for number in range(options.pairs):
        for name in list(rows) if number % 2 == 0 else reversed(rows):
            with PARTS[options.part](engine) if name == "steps" else nullcontext():
                rows[name].append(turn(engine, tokens, position))
            position += TURN_TOKENS
    print_turns(rows, "steps")


if __name__ == "__main__":
    main()

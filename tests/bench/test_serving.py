"""The comparison of servers runs real servers, and the bound on reads is that of the best cache."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.serving.arms import ALL, OwnArm, PeerArm, Room
from bench.serving.read_bound import Request, least_reads, recorded
from bench.serving.servers import Answer, Load, Server
from bench.serving.throughput import measure, summary, turns
from moec.runtime import load

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "bundle"
PROMPTS = [[5, 6, 7], [9, 8]]


def test_servers_are_asked_in_turns_and_each_answer_is_counted() -> None:
    arms = [OwnArm(name, sys.executable, SHIPPED) for name in ("one", "other")]
    loads = {arm.name: Load(PROMPTS, 4, end_token=0) for arm in arms}
    rows = measure(arms, loads, Room("50%", None, slots=2, context=32), clients=[1, 2], rounds=2)
    asked = [(row["round"], row["clients"], row["arm"]) for row in rows]
    assert asked == [(1, 1, "other"), (1, 1, "one"), (1, 2, "other"), (1, 2, "one")] + [
        (2, count, name) for count in (1, 2) for name in ("one", "other")
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert summary([row for row in rows if row["arm"] == "one"]).startswith("one ")
    assert [arm.name for arm in turns(arms, 1)] == ["other", "one"]


def test_an_answer_in_few_pieces_has_no_rate() -> None:
    """Text of incomplete characters is held back. The time of one piece says nothing of a token."""
    assert Answer(tokens=9, pieces=9, first_s=1.0, last_s=3.0).rate == 4.0
    assert Answer(tokens=9, pieces=3, first_s=1.0, last_s=1.001).rate is None


def test_a_server_runs_with_the_memory_that_moec_names() -> None:
    arm = OwnArm("moec", sys.executable, SHIPPED)
    needed = arm.needed_mib("50%", slots=2, context=32)
    room = Room("50%", needed, slots=2, context=32)
    assert room.limit_bytes == (needed + 64) << 20
    with Server(arm.command(room)) as server:
        assert server.port > 0
    with pytest.raises(RuntimeError, match="serves nothing"), Server(arm.command(Room("50%", 1, 2, 32))):
        pass


def test_the_peer_repacks_in_memory_and_maps_its_file_with_less() -> None:
    arm = PeerArm("llama-server", "/opt/llama-server", Path("weights.gguf"))
    whole = arm.command(Room(ALL, None, slots=4, context=64))
    assert whole[:3] == ["/opt/llama-server", "--model", "weights.gguf"]
    assert whole[whole.index("--ctx-size") + 1] == "256"
    assert whole[-2:] == ["--load-mode", "none"]
    assert arm.command(Room("25%", 100, slots=4, context=64))[-3:] == ["--load-mode", "mmap", "--no-repack"]
    assert Load(PROMPTS, 4, None).body(0)["ignore_eos"] is True


def fewest_reads(requests: Sequence[Request], capacity: int) -> int:
    """Return the fewest reads, by trying all that a cache may keep after each request."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for layer, experts in requests:
        wanted = frozenset(layer * 10 + expert for expert in experts)
        following: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            there = held | wanted
            for kept in itertools.combinations(sorted(there), min(capacity, len(there))):
                key, total = frozenset(kept), cost + len(wanted - held)
                following[key] = min(total, following.get(key, total))
        costs = following
    return min(costs.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_on_reads_is_that_of_the_best_cache(seed: int) -> None:
    generator = np.random.default_rng(seed)
    requests = [(layer, generator.choice(4, 2, replace=False).tolist()) for _ in range(4) for layer in range(2)]
    for capacity in (1, 2, 3):
        assert sum(least_reads(requests, capacity)) == fewest_reads(requests, capacity)


def test_the_requests_of_a_pass_are_those_of_all_its_streams() -> None:
    with load(SHIPPED, expert_cache="100%", slots=2, context=32) as engine:
        together = recorded(engine, PROMPTS, 2)
    with load(SHIPPED, expert_cache="100%", slots=1, context=32) as engine:
        alone = [recorded(engine, [prompt], 2) for prompt in PROMPTS]
    for (layer, experts), *others in zip(together, *alone, strict=True):
        assert all(other[0] == layer for other in others)
        assert experts == sorted({expert for _, chosen in others for expert in chosen})


def test_the_vocabulary_has_a_name_for_each_row(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from bench.yardstick.checkpoint.gguf_model import vocabulary

    told = {
        "model": {"vocab": {"</s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        "added_tokens": [{"id": 0, "content": "</s>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    tokens, kinds, merges = vocabulary(tmp_path, 5)
    assert (tokens, merges) == (["</s>", "a", "b", "ab", "<unused4>"], ["a b"])
    kind = gguf.TokenType
    assert kinds == [kind.CONTROL, kind.NORMAL, kind.NORMAL, kind.NORMAL, kind.UNUSED]

"""A prompt goes through all layers in one pass, so that it reads no expert twice, however small the cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from moec.runtime import Engine, kernels, load
from moec.runtime import engine as engine_module
from moec.runtime.expert_cache import ExpertCache
from moec.runtime.native_cache import NativeCache
from moec.runtime.options import Policy, Prefetch
from moec.runtime.prefetch import Advisor, Following
from moec.runtime.storage import ReadStorage, page_bytes
from moec.runtime.streaming_cache import StreamingCache
from tests.runtime.faulty_source import InTime, wait_for

CONTEXT = 64
PROMPT = [(7 * at * at + 5 * at + 3) % 250 + 3 for at in range(40)]

both_caches = pytest.mark.parametrize("policy, kind", [("lrfu", NativeCache), ("edgemoe", ExpertCache)])


def open_small(bundle: Path, policy: Policy, kind: type[StreamingCache], prefetch: Prefetch) -> Engine:
    """Room for 40 % of the experts, none of which is there."""
    if kind is NativeCache and kernels.compiled() is None:
        pytest.skip("no extension")
    engine = load(
        bundle, expert_cache="40%", context=CONTEXT, cache_state="cold", policy=policy, prefetch=prefetch, readers=2
    )
    assert isinstance(engine.cache, kind)
    return engine


@pytest.fixture
def read_by_python(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each expert has been read; the extension reads most by itself."""
    counts, load_some = Counter[int](), ReadStorage.load

    def counted(storage: ReadStorage, *run: int) -> None:
        counts.update(run)
        load_some(storage, *run)

    monkeypatch.setattr(ReadStorage, "load", counted)
    return counts


@both_caches
@pytest.mark.parametrize("prefetch", ["off", "lookahead", "path", "popularity"])
def test_a_prompt_reads_no_expert_twice(
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_by_python: Counter[int],
    policy: Policy,
    kind: type[StreamingCache],
    prefetch: Prefetch,
) -> None:
    """What the last layer reads ahead is for the next token, not for the prompt: here it does not look."""
    followings = Advisor.followings

    def of_this_pass(advisor: Advisor, layer: int) -> list[Following]:
        return [each for each in followings(advisor, layer) if each.layer > layer]

    monkeypatch.setattr(Advisor, "followings", of_this_pass)
    with open_small(tiny_bundle, policy, kind, prefetch) as engine:
        engine.prefill(PROMPT)
    stored, stats = engine.bundle.manifest.experts, engine.cache.stats
    assert stats.rereads == 0 and stats.evictions > 0
    assert 0.8 * len(stored) < stats.lookups <= stats.reads <= len(stored)
    assert stats.bytes_read <= sum(page_bytes(entry.size_bytes) for entry in stored)
    assert (stats.prefetch_reads > 0) == (prefetch != "off")
    if kind is ExpertCache:
        assert len(read_by_python) == stats.reads and set(read_by_python.values()) == {1}


@both_caches
def test_a_prompt_token_by_token_would_read_them_again(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, kind: type[StreamingCache]
) -> None:
    monkeypatch.setattr(engine_module, "MAX_PASS_TOKENS", 1)
    with open_small(tiny_bundle, policy, kind, "off") as engine:
        engine.prefill(PROMPT)
        assert engine.cache.stats.rereads > len(engine.bundle.manifest.experts)


def test_only_the_next_token_has_experts_read_again(
    tiny_bundle: Path, read_by_python: Counter[int], in_time: InTime
) -> None:
    """Those of its first layer, read ahead behind the prompt's last."""
    with open_small(tiny_bundle, "edgemoe", ExpertCache, "lookahead") as engine:
        engine.prefill(PROMPT)
        in_time(lambda: wait_for(lambda: engine.cache.stats.rereads > 0))
    twice = {index for index, count in read_by_python.items() if count > 1}
    assert 0 < len(twice) == engine.cache.stats.rereads and twice <= set(range(engine.model.first_expert[1]))

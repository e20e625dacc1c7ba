"""Learn to foresee later layers from the routing of the written bundle, run by the runtime that ships."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moec.evaluation.text_pairs import TokenPair
from moec.manifests.model import ExpertKey
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..lookahead.linear_maps import (
    HELD_OUT,
    MAX_AHEAD,
    MAX_TOKENS,
    LearnedMap,
    RoutingSample,
    can_learn,
    encode_maps,
    layer_groups,
    learn_maps,
    lookahead_report,
)
from ..preflight.prepared import Prepared
from ..request.plan import CompilePlan
from ..request.ports import LocalEngine
from ..request.task_data import train_texts

SAMPLE_SHARE = 8
"""The routing that is kept takes at most this part of the memory, or that of one layer and those that it foresees."""


def sample_bytes(prepared: Prepared) -> int:
    """Return the memory for the routing of texts. The runtime that records it has the rest."""
    return prepared.runtime_bytes // SAMPLE_SHARE


def lookahead_file(prepared: Prepared, plan: CompilePlan, engine: LocalEngine) -> tuple[bytes, dict[str, Any]] | None:
    """Return the content of `lookahead.safetensors`, and what quality.json says of it; None without learned routers."""
    maps = learn_lookahead(prepared, plan, engine)
    if not maps:
        return None
    data = encode_maps(maps)
    return data, lookahead_report(maps, len(data))


def learn_lookahead(prepared: Prepared, plan: CompilePlan, engine: LocalEngine) -> list[LearnedMap]:
    """Return the maps of a bundle that is not published yet; none if they foresee no more than its routers do.

    engine: opened on the bundle, with memory left for the sample.
    With little memory the texts run once for each group of layers. The maps are the same.
    """
    model = prepared.lowering.model
    if not prepared.splits or not can_learn(model):
        return []
    left_out = {ExpertKey(unit.layer, unit.expert) for unit, spec in plan.units.items() if spec.is_pruned}
    maps, progress = list[LearnedMap](), prepared.talk.progress("learning to look ahead")
    texts = sample_texts(prepared, engine.encode_pairs)
    if len(texts) < HELD_OUT:
        prepared.talk.note(f"no routers are learned: they need {HELD_OUT} train texts of 2 tokens, found {len(texts)}")
        return []
    groups = layer_groups(model, sum(map(len, texts)), sample_bytes(prepared))
    for number, group in enumerate(groups):
        samples = {
            layer: RoutingSample() for layer in model.expert_layers if group[0] <= layer <= group[-1] + MAX_AHEAD
        }
        for done, record in enumerate(engine.recorded_routing(texts), 1):
            for layer, sample in samples.items():
                sample.add(record[layer])
            progress(number * len(texts) + done, (len(groups) + 1) * len(texts))
        maps += learn_maps(samples, group, left_out)
    progress(1, 1)
    return maps


def sample_texts(prepared: Prepared, encode: Callable[[list[tuple[str, str]]], Sequence[TokenPair]]) -> list[list[int]]:
    """Return train texts of all tasks in turn as tokens, up to MAX_TOKENS of them.

    A text has as many tokens as one pass takes, because a pass is what is recorded.
    encode: returns the tokens of prompts and answers.
    """
    tasks = [train_texts(split, prepared.shots) for split in prepared.splits]
    left, longest = MAX_TOKENS, min(MAX_PASS_TOKENS, prepared.lowering.model.default_context)
    sample = list[list[int]]()
    for at in range(max(map(len, tasks))):
        for texts in tasks:
            if at < len(texts) and left > 0:
                ((prompt, answer),) = encode([texts[at]])
                tokens = [*prompt, *answer][: min(longest, left)]
                if len(tokens) > 1:
                    left -= len(tokens)
                    sample.append(tokens)
    return sample

"""Learn to foresee later layers from the routing of the written bundle, run by the runtime that ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moec.manifests.model import ExpertKey

from ..lookahead.linear_maps import LearnedMap, RoutingSample, can_learn, learn_maps, most_tokens
from ..preflight.kept_layers import runtime_bytes
from ..preflight.preparation import Prepared
from ..request.plan import CompilePlan
from ..request.ports import LocalEngine
from ..request.task_data import train_texts

_SAMPLE_SHARE = 8
"""The routing that is kept takes at most this part of the memory."""


def learn_lookahead(prepared: Prepared, plan: CompilePlan, partial: Path) -> list[LearnedMap]:
    """Return the maps of a bundle that is not published yet; none if they foresee no more than its routers do."""
    request, model = prepared.request, prepared.lowering.model
    if not prepared.splits or not can_learn(model):
        return []
    room = runtime_bytes(model, request.memory_limit_bytes)
    tokens = most_tokens(model, room // _SAMPLE_SHARE)
    samples = {layer: RoutingSample() for layer in model.expert_layers}
    progress = request.talk.progress("recording routing")
    with request.open_runtime(partial, room - room // _SAMPLE_SHARE) as engine:
        done = 0
        for record in engine.recorded_routing(_texts(prepared, engine, tokens)):
            for layer, routing in record.items():
                samples[layer].add(routing)
            done += len(record[model.expert_layers[0]].inputs)
            progress(min(done, tokens), tokens)
    progress(tokens, tokens)
    left_out = {ExpertKey(unit.layer, unit.expert) for unit, spec in plan.units.items() if spec.is_pruned}
    return learn_maps(model, samples, left_out, request.talk.progress("learning to look ahead"))


def _texts(prepared: Prepared, engine: LocalEngine, most: int) -> Iterator[list[int]]:
    """Yield train texts of all tasks in turn as tokens, up to `most` of them."""
    tasks = [train_texts(split, prepared.shots) for split in prepared.splits]
    done, longest = 0, prepared.lowering.model.default_context
    for at in range(max(map(len, tasks))):
        for texts in tasks:
            if at < len(texts) and done < most:
                ((prompt, answer),) = engine.encode_pairs([texts[at]])
                tokens = [*prompt, *answer][: min(longest, most - done)]
                if len(tokens) > 1:
                    done += len(tokens)
                    yield tokens

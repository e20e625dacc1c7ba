"""Hit ratio of eviction policies, without reading ahead."""

from __future__ import annotations

from collections.abc import Sequence

from moec.runtime.simulation.replay import OPTIMUM

from ..figure import Figure, Measured, Panel, Verdict, percent
from ..inputs import Inputs
from ..models import MODELS, NATURAL, Model
from ..replays import FIFO, RANDOM, TEXT_TOKENS, held_out_texts, replay_texts

POLICIES = {"EdgeMoE": "edgemoe", "LRFU": "lrfu", "LFU": "lfu", "LRU": "lru", "FIFO": FIFO, "random": RANDOM}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
TEXTS = 3


def hit_ratio(inputs: Inputs) -> Measured:
    """Replay traces under each policy and cache size."""
    panels, told, wins = [], [], dict[Model, list[bool]]()
    for model in MODELS:
        name, (replayed, texts) = model.label, held_out_texts(inputs, model, TEXTS)
        points = {}
        for label, policy in {**POLICIES, "optimum": OPTIMUM}.items():
            sizes = [(share, int(share * replayed.total_bytes)) for share in SHARES]
            points[label] = [
                (share, replay_texts(replayed, texts, size, policy).hit_rate)
                for share, size in sizes
                if size >= replayed.minimum_bytes
            ]
        panels.append(Panel("lines", name, "share of the experts in memory", "hit ratio", points=points))
        for at, (share, _) in enumerate(points["EdgeMoE"]):
            ratios = {label: points[label][at][1] for label in POLICIES}
            best = max(ratios, key=ratios.__getitem__)
            wins.setdefault(model, []).append(best == "EdgeMoE")
            told.append(
                f"{name}, {percent(share)} in memory: best {best} {percent(points[best][at][1], 1)}, EdgeMoE "
                f"{percent(points['EdgeMoE'][at][1], 1)}, optimum {percent(points['optimum'][at][1], 1)}"
            )
    verdict = wins_verdict([is_best for of_model in wins.values() for is_best in of_model])
    return Measured(panels, told, verdict, wins_verdict(wins[NATURAL]))


def wins_verdict(wins: Sequence[bool]) -> Verdict:
    """Return the verdict on a finding that should hold at each size."""
    return "same" if all(wins) else "partly" if any(wins) else "different"


FIGURES = (
    Figure(
        name="edgemoe-hit-ratio",
        paper="edgemoe",
        source="Figure 14",
        title="Hit ratio of eviction policies",
        reported="EdgeMoE's policy has the highest hit ratio of five policies at every size of the buffer, without "
        "preloading.",
        models=MODELS,
        how=f"{TEXTS} held-out texts one after the other in one cache, without reading ahead. The optimum evicts "
        f"the expert that is needed again last. The natural example has the routes of its checkpoint: {TEXTS} "
        f"sequences of {TEXT_TOKENS} tokens, with frequencies of train texts.",
        why="EdgeMoE's score is a fixed frequency of calibration over the distance of the layer. Policies that "
        "count uses in the text learn which experts it needs.",
        measure=hit_ratio,
        on_natural="EdgeMoE's policy is less than a point below the best one, because the use of experts is not "
        "balanced. LRU and FIFO find nothing in small caches.",
    ),
)

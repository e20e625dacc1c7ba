"""Paths and eviction on a Switch Transformer, the kind of model that EdgeMoE was made for.

Shapes: T tokens, L layers of the decoder, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from moec.compiler.calibration.activation_paths import frequent_share
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import lower
from moec.evaluation.data import load_splits
from moec.manifests.model import ModelSpec
from moec.runtime import load
from moec.runtime.simulation.replay import OPTIMUM
from moec.runtime.trace.trace import Access, TraceRecorder

from ..figure import Figure, Measured, Panel, judged, of_all, percent
from ..inputs import Inputs, complete_file
from ..models import DATA, SWITCH
from ..replays import equal_experts, replay_texts
from .caches import POLICIES, SHARES, wins_verdict
from .paths import LEAST_GAIN, PUBLISHED_SHARE, skew_curve
from .predictions import CONDITIONED_LAYER, conditioned, found_in_top, predictors

BUNDLE = "switch-16"
ITEMS = {"train": 1_000, "test": 400}
PREDICTED_TOKENS = 4_096
REPLAYED_ANSWERS = 100


@dataclass(frozen=True)
class Answers:
    """Routing of right answers.

    chosen: the expert of each token, answer after answer, uint8 [T, L, 1].
    lengths: tokens of each answer, int64.
    """

    chosen: np.ndarray
    lengths: np.ndarray


def answered(inputs: Inputs, split: str) -> Answers:
    """Return the routing of the right answers of a split. It is kept."""
    path = inputs.folder / "routes" / f"{SWITCH.name}-{SWITCH.digest()}-answers-{split}.npz"
    if not path.exists():
        data = load_splits(DATA, SWITCH.task)
        items = {"train": data.train, "test": data.test}[split].items[: ITEMS[split]]
        chosen, lengths = list[tuple[tuple[int, ...], ...]](), list[int]()
        with load(inputs.bundle(BUNDLE), expert_cache="100%") as engine:
            model = engine.model
            for item in items:
                engine.begin_sequence()
                prompt, answer = (engine.encode(text) for text in (data.task.prompt(item, ()), data.task.answer(item)))
                ((start,),) = engine.begin_texts([0], [prompt])
                model.trace = TraceRecorder(model.times, lambda: engine.cache.stats, model.spec.first_decoder_layer)
                for position, token in enumerate([start, *answer]):
                    engine.decode([token], [0], [position])
                    model.trace.end()
                chosen += [recorded.chosen for recorded in model.trace.passes]
                lengths.append(len(model.trace.passes))
                model.trace = None
        with complete_file(path) as partial, partial.open("wb") as file:
            np.savez(file, chosen=np.array(chosen, np.uint8), lengths=np.array(lengths))
    with np.load(path) as kept:
        return Answers(kept["chosen"], kept["lengths"])


def decoder_alone() -> ModelSpec:
    """Return the model without its encoder, for predictors of its decoder."""
    spec = lower(open_checkpoint(str(SWITCH.folder))).model
    layers = tuple(replace(layer, cross=None) for layer in spec.layers[spec.first_decoder_layer :])
    return replace(spec, layers=layers, encoder=None)


def paths(inputs: Inputs) -> Measured:
    """Measure how skewed paths are, and how well earlier layers foretell a layer."""
    train, test, spec = answered(inputs, "train").chosen, answered(inputs, "test").chosen, decoder_alone()
    share, observed = frequent_share(train)
    points, best = {}, {}
    for name, predictor in predictors(train, spec).items():
        shares = found_in_top(test[:PREDICTED_TOKENS], predictor, spec)
        points[name] = [(float(count), each) for count, each in enumerate(shares, 1)]
        best[name] = shares[0]
    use = conditioned(train, test)
    panels = [
        Panel(
            "lines",
            "Tokens on frequent paths",
            "share of the observed paths",
            "share of the tokens",
            points={f"all {train.shape[1]} layers": skew_curve(train), "first 3 layers": skew_curve(train[:, :3])},
        ),
        Panel(
            "bars",
            f"Use in layer {CONDITIONED_LAYER}",
            "expert",
            "share of the tokens",
            groups=[str(expert) for expert in range(len(use.of_all))],
            bars={"all tokens": use.of_all, use.label: use.after},
        ),
        Panel("lines", "Chosen among the n likeliest", "n", "share of the chosen experts", points=points),
    ]
    told = [
        f"{percent(share)} of {len(train):,} tokens on 20 % of {observed:,} observed paths",
        "chosen expert was the likeliest: " + ", ".join(f"{percent(each)} with {name}" for name, each in best.items()),
        f"most used expert of layer {CONDITIONED_LAYER}: {percent(max(use.of_all))} of all tokens, "
        f"{percent(max(use.after))} of those after {use.condition}",
    ]
    gains = [after - before for before, after in pairwise(best.values())]
    skew = judged([share], PUBLISHED_SHARE, PUBLISHED_SHARE)
    known = judged([*gains, max(use.after) - max(use.of_all)], LEAST_GAIN, 0)
    return Measured(panels, told, of_all([skew, known]))


def hit_ratio(inputs: Inputs) -> Measured:
    """Replay the requests of answers under each policy and cache size."""
    test = answered(inputs, "test")
    replayed, texts = equal_experts(answered(inputs, "train").chosen), requests_by_answer(test)[:REPLAYED_ANSWERS]
    sizes = [(share, int(share * replayed.total_bytes)) for share in SHARES]
    points = {
        label: [(share, replay_texts(replayed, texts, size, policy).hit_rate) for share, size in sizes]
        for label, policy in {**POLICIES, "optimum": OPTIMUM}.items()
    }
    told, wins = [], []
    for at, (share, own) in enumerate(points["EdgeMoE"]):
        best = max(POLICIES, key=lambda label: points[label][at][1])
        wins.append(best == "EdgeMoE")
        told.append(
            f"{percent(share)} in memory: best {best} {percent(points[best][at][1], 1)}, EdgeMoE {percent(own, 1)}, "
            f"optimum {percent(points['optimum'][at][1], 1)}"
        )
    panel = Panel("lines", SWITCH.label, "share of the decoder's experts in memory", "hit ratio", points=points)
    return Measured([panel], told, wins_verdict(wins))


def requests_by_answer(answers: Answers) -> list[list[Access]]:
    """Return the requests of each answer."""
    experts = int(answers.chosen.max()) + 1
    rows = answers.chosen[:, :, 0] + experts * np.arange(answers.chosen.shape[1])
    ends = np.cumsum(answers.lengths)[:-1]
    return [
        [(layer, (expert,)) for token in text.tolist() for layer, expert in enumerate(token)]
        for text in np.split(rows, ends)
    ]


FIGURES = (
    Figure(
        name="edgemoe-switch-paths",
        paper="edgemoe",
        source="Figures 4 and 8",
        title="Activation paths of a Switch Transformer",
        reported="20 % of the paths carry more than 99 % of the tokens (Switch base, SAMSum and GLUE). With two "
        "earlier layers known, one expert of layer 3 is chosen by 87.1 % of the tokens.",
        models=(SWITCH,),
        how=f"The decoder's paths over {ITEMS['train']:,} right answers of the train split. They foretell the first "
        f"{PREDICTED_TOKENS:,} tokens of held-out answers.",
        why="Earlier layers foretell later ones, as published, and more than in the decoders above: one expert per "
        "layer makes one path. Training balances the experts, so paths are less skewed.",
        measure=paths,
    ),
    Figure(
        name="edgemoe-switch-hit-ratio",
        paper="edgemoe",
        source="Figure 14",
        title="Hit ratio of eviction policies on a Switch Transformer",
        reported="EdgeMoE's policy has the highest hit ratio of five policies at every size of the buffer, without "
        "preloading.",
        models=(SWITCH,),
        how=f"The decoder's requests in {REPLAYED_ANSWERS} held-out answers, one after the other in one cache, "
        "without reading ahead, with frequencies of train answers.",
        why="As published. An answer has 17 tokens, so what it used says less than the frequencies of calibration.",
        measure=hit_ratio,
    ),
)

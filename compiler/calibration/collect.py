"""Counts of calibration: the experts that tokens of training texts choose, their paths and router weights.

Shapes: T tokens, L layers, E experts of the largest layer, K top-k, Q quantiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moec.evaluation.data import SplitData
from moec.manifests.bundle import CalibrationSummary
from moec.manifests.errors import DataError
from moec.manifests.model import ExpertKey, ModelSpec

from ..walker.texts import TokenTexts, text_batches
from .activation_paths import DEFAULT_PATH_KEYS, PathKeys, PathReport
from .stack_routes import StackRoutes, count_routes, routed_stacks, spread

QUANTILES = 101
UNIMPORTANCE_BINS = 200
HELD_OUT_SHARE = 0.2
"""Share of the texts on which the path report tests its predictions. The counts themselves use all texts."""
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """The counts of calibration. A stack is the encoder or the decoder.

    num_tokens: tokens that were run.
    texts_sha256: digest of their ids, text by text.
    seed: seed of the choice of texts.
    popularity: uint32 [L, E], tokens of each expert. A row of a routed layer sums to K times the tokens of its stack.
    transitions: uint32 [L-1, E, E], from a routed layer to the next routed layer of its stack.
    path_keys, path_offsets, path_experts, path_counts: see paths.PathDictionary.
    router_quantiles: float32 [L, Q], quantiles 0 to 1 of a token's largest router weight.
    lower_half: float64 [L], mean share of a token's router weight in the lower-ranked half of its experts. It is at
        most 0.5, for an even router.
    unimportance: int64 [L, UNIMPORTANCE_BINS], counts of chosen experts by unimportance, in even bins from 0 to 1; see
        `weight_summary`. A token's best expert is not counted.
    unseen_experts: experts that no token reached.
    path_report: quality of predictions from paths.
    paths_kept: `pairs` or `sets` if the report decided which keys are kept; empty if it did not.
    calibrated: tokens of calibration for each expert, uint32 [L, E], if `popularity` is that of devices; else None.
    """

    num_tokens: int
    texts_sha256: str
    seed: int
    popularity: NDArray[np.uint32]
    transitions: NDArray[np.uint32]
    path_keys: NDArray[np.int32]
    path_offsets: NDArray[np.int64]
    path_experts: NDArray[np.uint16]
    path_counts: NDArray[np.uint32]
    router_quantiles: NDArray[np.float32]
    lower_half: NDArray[np.float64]
    unimportance: NDArray[np.int64]
    unseen_experts: tuple[ExpertKey, ...]
    path_report: PathReport
    paths_kept: str = ""
    calibrated: NDArray[np.uint32] | None = None

    @property
    def calibrated_tokens(self) -> NDArray[np.uint32]:
        """Tokens of calibration for each expert, uint32 [L, E]: how well its inputs are known."""
        return self.popularity if self.calibrated is None else self.calibrated


def choose_texts(texts: TokenTexts, context: int, seed: int, max_tokens: int) -> tuple[TokenTexts, frozenset[int]]:
    """Return the texts that calibration runs, cut to the context, and their places in `texts`.

    seed: decides their order.
    max_tokens: maximum number of tokens, if more than one text is left.
    Raises DataError if there is no token.
    """
    rows, prompts = [row[:context] for row in texts.rows], [prompt[:context] for prompt in texts.prompts]
    usable = [at for at, row in enumerate(rows) if row and (not prompts or prompts[at])]
    if not usable:
        raise DataError("calibration has no text", "give a train split with at least one item")
    order = [usable[at] for at in np.random.default_rng(seed).permutation(len(usable)).tolist()]
    shuffled = TokenTexts([rows[at] for at in order], [prompts[at] for at in order] if prompts else [])
    chosen = shuffled.first(max_tokens)
    return chosen, frozenset(order[: len(chosen.rows)])


LayerCounts = Mapping[str, NDArray[Any]]
"""Counts of one routed layer, see `layer_inputs.calibrate_layer`. Empty for a layer without experts."""


def count_statistics(
    model: ModelSpec,
    texts: TokenTexts,
    seed: int,
    counts: Sequence[LayerCounts],
    path_keys: PathKeys = DEFAULT_PATH_KEYS,
) -> ActivationStatistics:
    """Add up the counts of all layers. The path report covers the decoder alone, whose routes are predicted.

    texts: the texts of calibration.
    seed: seed of their choice.
    counts: of each layer.
    path_keys: `best`: the path report chooses the keys of the paths. Without held-out tokens they are pairs.
    Raises DataError if no layer of the decoder routes.
    """
    stacks = _stacks(model, texts, counts)
    layers = [stack.layers for stack in stacks]
    weights = [np.stack([counts[at]["weights"] for at in layer_numbers], axis=1) for layer_numbers in layers]
    grid = np.linspace(0, 1, QUANTILES)
    quantiles = [np.quantile(stack_weights[:, :, 0], grid, axis=0).T.astype(np.float32) for stack_weights in weights]
    lower_half = [stack_weights[:, :, 1].mean(axis=0, dtype=np.float64) for stack_weights in weights]
    unimportance = np.zeros((model.num_layers, UNIMPORTANCE_BINS), np.int64)
    unimportance[list(model.expert_layers)] = [counts[layer]["unimportance"] for layer in model.expert_layers]
    return ActivationStatistics(
        num_tokens=sum(len(stack.experts) for stack in stacks),
        texts_sha256=texts_digest([*texts.rows, *texts.prompts]),
        seed=seed,
        **count_routes(model, stacks, path_keys),
        router_quantiles=spread(quantiles, layers, model.num_layers),
        lower_half=spread(lower_half, layers, model.num_layers),
        unimportance=unimportance,
        unseen_experts=tuple(key for key in model.expert_keys() if not counts[key.layer]["tokens"][key.expert]),
    )


def _stacks(model: ModelSpec, texts: TokenTexts, counts: Sequence[LayerCounts]) -> list[StackRoutes]:
    """Return the routes of the encoder, if it has routed layers, and of the decoder. Raises DataError."""
    stacks = list[StackRoutes]()
    for layers in routed_stacks(model):
        is_decoder = layers[0] >= model.first_decoder_layer
        routes = np.stack([counts[at]["routes"] for at in layers], axis=1)
        passing = texts.rows if is_decoder else texts.prompts
        text_of_token = np.array([at for batch in text_batches(texts) for at in batch for _ in passing[at]])
        is_held_out = (text_of_token < round(HELD_OUT_SHARE * len(texts.rows))) & is_decoder
        stacks.append(StackRoutes(np.array(layers), routes, is_held_out))
    if not stacks or stacks[-1].layers[-1] < model.first_decoder_layer:
        raise DataError("no layer of the decoder routes, which calibration counts", "compile it with `--uniform`")
    return stacks


def unseen_notes(statistics: ActivationStatistics) -> list[str]:
    """Return a sentence for each expert without a token, or for the first of many."""
    unseen = statistics.unseen_experts
    notes = [
        f"expert {key.expert} of layer {key.layer} saw no calibration token: it is rounded unweighted"
        for key in unseen[:_MOST_NAMED]
    ]
    if len(unseen) > _MOST_NAMED:
        notes.append(f"so are {len(unseen) - _MOST_NAMED} more experts; give more text in the train split")
    return notes


def weight_summary(weights: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
    """Summarise the router weights [N, K] of some tokens.

    Returns the largest weight and the share of the lower-ranked half, float32 [N, 2], and counts of unimportance, int64
    [UNIMPORTANCE_BINS]. The unimportance of an expert is the share of its token's weight in better-ranked experts. It
    is 0 for the best expert, which is not counted. HOBBIT compares its thresholds with it.
    Source: HOBBIT, token-level dynamic loading.
    """
    ranked = weights.float().sort(dim=1, descending=True).values
    shares = ranked / ranked.sum(1, keepdim=True).clamp_min(1e-20)
    lower = shares[:, (weights.shape[1] + 1) // 2 :].sum(1)
    before = shares.cumsum(1)[:, :-1].clamp(0, 1)
    places = (before * UNIMPORTANCE_BINS).long().clamp_max(UNIMPORTANCE_BINS - 1)
    counts = torch.bincount(places.reshape(-1), minlength=UNIMPORTANCE_BINS).numpy()
    return torch.stack([ranked[:, 0], lower], dim=1), np.asarray(counts, np.int64)


def texts_digest(rows: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 over the rows. The length of a row precedes it."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.array([len(row), *row], dtype="<i4").tobytes())
    return digest.hexdigest()


def training_digest(splits: Sequence[SplitData]) -> str:
    """Return the SHA-256 over the train items of all tasks."""
    return hashlib.sha256("".join(split.train.sha256 for split in splits).encode()).hexdigest()


def calibration_summary(statistics: ActivationStatistics, splits: Sequence[SplitData]) -> CalibrationSummary:
    """Return the manifest's description of the calibration text.

    splits: all tasks. Their train items are the text.
    """
    return CalibrationSummary(
        task="+".join(split.task.name for split in splits),
        data_sha256=training_digest(splits),
        items=sum(len(split.train.items) for split in splits),
        tokens=statistics.num_tokens,
        seed=statistics.seed,
        experts_without_tokens=tuple(f"{key.layer}.{key.expert}" for key in statistics.unseen_experts),
    )

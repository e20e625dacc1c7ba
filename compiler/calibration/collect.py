"""Calibration: run the reference model over training text, and count experts, routes and inputs.

Shapes: T tokens, L layers, E experts of the largest layer, K top-k, D hidden, F expert width, Q quantiles.
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
from moec.evaluation.engine import no_progress
from moec.evaluation.text_pairs import TokenPair
from moec.manifests.bundle import CalibrationSummary
from moec.manifests.errors import DataError
from moec.manifests.model import ExpertKey, ModelSpec
from moec.manifests.progress import Progress

from ..reference.expert_module import intermediate
from ..reference.model import ReferenceModel
from .paths import PathReport, count_paths, count_popularity, count_transitions, report_paths
from .second_moments import SecondMoments

QUANTILES = 101
UNIMPORTANCE_BINS = 200
HELD_OUT_SHARE = 0.2
"""Share of the texts on which the path report tests its predictions. The counts themselves use all texts."""
_ARRAYS = (
    "popularity", "transitions", "path_keys", "path_offsets", "path_experts", "path_counts", "router_quantiles",
    "lower_half", "unimportance",
)  # fmt: skip
_REPORT = "path_report."
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """The counts of calibration. A stack is the encoder or the decoder.

    num_tokens: tokens that were run.
    texts_sha256: digest of their ids, text by text.
    seed: seed of the choice of texts.
    popularity: uint32 [L, E]. A row of a routed layer sums to K times the tokens of its stack.
    transitions: uint32 [L-1, E, E], from a routed layer to the next routed layer of its stack.
    path_keys, path_offsets, path_experts, path_counts: see paths.PathDictionary.
    router_quantiles: float32 [L, Q], quantiles 0 to 1 of a token's largest router weight.
    lower_half: float64 [L], mean share of a token's router weight in the lower-ranked half of its experts. It is at
        most
        0.5, for an even router.
    unimportance: int64 [L, UNIMPORTANCE_BINS], counts of chosen experts by unimportance, in even bins from 0 to 1; see
        `weight_summary`. A token's best expert is not counted.
    second_moments: second moments of every projection's inputs.
    path_report: quality of predictions from paths.
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
    second_moments: SecondMoments
    path_report: PathReport

    @property
    def unseen_experts(self) -> tuple[ExpertKey, ...]:
        """Experts that no token reached."""
        return self.second_moments.unseen()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return name -> array, for the journal."""
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in _ARRAYS}
        arrays["num_tokens"], arrays["seed"] = np.array(self.num_tokens), np.array(self.seed)
        arrays["texts_sha256"] = np.frombuffer(bytes.fromhex(self.texts_sha256), np.uint8)
        for name, value in self.path_report.to_json().items():
            arrays[_REPORT + name] = np.array(value, np.float64)
        return {**arrays, **self.second_moments.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ActivationStatistics:
        """Rebuild from the result of `to_arrays`. Raises KeyError if a part is missing."""
        report = {name.removeprefix(_REPORT): float(arrays[name]) for name in arrays if name.startswith(_REPORT)}
        return cls(
            num_tokens=int(arrays["num_tokens"]),
            texts_sha256=arrays["texts_sha256"].tobytes().hex(),
            seed=int(arrays["seed"]),
            second_moments=SecondMoments.from_arrays(arrays),
            path_report=PathReport.from_json(report),
            **{name: arrays[name] for name in _ARRAYS},
        )


def calibrate(
    reference: ReferenceModel,
    pairs: Sequence[TokenPair],
    seed: int = 0,
    max_tokens: int | None = None,
    progress: Progress = no_progress,
) -> ActivationStatistics:
    """Run prompts with their answers through the reference model and count. Equal inputs give equal statistics.

    pairs: token ids (ReferenceModel.encode_pairs). Texts longer than the context are cut.
    seed: seed of the choice of texts.
    max_tokens: approximate number of tokens to run, or None for all texts.
    progress: called with (texts done, texts in all).
    Raises DataError if there is no token.
    """
    sources, decoded = reference.divide(pairs)
    chosen = chosen_texts(decoded, reference.model.original_positions, seed, max_tokens, sources)
    rows, prompts = [row for row, _ in chosen], [prompt for _, prompt in chosen]
    recorder = _Recorder(reference.model)
    handles = [
        module.register_forward_pre_hook(recorder.hook(layer)) for layer, module in reference.network.experts.items()
    ]
    done: list[int] = []
    try:
        for indices, _ in reference.hidden_batches(rows, recorder.start, prompts):
            recorder.finish()
            done += indices
            progress(len(done), len(rows))
    finally:
        for handle in handles:
            handle.remove()
    texts = np.array([index for index in done for _ in rows[index]])
    held_out = texts < round(HELD_OUT_SHARE * len(rows))
    decoder, encoder = recorder.decoder.routes(held_out), recorder.encoder.routes()
    digest = texts_digest([*rows, *prompts] if encoder is not None else rows)
    if decoder is None:
        raise DataError("no layer of the decoder routes, which calibration counts", "compile it with `--uniform`")
    return count_statistics(reference.model, recorder.moments, decoder, digest, seed, recorder.unimportance, encoder)


def chosen_texts(
    pairs: Sequence[TokenPair],
    context: int,
    seed: int,
    max_tokens: int | None,
    sources: Sequence[list[int]] = (),
) -> list[tuple[list[int], list[int]]]:
    """Return the token rows that calibration runs, each with its tokens for an encoder. `seed` decides their order.

    sources: tokens of each pair for an encoder, empty without one.
    Raises DataError if there is no token.
    """
    read = list(sources) or [[] for _ in pairs]
    rows = [((before + answer)[:context], s[:context]) for (before, answer), s in zip(pairs, read, strict=True)]
    rows = [(row, source) for row, source in rows if row and (source or not any(sources))]
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    if max_tokens is not None:
        ends = np.cumsum([sum(map(len, rows[index])) for index in order])
        order = order[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]
    rows = [rows[index] for index in order]
    if not rows:
        raise DataError("calibration has no text", "give a train split with at least one item")
    return rows


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The experts of each token in the M routed layers of a stack.

    layers: [M], indices of the layers.
    experts: uint16 [T, M, K].
    weights: float32 [T, M, 2], see `weight_summary`.
    held_out: bool [T], tokens of the texts that the path report predicts.
    """

    layers: NDArray[np.int64]
    experts: NDArray[np.uint16]
    weights: NDArray[np.float32]
    held_out: NDArray[np.bool_]


def count_statistics(
    model: ModelSpec,
    moments: SecondMoments,
    decoder: Routes,
    digest: str,
    seed: int,
    unimportance: NDArray[np.int64],
    encoder: Routes | None = None,
) -> ActivationStatistics:
    """Count the routes of all tokens. The path report covers the decoder alone, whose routes are predicted."""
    experts = max(layer.experts.count for layer in model.layers)
    stacks = [decoder] if encoder is None else [encoder, decoder]
    # The encoder's layers come first, so that keys stay sorted.
    paths = [count_paths(stack.experts, experts) for stack in stacks]
    keys = [found.keys.copy() for found in paths]
    for own, stack in zip(keys, stacks, strict=True):
        own[:, 0] = stack.layers[own[:, 0]]
    sizes = np.concatenate([np.diff(found.offsets) for found in paths])
    popularity = [count_popularity(stack.experts, experts) for stack in stacks]
    transitions = [count_transitions(stack.experts, experts) for stack in stacks]
    grid = np.linspace(0, 1, QUANTILES)
    quantiles = [np.quantile(stack.weights[:, :, 0], grid, axis=0).T.astype(np.float32) for stack in stacks]
    lower_half = [stack.weights[:, :, 1].mean(axis=0, dtype=np.float64) for stack in stacks]
    layers, starts = [stack.layers for stack in stacks], [stack.layers[:-1] for stack in stacks]
    routes, held_out = decoder.experts, decoder.held_out
    return ActivationStatistics(
        num_tokens=sum(len(stack.experts) for stack in stacks),
        texts_sha256=digest,
        seed=seed,
        popularity=_spread(popularity, layers, model.num_layers),
        transitions=_spread(transitions, starts, model.num_layers - 1),
        path_keys=np.concatenate(keys),
        path_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        path_experts=np.concatenate([found.experts for found in paths]),
        path_counts=np.concatenate([found.counts for found in paths]),
        router_quantiles=_spread(quantiles, layers, model.num_layers),
        lower_half=_spread(lower_half, layers, model.num_layers),
        unimportance=unimportance,
        second_moments=moments,
        path_report=report_paths(routes[~held_out], routes[held_out], experts),
    )


def _spread(stacks: Sequence[NDArray[Any]], layers: Sequence[NDArray[np.int64]], count: int) -> NDArray[Any]:
    """Put rows of some layers into an array with zeros for all other layers."""
    spread = np.zeros((count, *stacks[0].shape[1:]), stacks[0].dtype)
    for rows, places in zip(stacks, layers, strict=True):
        spread[places] = rows
    return spread


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


class _Recorder:
    """Records the inputs of the experts of every layer. Padding is left out."""

    def __init__(self, model: ModelSpec) -> None:
        self.moments = SecondMoments.zeros(model)
        self.unimportance = np.zeros((model.num_layers, UNIMPORTANCE_BINS), np.int64)
        self._model, first = model, model.first_decoder_layer
        self.encoder = _StackRecorder([layer for layer in model.expert_layers if layer < first])
        self.decoder = _StackRecorder([layer for layer in model.expert_layers if layer >= first])

    def start(self, real: Tensor, real_prompts: Tensor) -> None:
        """Begin a pass.

        real, real_prompts: masks of real tokens in rows and in prompts, bool [B * T] each.
        """
        self.decoder.real, self.encoder.real = real, real_prompts

    def hook(self, layer: int) -> Any:
        """Return the hook of one experts module. It takes (x [N, D], experts [N, K], router weights [N, K])."""
        stack = self.encoder if layer < self._model.first_decoder_layer else self.decoder
        has_capacity = self._model.layers[layer].experts.router.capacity > 0

        def record(module: Any, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            inputs, chosen, weights = (argument[stack.real] for argument in arguments[:3])
            summary, unimportance = weight_summary(weights)
            stack.add(layer, chosen, summary)
            self.unimportance[layer] += unimportance
            for expert in range(module.num_experts):
                # The expert of a token over the capacity does not compute it.
                token, rank = torch.where((chosen == expert) & (weights > 0) if has_capacity else chosen == expert)
                if len(token):
                    rows, weight = inputs[token], weights[token, rank].unsqueeze(1)
                    self.moments.add(layer, expert, rows * weight, intermediate(module, expert, rows) * weight)

        return record

    def finish(self) -> None:
        """End a pass."""
        self.encoder.finish()
        self.decoder.finish()


class _StackRecorder:
    """The routes of one stack of layers, batch by batch."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.real = torch.zeros(0, dtype=torch.bool)
        self._layers = list(layers)
        self._chosen: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._batches: list[tuple[NDArray[np.uint16], NDArray[np.float32]]] = []

    def add(self, layer: int, chosen: Tensor, weights: Tensor) -> None:
        """Add experts [N, K] and summaries of the router weights [N, 2] of one layer."""
        self._chosen[layer], self._weights[layer] = chosen, weights

    def finish(self) -> None:
        """End a pass."""
        if self._layers:
            chosen = torch.stack([self._chosen[layer] for layer in self._layers], dim=1)
            weights = torch.stack([self._weights[layer] for layer in self._layers], dim=1)
            self._batches.append((chosen.numpy().astype(np.uint16), weights.numpy().copy()))

    def routes(self, held_out: NDArray[np.bool_] | None = None) -> Routes | None:
        """Return the routes of all tokens, or None if no layer is routed.

        held_out: bool [T], or None for no held-out token.
        """
        if not self._layers:
            return None
        experts, weights = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        held = np.zeros(len(experts), bool) if held_out is None else held_out
        return Routes(np.array(self._layers), experts, weights, held)


def weight_summary(weights: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
    """Summarise the router weights [N, K] of some tokens.

    Returns the largest weight and the share of the lower-ranked half, float32 [N, 2], and counts of unimportance, int64
    [UNIMPORTANCE_BINS]. The unimportance of an expert is the share of its token's weight in better-ranked experts. It
    is 0
    for the best expert, which is not counted. HOBBIT compares its thresholds with it.
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


def calibration_summary(statistics: ActivationStatistics, splits: Sequence[SplitData]) -> CalibrationSummary:
    """Return the manifest's description of the calibration text.

    splits: all tasks. Their train items are the text.
    """
    digest = hashlib.sha256("".join(split.train.sha256 for split in splits).encode()).hexdigest()
    return CalibrationSummary(
        task="+".join(split.task.name for split in splits),
        data_sha256=digest,
        items=sum(len(split.train.items) for split in splits),
        tokens=statistics.num_tokens,
        seed=statistics.seed,
        experts_without_tokens=tuple(f"{key.layer}.{key.expert}" for key in statistics.unseen_experts),
    )

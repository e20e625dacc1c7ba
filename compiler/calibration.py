"""Calibration: the reference model over training text, and what it says about experts, routes and inputs.

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

from moec.evaluation.engine import Progress, no_progress
from moec.evaluation.text_pairs import TokenPair
from moec.manifests.errors import DataError
from moec.manifests.model import ExpertKey, ModelSpec

from .expert_module import intermediate
from .reference import ReferenceModel
from .second_moments import SecondMoments
from .statistics_paths import (
    PathReport,
    count_paths,
    count_popularity,
    count_transitions,
    report_paths,
)

QUANTILES = 101
HELD_OUT_SHARE = 0.2
"""Share of the texts that the report on paths predicts from the rest; the counts themselves take all texts."""
_ARRAYS = (
    "popularity", "transitions", "path_keys", "path_offsets", "path_experts", "path_counts", "router_quantiles",
)  # fmt: skip
_REPORT = "path_report."
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """What calibration counted.

    num_tokens: tokens run; texts_sha256: digest of their ids, text by text; seed: of the choice of texts.
    popularity: uint32 [L, E], each row of a layer with experts sums to num_tokens * K. transitions: uint32 [L-1, E, E].
    path_*: see statistics_paths.PathDictionary. router_quantiles: float32 [L, Q], quantiles 0 to 1 of a token's
    largest router weight. second_moments: of every projection's inputs. path_report: what the paths predict.
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
    second_moments: SecondMoments
    path_report: PathReport

    @property
    def unseen_experts(self) -> tuple[ExpertKey, ...]:
        """Experts that no token reached."""
        return self.second_moments.unseen()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Name -> array, for the journal."""
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in _ARRAYS}
        arrays["num_tokens"], arrays["seed"] = np.array(self.num_tokens), np.array(self.seed)
        arrays["texts_sha256"] = np.frombuffer(bytes.fromhex(self.texts_sha256), np.uint8)
        for name, value in self.path_report.to_json().items():
            arrays[_REPORT + name] = np.array(value, np.float64)
        return {**arrays, **self.second_moments.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ActivationStatistics:
        """Rebuild what `to_arrays` gave. Raises KeyError if a part is missing."""
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
    """Run prompts with their answers through the reference model and count.

    pairs: token ids (ReferenceModel.encode_pairs). Texts longer than the context are cut. max_tokens: run a choice of
    texts of about so many tokens, drawn with `seed`; None runs all. progress: texts done, texts in all.
    Equal input gives equal statistics. Raises DataError without a token.
    """
    rows = chosen_texts(pairs, reference.model.max_positions, seed, max_tokens)
    recorder = _Recorder(reference.model)
    handles = [
        module.register_forward_pre_hook(recorder.hook(layer)) for layer, module in reference.network.experts.items()
    ]
    texts: list[int] = []
    try:
        for indices, _ in reference.hidden_batches(rows, before=recorder.start):
            recorder.finish()
            texts.extend(index for index in indices for _ in rows[index])
            progress(len(set(texts)), len(rows))
    finally:
        for handle in handles:
            handle.remove()
    routes, largest = recorder.routes(), recorder.largest_weights()
    held_out = np.array(texts) < round(HELD_OUT_SHARE * len(rows))
    return count_statistics(reference.model, recorder.moments, routes, largest, held_out, texts_digest(rows), seed)


def chosen_texts(pairs: Sequence[TokenPair], context: int, seed: int, max_tokens: int | None) -> list[list[int]]:
    """The token rows that calibration runs, in an order drawn with `seed`. Raises DataError without a token."""
    rows = [row for row in ((prompt + answer)[:context] for prompt, answer in pairs) if row]
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    if max_tokens is not None:
        ends = np.cumsum([len(rows[index]) for index in order])
        order = order[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]
    rows = [rows[index] for index in order]
    if not rows:
        raise DataError("calibration has no text", "give a train split with at least one item")
    return rows


def count_statistics(
    model: ModelSpec,
    moments: SecondMoments,
    routes: NDArray[np.uint16],
    largest: NDArray[np.float32],
    held_out: NDArray[np.bool_],
    digest: str,
    seed: int,
) -> ActivationStatistics:
    """Count the routes of all tokens. held_out: [T], the tokens of texts that the report predicts.

    routes: [T, M, K] of the M layers that hold routed experts; largest: [T, M]. Other layers count nothing.
    """
    experts, layers = max(layer.experts.count for layer in model.layers), np.array(model.expert_layers)
    paths = count_paths(routes, experts)
    keys = paths.keys.copy()
    keys[:, 0] = layers[keys[:, 0]]
    steps = np.flatnonzero(np.diff(layers) == 1)  # from a routed layer to the next one
    transitions = count_transitions(routes, experts)[steps]
    quantiles = np.quantile(largest, np.linspace(0, 1, QUANTILES), axis=0).T.astype(np.float32)
    return ActivationStatistics(
        num_tokens=len(routes),
        texts_sha256=digest,
        seed=seed,
        popularity=_spread(count_popularity(routes, experts), layers, model.num_layers),
        transitions=_spread(transitions, layers[steps], model.num_layers - 1),
        path_keys=keys,
        path_offsets=paths.offsets,
        path_experts=paths.experts,
        path_counts=paths.counts,
        router_quantiles=_spread(quantiles, layers, model.num_layers),
        second_moments=moments,
        path_report=report_paths(routes[~held_out], routes[held_out], experts),
    )


def _spread(rows: NDArray[Any], layers: NDArray[np.int64], count: int) -> NDArray[Any]:
    """Rows of some layers among zeros for all the others."""
    spread = np.zeros((count, *rows.shape[1:]), rows.dtype)
    spread[layers] = rows
    return spread


def unseen_notes(statistics: ActivationStatistics) -> list[str]:
    """A sentence for each expert without a token, or for the first of many."""
    unseen = statistics.unseen_experts
    notes = [
        f"expert {key.expert} of layer {key.layer} saw no calibration token: it is rounded unweighted"
        for key in unseen[:_MOST_NAMED]
    ]
    if len(unseen) > _MOST_NAMED:
        notes.append(f"so are {len(unseen) - _MOST_NAMED} more experts; give more text in the train split")
    return notes


class _Recorder:
    """Receives what every layer hands to its experts, real tokens only."""

    def __init__(self, model: ModelSpec) -> None:
        self.moments = SecondMoments.zeros(model)
        self._layers = model.expert_layers
        self._real = torch.zeros(0, dtype=torch.bool)
        self._chosen: dict[int, Tensor] = {}
        self._largest: dict[int, Tensor] = {}
        self._batches: list[tuple[NDArray[np.uint16], NDArray[np.float32]]] = []

    def start(self, real: Tensor) -> None:
        """A pass begins; real: [B * T] bool, which places hold tokens."""
        self._real = real

    def hook(self, layer: int) -> Any:
        """The hook of one experts module: called with (x [N, D], experts [N, K], router weights [N, K])."""

        def record(module: Any, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            inputs, chosen, weights = (argument[self._real] for argument in arguments[:3])
            self._chosen[layer], self._largest[layer] = chosen, weights.amax(1)
            for expert in range(module.num_experts):
                token, rank = torch.where(chosen == expert)
                if len(token):
                    rows, weight = inputs[token], weights[token, rank].unsqueeze(1)
                    self.moments.add(layer, expert, rows * weight, intermediate(module, expert, rows) * weight)

        return record

    def finish(self) -> None:
        """A pass is over."""
        chosen = torch.stack([self._chosen[layer] for layer in self._layers], dim=1)
        largest = torch.stack([self._largest[layer] for layer in self._layers], dim=1)
        self._batches.append((chosen.numpy().astype(np.uint16), largest.numpy().copy()))

    def routes(self) -> NDArray[np.uint16]:
        """[T, M, K] experts of every token in the layers that route."""
        return np.concatenate([chosen for chosen, _ in self._batches])

    def largest_weights(self) -> NDArray[np.float32]:
        """[T, M] the largest router weight of every token."""
        return np.concatenate([largest for _, largest in self._batches])


def texts_digest(rows: Sequence[Sequence[int]]) -> str:
    """SHA-256 over the rows, each with its length in front."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.array([len(row), *row], dtype="<i4").tobytes())
    return digest.hexdigest()

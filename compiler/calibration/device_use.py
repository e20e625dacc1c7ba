"""The use of experts on devices, from a popularity file, instead of what calibration text says.

It replaces the tokens of each expert. With routes it also replaces transitions and paths. Second moments, gradients and
router scores need inputs of experts, which no trace has. They stay those of the calibration text.
Shapes: L layers, E experts of the largest layer, M routed layers of a stack, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, architecture_digest, read_use
from moec.manifests.model import ModelSpec

from .activation_paths import PathKeys
from .collect import ActivationStatistics
from .stack_routes import StackRoutes, count_routes, routed_stacks
from .tables import Tables

MOST_TOKENS = 1 << 24
"""Tokens that the counts of a layer stand for at most, so that they fit in 32 bits."""
_MOST_NAMED = 8


@dataclass(frozen=True, eq=False, slots=True)
class DeviceUse:
    """A popularity file that fits the model.

    sha256: digest of the file.
    use: its content.
    stacks: its routes; empty if it has none.
    """

    sha256: str
    use: ExpertUse
    model: ModelSpec
    stacks: tuple[StackRoutes, ...]

    def statistics(self, calibrated: ActivationStatistics, path_keys: PathKeys) -> ActivationStatistics:
        """Return the statistics with the use on devices. Tokens of calibration stay in `calibrated`.

        path_keys: keys of the path tables, see `count_statistics`.
        """
        counted = {**self._counted(path_keys), "popularity": self.popularity(calibrated.popularity)}
        return replace(calibrated, **counted, calibrated=calibrated.calibrated_tokens)

    def tables(self, path_keys: PathKeys) -> Tables:
        """Return the tables of a compile without data. They have no router scores."""
        counted = {**self._counted(path_keys), "popularity": self.popularity(None)}
        plain = Tables.empty(self.model)
        return replace(plain, **{field.name: counted[field.name] for field in fields(plain) if field.name in counted})

    def popularity(self, calibrated: NDArray[np.integer] | None) -> NDArray[np.uint32]:
        """Return the tokens of each expert, uint32 [L, E]. A row of a routed layer sums to K times its tokens.

        An expert that no traced bundle holds keeps its share of the calibration. The others share the rest as devices
        use them. If only some bundles hold an expert, its share is that of their tokens.
        calibrated: tokens of calibration, [L, E]; None: an expert that no traced bundle holds has an even share.
        """
        counts = np.zeros((self.model.num_layers, max(self.use.experts)), np.uint32)
        for layer in self.model.expert_layers:
            count, top_k, tokens = self.use.experts[layer], self.use.top_k[layer], self.use.tokens[layer]
            calibrated_counts = np.ones(count) if calibrated is None else calibrated[layer, :count].astype(np.float64)
            if not tokens:  # an encoder that no trace ran
                counts[layer, :count] = calibrated_counts
                continue
            rates = _rates(self.use.chosen[layer], self.use.offered[layer], calibrated_counts, top_k)
            counts[layer, :count] = np.rint(rates * min(tokens, MOST_TOKENS)).astype(np.uint32)
        return counts

    def _counted(self, path_keys: PathKeys) -> dict[str, Any]:
        """Return the counts over the routes, by their names in the statistics; none without routes."""
        return count_routes(self.model, self.stacks, path_keys) if self.stacks else {}

    def to_json(self) -> dict[str, Any]:
        """Return what quality.json says of it."""
        return {
            "sha256": self.sha256,
            "traces": self.use.traces,
            "tokens": self.use.decoded_tokens,
            "experts_of_calibration": [f"{layer}.{expert}" for layer, expert in self.use.never_offered()],
            "has_paths": bool(self.stacks),
        }

    def notes(self, calibrated_tokens: int | None) -> list[str]:
        """Return sentences for the user.

        calibrated_tokens: tokens of calibration; None without data.
        """
        count = "1 trace" if self.use.traces == 1 else f"{self.use.traces:,} traces"
        traced = f"{count}, of {self.use.decoded_tokens:,} tokens"
        text = "" if calibrated_tokens is None else f"; calibration has {calibrated_tokens:,}"
        notes = [f"the use of experts is that of {traced}{text}"]
        missing = [f"{layer}.{expert}" for layer, expert in self.use.never_offered()]
        source = "is even" if calibrated_tokens is None else "is that of calibration"
        if missing:
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            named = ", ".join(missing[:_MOST_NAMED]) + more
            notes.append(f"no traced bundle holds the experts {named}: their use {source}")
        if not self.stacks and calibrated_tokens is not None:
            notes.append("every traced bundle leaves experts out: activation paths are those of calibration")
        return notes


def read_device_use(path: Path, model: ModelSpec) -> DeviceUse:
    """Return the content of a popularity file.

    Raises InputError for a damaged file, and for one of another model.
    """
    use, digest = read_use(path)
    shape = [(layer.experts.count, layer.experts.top_k) for layer in model.layers]
    traced = list(zip(use.experts, use.top_k, strict=True))
    if use.architecture != architecture_digest(model) or traced != shape:
        raise InputError(
            f"`{path}` is of another model: {_shape_text(traced)}; the checkpoint has {_shape_text(shape)}",
            "merge traces of bundles of this model",
        )
    try:
        return DeviceUse(digest, use, model, _stacks(use.routes, model))
    except ValueError as error:
        raise InputError(
            f"`{path}` is no popularity file: {error}", "make it with `moec merge-traces TRACE... -o FILE`"
        ) from error


def _rates(
    chosen: Sequence[int], offered: Sequence[int], calibrated: NDArray[np.float64], top_k: int
) -> NDArray[np.float64]:
    """Return the share of tokens that use each expert of a layer, float64 [E]. They sum to K."""
    is_traced = np.array(offered) > 0
    rates: NDArray[np.float64] = calibrated * (top_k / max(float(calibrated.sum()), 1.0))
    if not is_traced.any():
        return rates
    rates[is_traced] = np.array(chosen, np.float64)[is_traced] / np.array(offered, np.float64)[is_traced]
    rest = max(top_k - float(rates[~is_traced].sum()), 0.0)
    total = float(rates[is_traced].sum())
    rates[is_traced] *= rest / total if total else 0.0
    return rates


def _stacks(routes: Sequence[SampledRoutes], model: ModelSpec) -> tuple[StackRoutes, ...]:
    """Return the routes of the stacks that route. Raises ValueError if they do not fit the model."""
    starts = [0, model.first_decoder_layer] if model.first_decoder_layer else [0]
    if routes and [sampled.first_layer for sampled in routes] != starts:
        raise ValueError(f"expected routes from the layers {starts} on")
    stacks = list[StackRoutes]()
    for layers in routed_stacks(model) if routes else []:
        sampled_routes = routes[-1] if layers[0] >= model.first_decoder_layer else routes[0]
        top_k = model.layers[layers[0]].experts.top_k
        if len({model.layers[layer].experts.top_k for layer in layers}) > 1:
            raise ValueError("expected no routes through layers with several top-k")
        parts = [
            np.frombuffer(route_bytes, "<u2").astype(np.uint16).reshape(-1, len(layers), top_k)
            for route_bytes in (sampled_routes.counted, sampled_routes.held_out)
        ]
        experts = np.concatenate(parts)
        counts = np.array([model.layers[layer].experts.count for layer in layers])
        if (experts >= counts[None, :, None]).any():
            raise ValueError("a route has an expert that does not exist")
        ordered = np.sort(experts, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            raise ValueError("a route has an expert twice in a layer")
        stacks.append(StackRoutes(np.array(layers), experts, np.arange(len(experts)) >= len(parts[0])))
    return tuple(stacks)


def _shape_text(shape: Sequence[tuple[int, int]]) -> str:
    kinds = sorted(set(shape), reverse=True)
    return f"{len(shape)} layers of {', '.join(f'{count} experts, top-{top_k}' for count, top_k in kinds[:3])}"

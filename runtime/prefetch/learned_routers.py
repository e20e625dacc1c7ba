"""Routers that a compile learned to foresee later layers, and the record of a pass from which it learns them.

A bundle has them in `lookahead.safetensors`, if its compile measured that they foresee more than the later routers do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.bundle import LOOKAHEAD_NAME, BundleManifest
from moec.manifests.errors import ManifestInvalid, StorageReadFailed
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from moec.manifests.safetensors_header import HeaderError, TensorEntry, header_of

from .. import kernels
from ..bundle.open_bundle import Bundle
from ..layers.norms import Norm
from ..layers.routing import Router
from .advisor import Advisor
from .pass_state import PassState
from .predictors import Predictor

MAX_AHEAD = 3
"""Most layers between the running one and the one that is foreseen."""
_NAME = re.compile(r"layers\.([0-9]{1,5})\.ahead\.([1-3])\.(weight\.([a-z0-9]{1,12})|bias)")
_COMPILE_AGAIN = "compile the bundle again"


@dataclass(frozen=True, slots=True)
class ForeseeingMatrix:
    """A linear map from the normed stream of a layer to the router logits of a later one.

    data: packed matrix [E, D], uint8.
    bias: float32 [E].
    """

    data: np.ndarray
    spec: QuantSpec
    bias: np.ndarray


def read_lookahead(bundle: Bundle) -> dict[tuple[int, int], ForeseeingMatrix]:
    """Return the matrices by running layer and distance, in layers; none if the bundle has no such file.

    Raises ManifestInvalid if names, types or sizes contradict the model. Raises StorageReadFailed.
    """
    if not bundle.has_file(LOOKAHEAD_NAME):
        return {}
    model, file = bundle.manifest.model, bundle.files[LOOKAHEAD_NAME]
    place = f"`{bundle.path / LOOKAHEAD_NAME}`"
    try:
        header = header_of(file.descriptor, 2 * MAX_AHEAD * model.num_layers)
    except HeaderError as error:
        raise ManifestInvalid(f"{place}: {error}", _COMPILE_AGAIN) from error
    except OSError as error:
        raise StorageReadFailed(f"{place} cannot be read: {error.strerror}", "check the disk") from error
    weights, biases = dict[tuple[int, int], tuple[QuantSpec, TensorEntry]](), dict[tuple[int, int], TensorEntry]()
    for name, entry in header.items():
        match = _NAME.fullmatch(name)
        try:
            if match is None:
                raise ValueError
            key = int(match[1]), int(match[2])
            spec = None if match[4] is None else QuantSpec.parse(match[4])  # a bias has no format
        except ValueError:
            raise ManifestInvalid(f"{place}: unknown tensor `{name[:80]}`", _COMPILE_AGAIN) from None
        expected = _expected(place, name, model, key, spec)
        if (entry.dtype, entry.shape) != expected:
            raise ManifestInvalid(
                f"{place}, tensor `{name[:80]}`: expected {expected}, found {entry.dtype, entry.shape}", _COMPILE_AGAIN
            )
        if spec is None:
            biases[key] = entry
        else:
            weights[key] = (spec, entry)
    if weights.keys() != biases.keys() or 2 * len(weights) != len(header):
        raise ManifestInvalid(f"{place}: expected a weight and a bias of each layer and distance", _COMPILE_AGAIN)
    return {
        key: ForeseeingMatrix(
            bundle.read_tensor_bytes(LOOKAHEAD_NAME, entry),
            spec,
            bundle.read_tensor_bytes(LOOKAHEAD_NAME, biases[key]).view(np.float32),
        )
        for key, (spec, entry) in weights.items()
    }


def _expected(
    place: str, name: str, model: ModelSpec, key: tuple[int, int], spec: QuantSpec | None
) -> tuple[str, tuple[int, ...]]:
    """Return type and shape of a tensor. Raises ManifestInvalid if the model has no such layers or formats."""
    layer, ahead = key
    routes = layer + ahead < model.num_layers and model.layers[layer].experts.count > 0
    count = model.layers[layer + ahead].experts.count if routes else 0
    is_format = spec is None or (not spec.is_pruned and spec.fits(model.hidden_size))
    if not count or model.encoder is not None or not is_format:
        raise ManifestInvalid(f"{place}: `{name[:80]}` is for no router of the model", _COMPILE_AGAIN)
    return ("F32", (count,)) if spec is None else ("U8", (spec.packed_bytes(count, model.hidden_size),))


LearnedRouters = dict[tuple[int, int], Router]
"""Routers by running layer and distance. Each reads the stream through the norm of the running layer."""


def learned_routers(
    manifest: BundleManifest, matrices: Mapping[tuple[int, int], ForeseeingMatrix], advisor: Advisor
) -> LearnedRouters:
    """Return the matrices as routers of the layers that they foresee.

    advisor: its options decide which layers a run looks at. Matrices of others are left out.
    """
    model = manifest.model
    return {
        (layer, ahead): Router(
            model.layers[layer + ahead].experts,
            kernels.PackedMatrix(matrix.data, len(matrix.bias), model.hidden_size, matrix.spec),
            matrix.bias,
            manifest.pruned_experts[layer + ahead],
        )
        for (layer, ahead), matrix in matrices.items()
        if any(later.ahead == ahead for later in advisor.layers_ahead(layer))
    }


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """The routing of the tokens of a pass in one layer, T tokens.

    inputs: what the router reads, float32 [T, D].
    logits: float32 [T, E].
    chosen: int32 [T, K].
    foreseen: logits that the routers of later layers give for this layer's stream, [T, E], by distance.
    """

    inputs: np.ndarray
    logits: np.ndarray
    chosen: np.ndarray
    foreseen: dict[int, np.ndarray]


@dataclass(slots=True)
class RouterRecorder(Predictor):
    """Records the routing of every layer of a pass, and predicts nothing."""

    norms: Sequence[Norm]
    routers: Sequence[Router | None]
    layers: dict[int, RecordedRouting] = field(default_factory=dict)

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        return self.scores_ahead(state, [ahead])[0]

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        if state.logits is not None:
            foreseen = {
                ahead: router.logits(self.norms[state.layer + ahead](state.hidden))
                for ahead in range(1, MAX_AHEAD + 1)
                if state.layer + ahead < len(self.routers) and (router := self.routers[state.layer + ahead]) is not None
            }
            inputs, chosen = self.norms[state.layer](state.hidden), state.chosen[state.layer]
            self.layers[state.layer] = RecordedRouting(inputs, state.logits.copy(), chosen.copy(), foreseen)
        return [None] * len(aheads)


@contextmanager
def recorded_routers(
    advisor: Advisor, norms: Sequence[Norm], routers: Sequence[Router | None]
) -> Iterator[RouterRecorder]:
    """Record every pass of several tokens in a `with` block. Nothing is read ahead meanwhile."""
    before = advisor.predictor, advisor.rule
    recorder = RouterRecorder(norms, routers)
    advisor.predictor, advisor.rule = recorder, "until-routed"  # the rule that asks about every layer
    try:
        yield recorder
    finally:
        advisor.predictor, advisor.rule = before

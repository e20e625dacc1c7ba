"""Matrices that foresee later routers: `lookahead.safetensors`, checked against the bundle's model.

A bundle has this file if its compile measured that they foresee more than the later routers do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.manifests.errors import ManifestInvalid, StorageReadFailed
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from moec.manifests.safetensors_header import HeaderError, TensorEntry, header_of

from .open_bundle import Bundle

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

"""A tiny bundle with maps that foresee later layers. Their weights are random: they change what is read ahead."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from moec.compiler.linear_maps import LearnedMap, encode_maps
from moec.compiler.quantization.packing import pack
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.bundle import LOOKAHEAD_NAME, MANIFEST_NAME
from moec.manifests.codec import decode_manifest
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from tests.listed_file import add_listed

SPEC = QuantSpec(8, 32)


def random_maps(model: ModelSpec, most_ahead: int = 2) -> list[LearnedMap]:
    """Return a map for each pair of layers that are at most so far apart."""
    found, drawn = list[LearnedMap](), torch.Generator().manual_seed(3)
    for layer in model.expert_layers:
        for ahead in range(1, most_ahead + 1):
            if layer + ahead in model.expert_layers:
                count = model.layers[layer + ahead].experts.count
                weights = torch.randn(count, model.hidden_size, generator=drawn)
                packed = pack(quantize_rtn(weights, SPEC, clip_search=True))
                bias = torch.randn(count, generator=drawn).numpy()
                found.append(LearnedMap(layer, ahead, 0.5, 0.4, SPEC, packed, bias))
    return found


def with_file(bundle: Path, target: Path, data: bytes) -> Path:
    """Copy a bundle and add `lookahead.safetensors` with this content."""
    return add_listed(Path(shutil.copytree(bundle, target)), LOOKAHEAD_NAME, data)


def with_maps(bundle: Path, target: Path) -> Path:
    """Copy a bundle and add random maps."""
    model = decode_manifest((bundle / MANIFEST_NAME).read_bytes(), str(bundle)).model
    return with_file(bundle, target, encode_maps(random_maps(model)))

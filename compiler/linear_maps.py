"""Learn linear maps that foresee which experts later layers choose, from the routing of calibration text.

A map goes from what the router of a layer reads to the router logits of a later layer. Ridge regression has it in
closed form. It is kept where it foresees more choices of held-out tokens than the later router does on the same stream.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.evaluation.statistics import ONE_SIDED_95
from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.manifests.model import ExpertKey, ModelSpec, RouterSpec
from moec.manifests.quant import QuantSpec
from moec.manifests.safetensors_header import build_header

from .quantization.packing import pack, pack_16bit
from .quantization.quantizers.rtn import holds, quantize_rtn
from .reference.routers import FirstOfEqual
from .request.ports import RoutingRecord
from .workspace.parallel import one_torch_thread

MAX_AHEAD = 3
"""Layers from the running one to the furthest one that is foreseen."""
MAX_TOKENS = 16_384
HELD_OUT = 5
"""One text of so many is held out."""
_RIDGES = (1e-3, 1e-2, 1e-1)
"""Penalties to try, as shares of the mean square of each input."""
_FORMATS = (QuantSpec(4, 32), QuantSpec(8, 64))
_SPARED = 0.05
"""Share of a map's gain that a smaller format may cost."""


@dataclass(slots=True)
class RoutingSample:
    """Routing of the tokens of some texts in one layer.

    inputs: what the router reads, float16 [T, D] per text.
    logits: float32 [T, E] per text.
    chosen: int64 [T, K] per text.
    foreseen: logits of later routers for this layer's stream, float32 [T, E] per text, by distance.
    """

    inputs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    foreseen: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, record: RoutingRecord) -> None:
        """Add the routing of one text."""
        self.inputs.append(torch.from_numpy(record.inputs).half())
        self.logits.append(torch.from_numpy(record.logits).float())
        self.chosen.append(torch.from_numpy(record.chosen).long())
        for ahead, logits in record.foreseen.items():
            self.foreseen.setdefault(ahead, []).append(torch.from_numpy(logits).float())


@dataclass(frozen=True, slots=True)
class LearnedMap:
    """A map that is kept.

    layer, ahead: running layer, and the distance of the foreseen one.
    recall: share of the held-out choices of the later layer that are among the top_k foreseen.
    own_recall: the same by the later router, applied to the running layer's stream.
    data: packed matrix [E, D] in this format.
    bias: float32 [E].
    """

    layer: int
    ahead: int
    recall: float
    own_recall: float
    spec: QuantSpec
    data: np.ndarray
    bias: np.ndarray


def can_learn(model: ModelSpec) -> bool:
    """Return whether later routers of a model can be foreseen by a linear map."""
    routers = [model.layers[layer].experts.router for layer in model.expert_layers]
    return model.encoder is None and len(routers) > 1 and all(router.static is None for router in routers)


def layer_groups(model: ModelSpec, tokens: int, memory_bytes: int) -> list[Sequence[int]]:
    """Return the layers that route, in groups whose sample of so many tokens fits into the memory. No group is empty.

    The sample of a group holds the later layers that it foresees, too. What is learned does not depend on the groups.
    """
    layers = model.expert_layers
    count = max(1, memory_bytes // max(1, tokens * token_bytes(model)) - MAX_AHEAD)
    return [layers[start : start + count] for start in range(0, len(layers), count)]


def token_bytes(model: ModelSpec) -> int:
    """Return the bytes of one token in the sample of one layer."""
    experts = max(model.layers[layer].experts.count for layer in model.expert_layers)
    top_k = max(model.layers[layer].experts.top_k for layer in model.expert_layers)
    return 2 * model.hidden_size + 4 * experts * (1 + MAX_AHEAD) + 8 * top_k


def learned_weights(model: ModelSpec) -> list[int]:
    """Return the weights of every map that may be learned, its bias included, by layer and distance."""
    layers = set(model.expert_layers)
    later = [layer + ahead for layer in model.expert_layers for ahead in range(1, MAX_AHEAD + 1)]
    return [model.layers[layer].experts.count * (model.hidden_size + 1) for layer in later if layer in layers]


def regression_products(model: ModelSpec, tokens: int) -> int:
    """Return the products of float64 numbers that `learn_maps` adds up for all layers.

    tokens: of all texts. Those of held-out texts are multiplied as float32, two in the time of one.
    A Cholesky factor of a matrix [W, W] takes W^3 / 6 products, and solving with it W^2 for each right-hand side.
    """
    width = model.hidden_size + 1
    held_out = tokens // HELD_OUT
    trained, ridges = tokens - held_out, len(_RIDGES)
    of_layer = trained * width**2 + ridges * width**3 // 6
    tried = ridges + 1 + len(_FORMATS)
    return len(model.expert_layers) * of_layer + sum(
        weights * (ridges * (trained + width) + tried * held_out // 2) for weights in learned_weights(model)
    )


def regression_bytes(model: ModelSpec, tokens: int) -> int:
    """Return the peak memory of `learn_maps` next to its sample: float64 inputs twice, moments and their factors."""
    width = model.hidden_size + 1
    return 8 * (2 * tokens * width + (2 + len(_RIDGES)) * width**2)


def learn_maps(
    model: ModelSpec, samples: Mapping[int, RoutingSample], layers: Sequence[int], left_out: Collection[ExpertKey]
) -> list[LearnedMap]:
    """Return the maps of some layers that foresee more than the later routers do, by layer and distance.

    samples: routing in these layers, and in the later ones that they foresee.
    left_out: experts that no router chooses. They are never foreseen.
    There are none of fewer than HELD_OUT texts, because no text is held out.
    """
    maps = list[LearnedMap]()
    if any(len(sample.inputs) < HELD_OUT for sample in samples.values()):
        return maps
    with one_torch_thread():  # the same bits for any number of processors
        for layer in layers:
            if not all(bool(inputs.isfinite().all()) for inputs in samples[layer].inputs):
                continue  # float16 does not hold what this router reads
            solve = _regression(samples[layer].inputs)
            for ahead in range(1, MAX_AHEAD + 1):
                if layer + ahead in samples:
                    hidden = [key.expert for key in left_out if key.layer == layer + ahead]
                    router = model.layers[layer + ahead].experts.router
                    learned = _learn(samples, layer, ahead, solve, router, hidden)
                    maps += [] if learned is None else [learned]
    return maps


_Solve = Callable[[Tensor, float], Tensor]
"""Maps targets of the training tokens, [T, E], and a penalty to weights, float64 [E, D + 1]; the bias comes last."""


def _is_held_out(texts: Sequence[Tensor]) -> list[bool]:
    return [at % HELD_OUT == HELD_OUT - 1 for at in range(len(texts))]


def _part(texts: Sequence[Tensor], is_held_out: bool) -> Tensor:
    """Return the tokens of the training texts, or of the held-out ones."""
    parts = [text for text, held_out in zip(texts, _is_held_out(texts), strict=True) if held_out == is_held_out]
    return torch.cat(parts)


def _regression(inputs: Sequence[Tensor]) -> _Solve:
    """Return the ridge regression on the training tokens.

    The penalty of each weight is a share of the mean square of its input, so the scale of an input has no effect.
    """
    x = _part(inputs, is_held_out=False).double()
    x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    moments = x.T @ x
    squares = torch.diagonal(moments).clamp_min(1e-12).clone()
    factors = dict[float, Tensor]()
    for ridge in _RIDGES:
        penalty = ridge * squares
        penalty[-1] *= 1e-6  # the bias is free
        factors[ridge] = torch.linalg.cholesky(moments + torch.diag(penalty))

    def solve(targets: Tensor, ridge: float) -> Tensor:
        return torch.cholesky_solve(x.T @ targets.double(), factors[ridge]).T

    return solve


def _learn(
    samples: Mapping[int, RoutingSample],
    layer: int,
    ahead: int,
    solve: _Solve,
    router: RouterSpec,
    left_out: Sequence[int],
) -> LearnedMap | None:
    """Return the best map from one layer to a later one; None if it foresees no more than the later router.

    router: of the later layer.
    left_out: experts of the later layer that are never foreseen.
    """
    hits = partial(_hits, router, left_out)
    sample, later = samples[layer], samples[layer + ahead]
    targets = _part(later.logits, is_held_out=False)
    if router.scoring != "sigmoid":  # others do not see what all logits have in common
        targets = targets - targets.mean(1, keepdim=True)
    inputs, chosen = _part(sample.inputs, is_held_out=True).float(), _part(later.chosen, is_held_out=True)
    router_hits = hits(_part(sample.foreseen[ahead], is_held_out=True), chosen)

    def hits_of(weights: Tensor) -> Tensor:
        return hits(inputs @ weights[:, :-1].T + weights[:, -1], chosen)

    weights = max(
        (solve(targets, ridge).float() for ridge in _RIDGES), key=lambda candidate: float(hits_of(candidate).mean())
    )
    gains = hits_of(weights) - router_hits
    error = float(gains.std()) / len(gains) ** 0.5 if len(gains) > 1 else float("inf")
    if float(gains.mean()) <= ONE_SIDED_95 * error:
        return None
    spec, rounded, data = _smallest(
        weights, lambda candidate: float(hits_of(candidate).mean()), float(router_hits.mean())
    )
    recall, bias = float(hits_of(rounded).mean()), rounded[:, -1].contiguous().numpy()
    return LearnedMap(layer, ahead, recall, float(router_hits.mean()), spec, data, bias)


def _smallest(
    weights: Tensor, recall: Callable[[Tensor], float], own_recall: float
) -> tuple[QuantSpec, Tensor, np.ndarray]:
    """Return the smallest format that keeps nearly all of a map's gain, the map in it, and its packed matrix [E, D].

    weights, result: float32 [E, D + 1], with the bias last.
    """
    matrix, bias = weights[:, :-1].contiguous(), weights[:, -1:]
    most = recall(weights)
    for spec in _FORMATS:
        if spec.fits(matrix.shape[1]) and holds(matrix, spec):
            quantized = quantize_rtn(matrix, spec, clip_search=True)
            rounded = torch.cat([quantized.dequantize(), bias], dim=1)
            if most - recall(rounded) <= _SPARED * (most - own_recall):
                return spec, rounded, pack(quantized)
    spec = QuantSpec(16, float_type="bfloat16")
    halves = matrix.bfloat16()
    return spec, torch.cat([halves.float(), bias], dim=1), pack_16bit(halves, spec)


def _hits(router: RouterSpec, left_out: Sequence[int], logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the share of each token's chosen experts that a router chooses by these logits, float64 [T].

    left_out: experts that are never foreseen.
    """
    ranked = _ranked(router, logits)
    ranked[:, list(left_out)] = -torch.inf
    with FirstOfEqual():
        top_k = ranked.topk(chosen.shape[1], dim=1).indices
    return (top_k.unsqueeze(2) == chosen.unsqueeze(1)).any(2).double().mean(1)


def _ranked(router: RouterSpec, logits: Tensor) -> Tensor:
    """Return what decides the choice, float32 [T, E]: logits, or scores with a correction within the best groups."""
    if router.is_by_logits or router.scoring == "sparsemixer":
        return logits.clone()
    if router.corrects_logits:
        return logits + torch.tensor(router.correction)
    scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(1)
    if router.correction:
        scores = scores + torch.tensor(router.correction)
    if router.groups > 1:
        grouped = scores.view(len(scores), router.groups, -1)
        values = grouped.topk(2 if router.group_score == "top2" else 1, dim=2).values.sum(2)
        others = values.topk(router.groups - router.kept_groups, dim=1, largest=False).indices
        scores = grouped.scatter(1, others.unsqueeze(2).expand(-1, -1, grouped.shape[2]), -torch.inf).flatten(1)
    return scores


def encode_maps(maps: Sequence[LearnedMap]) -> bytes:
    """Return the maps as a safetensors file. Source: docs/format.md, Lookahead."""
    tensors, parts = dict[str, tuple[str, tuple[int, ...]]](), list[bytes]()
    for learned in maps:
        place = f"layers.{learned.layer}.ahead.{learned.ahead}"
        tensors[f"{place}.weight.{learned.spec}"] = ("U8", learned.data.shape)
        tensors[f"{place}.bias"] = ("F32", learned.bias.shape)
        parts += [learned.data.tobytes(), learned.bias.astype("<f4").tobytes()]
    return build_header(tensors) + b"".join(parts)


def lookahead_report(maps: Sequence[LearnedMap], size_bytes: int) -> dict[str, Any]:
    """Return the entry `lookahead` of quality.json.

    size_bytes: size of the file of the maps.
    """
    rows = []
    for ahead in sorted({learned.ahead for learned in maps}):
        of_distance = [learned for learned in maps if learned.ahead == ahead]
        rows.append(
            {
                "ahead": ahead,
                "layers": [learned.layer for learned in of_distance],
                "recall": sum(learned.recall for learned in of_distance) / len(of_distance),
                "own_recall": sum(learned.own_recall for learned in of_distance) / len(of_distance),
            }
        )
    return {"file": LOOKAHEAD_NAME, "size_bytes": size_bytes, "rows": rows}

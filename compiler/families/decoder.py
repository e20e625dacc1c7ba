"""Parts common to decoders of the Llama shape: rotary attention with grouped heads, RMS norms, routed SwiGLU experts.

A family supplies its layers and its tensor names. Weights on disk have one of two forms:
- one tensor per projection, as on the hub;
- one stack of all experts, as transformers 5 holds them in memory.

Shapes: D hidden, F expert width, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moec.manifests.errors import CheckpointError
from moec.manifests.model import (
    MAX_LAYERS,
    PROJECTIONS,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    SharedSpec,
    UnitKey,
)

from ..checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from ..checkpoint.mxfp4 import BLOCK_VALUES, BLOCKS_SUFFIX, SCALES_SUFFIX
from ..checkpoint.stand_ins import is_stood_in
from .lowering import HeadPart, Lowering, TensorSource, common_float_type
from .rope import read_rope
from .settings import Settings

MAX_EXPERTS_PER_LAYER = 4096  # bounds what a hostile config.json can make a family allocate
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "attention_norm_bias": "input_layernorm.bias",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "query_down": "self_attn.q_a_proj.weight",
    "query_down_norm": "self_attn.q_a_layernorm.weight",
    "latent_down": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "experts_norm": "post_attention_layernorm.weight",
    "experts_norm_bias": "post_attention_layernorm.bias",
}
_OUTER_NAMES = {
    "embedding": _EMBEDDING, "final_norm": "model.norm.weight", "final_norm_bias": "model.norm.bias",
    "lm_head": _HEAD, "lm_head_bias": "lm_head.bias",
}  # fmt: skip
ReadRope = Callable[..., RopeSpec]
"""`read_rope`, or a family's own reader of its rotary embeddings."""


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Names specific to a family, relative to `model.layers.N.`. All other names are those of Llama.

    routers: names of the router on disk. The first one that exists is used.
    loaded_router: the router in transformers' model.
    experts: name of one projection of one expert on disk.
    projections: names of gate, up and down in `experts`.
    stacked: pairs of stacks: gate and up together, and down. The first pair that exists is used.
    shared: the module of the shared experts.
    loaded_shared: its name in transformers' model, empty if it is the same.
    shared_router: the gate of the shared expert.
    correction: the term that is added to scores to choose experts.
    is_transposed: stacks are [inputs, outputs], and columns of gate and up alternate.
    """

    routers: tuple[str, ...] = ("mlp.gate.weight",)
    loaded_router: str = "mlp.gate.weight"
    experts: str = "mlp.experts.{expert}.{projection}.weight"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    shared: str = "mlp.shared_experts"
    loaded_shared: str = ""
    shared_router: str = "mlp.shared_expert_gate.weight"
    correction: str = "mlp.gate.e_score_correction_bias"
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The settings of config.json that a family reads itself.

    layers: one LayerSpec per layer.
    more: further fields of ModelSpec.
    ties: whether embeddings are tied if config.json does not say.
    """

    layers: tuple[LayerSpec, ...]
    more: Mapping[str, Any] = field(default_factory=dict)
    ties: bool = False


def alike(
    settings: Settings, attention: AttentionSpec, experts: ExpertsSpec, shared: SharedSpec | None = None
) -> DecoderParts:
    """Return parts whose layers are all equal."""
    return DecoderParts((LayerSpec(attention, experts, shared),) * count_layers(settings))


def experts_of(
    settings: Settings,
    router: RouterSpec,
    *,
    count: tuple[str, ...],
    width: str = "moe_intermediate_size",
    top_k: tuple[str, ...] = ("num_experts_per_tok",),
    **more: Any,
) -> ExpertsSpec:
    """Return the routed experts.

    count, top_k: the key, followed by an older name if there is one.
    width: the key of the expert width.
    more: further fields of ExpertsSpec.
    Raises CheckpointError or ValueError.
    """
    fields = {"activation": "silu", **more}
    return ExpertsSpec(
        count=settings.either_integer(*_two(count), MAX_EXPERTS_PER_LAYER),
        top_k=settings.either_integer(*_two(top_k)),
        width=settings.integer(width),
        router=router,
        **fields,
    )


def _two(keys: tuple[str, ...]) -> tuple[str, str]:
    return keys[0], keys[1] if len(keys) > 1 else ""


def plain_first(settings: Settings, routed: LayerSpec, default: int) -> tuple[LayerSpec, ...]:
    """Return `first_k_dense_replace` plain layers, then routed layers. Raises CheckpointError."""
    first, layers = first_routed(settings, default), count_layers(settings)
    plain = plain_layer(routed.attention, settings.integer("intermediate_size"))
    return (plain,) * first + (routed,) * (layers - first)


def first_routed(settings: Settings, default: int) -> int:
    """Return the index of the first routed layer, from `first_k_dense_replace`. Raises CheckpointError."""
    first, layers = settings.raw("first_k_dense_replace"), count_layers(settings)
    first = default if first is None else first
    if type(first) is not int or not 0 <= first < layers:
        settings.fail("first_k_dense_replace", f"fewer layers than the {layers} there are")
    return first


def count_layers(settings: Settings) -> int:
    """Return the number of decoder layers."""
    return settings.integer("num_hidden_layers", MAX_LAYERS)


def plain_layer(attention: AttentionSpec, width: int) -> LayerSpec:
    """Return a layer without routed experts, whose feed-forward stays resident. Raises ValueError."""
    return LayerSpec(attention, ExpertsSpec(0, 0, width, "silu", RouterSpec("softmax", False)), SharedSpec(width))


def attention_of(
    settings: Settings, *, rope_share: float = 1.0, interleaved: bool = False, rope: ReadRope = read_rope, **more: Any
) -> AttentionSpec:
    """Return attention with grouped heads.

    rope_share, interleaved: see read_rope.
    rope: the function that reads the rotary embedding.
    more: further fields of AttentionSpec.
    Raises CheckpointError or ValueError.
    """
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_size = _head_size(settings, hidden, heads)
    kv_heads = settings.optional_integer("num_key_value_heads") or heads
    rotary = rope(settings, head_size, share=rope_share, interleaved=interleaved)
    return AttentionSpec(heads, kv_heads, head_size, rotary, **more)


def _head_size(settings: Settings, hidden: int, heads: int) -> int:
    """Return `head_dim`, or the hidden size divided by the number of heads. Raises CheckpointError."""
    head_size = settings.optional_integer("head_dim")
    if head_size is not None:
        return head_size
    if hidden % heads:
        settings.fail("num_attention_heads", f"a divisor of hidden_size {hidden}, or a key `head_dim`")
    return hidden // heads


def read_windows(settings: Settings, windows: list[int], window: int) -> list[int]:
    """Return the sliding window of each layer in tokens, 0 for none, from `layer_types`.

    windows: the result if config.json has no `layer_types`.
    window: the size of a sliding window.
    Raises CheckpointError.
    """
    kinds, known = settings.raw("layer_types"), {"full_attention": 0, "sliding_attention": window}
    if kinds is None:
        return windows
    if not isinstance(kinds, list) or len(kinds) != len(windows) or not all(kind in known for kind in kinds):
        settings.fail("layer_types", f"{len(windows)} times `full_attention` or `sliding_attention`")
    return [known[kind] for kind in kinds]


def read_corrections(settings: Settings, names: DecoderNames, layer: int, experts: int) -> tuple[float, ...]:
    """Return the score correction of each expert of a layer, exactly as on disk. Raises CheckpointError."""
    name, checkpoint = f"model.layers.{layer}.{names.correction}", settings.checkpoint
    if name not in checkpoint.tensors:
        raise CheckpointError(f"`{checkpoint.root}` has no tensor `{name}`", "copy the checkpoint again")
    values = checkpoint.tensor(name).float().flatten().tolist()
    if len(values) != experts or not all(map(math.isfinite, values)):
        raise CheckpointError(
            f"tensor `{name}` in `{checkpoint.root}`: expected {experts} finite numbers", "copy the checkpoint again"
        )
    return tuple(values)


def lower_family(
    checkpoint: Checkpoint, family: str, names: DecoderNames, parts: Callable[[Settings], DecoderParts]
) -> Lowering:
    """Translate a checkpoint.

    parts: reads the settings that are specific to the family.
    Raises CheckpointError, which names the key of config.json, if a setting is not supported.
    """
    settings = Settings(checkpoint)
    try:
        model = _model_spec(checkpoint, settings, family, parts(settings))
    except ValueError as error:
        raise CheckpointError(f"`{checkpoint.root / CONFIG_NAME}` contradicts itself: {error}", "repair it") from error
    settings.finish()
    return _lower_decoder(checkpoint, model, names)


def _model_spec(checkpoint: Checkpoint, settings: Settings, family: str, parts: DecoderParts) -> ModelSpec:
    """Return the ModelSpec.

    Raises CheckpointError.
    Raises ValueError if settings contradict each other.
    """
    settings.one_of("hidden_act", ("silu",))
    tie = settings.boolean("tie_word_embeddings", parts.ties)
    if tie and _head_differs(checkpoint):
        if is_stood_in(checkpoint):
            settings.fail("tie_word_embeddings", f"false, because `{_HEAD}` and `{_EMBEDDING}` differ")
        tie = False  # as transformers does
    return ModelSpec(
        family=family,
        hidden_size=settings.integer("hidden_size"),
        vocab_size=settings.integer("vocab_size"),
        max_positions=settings.integer("max_position_embeddings"),
        norm_eps=settings.number("rms_norm_eps"),
        tie_embeddings=tie,
        layers=parts.layers,
        eos_token_ids=settings.eos_token_ids(),
        **parts.more,
    )


def _lower_decoder(checkpoint: Checkpoint, model: ModelSpec, names: DecoderNames) -> Lowering:
    """Find every weight of the model. Raises CheckpointError if 16-bit types are mixed."""
    places = {
        **{name: _Place(on_disk) for name, on_disk in _OUTER_NAMES.items()},
        **{f"layers.{at}.{name}": place for at in range(model.num_layers) for name, place in
           _layer_places(checkpoint, model.layers[at], names, f"model.layers.{at}.").items()},
    }  # fmt: skip
    shapes = model.dense_shapes()
    dense = {name: places[name].source(shape) for name, shape in shapes.items()}
    loaded = {name: places[name].loaded or places[name].name for name in shapes}
    units = {key: source for layer in model.expert_layers for key, source in _units(checkpoint, model, names, layer)}
    read = [source.name for source in (*dense.values(), *units.values())]
    float_type, notes = common_float_type(checkpoint, read)
    ignored = {name for name in checkpoint.tensors if _plays_no_part(name, model.num_layers)}
    beside = {name for name in checkpoint.tensors if name.endswith((names.correction, SCALES_SUFFIX))} - ignored
    if model.tie_embeddings:
        ignored.add(_HEAD)
    return Lowering(checkpoint, model, dense, units, loaded, frozenset(ignored), frozenset(beside), float_type, notes)


def _plays_no_part(name: str, layers: int) -> bool:
    """Return whether a tensor is unused: a rotary table, or part of a layer for multi-token prediction."""
    match = _LAYER.match(name)
    return (match is not None and int(match[1]) >= layers) or name.endswith(".rotary_emb.inv_freq")


def _head_differs(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint holds an output matrix that differs from the embedding."""
    if _HEAD not in checkpoint.tensors or _EMBEDDING not in checkpoint.tensors:
        return False
    return not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING))


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of one dense weight.

    name: its tensor on disk.
    loaded: its parameter in transformers' model, empty if the name is the same.
    heads: the part of each head that is the weight.
    stack: number of experts, first column and column step of the weight in a stack of vectors.
    """

    name: str
    loaded: str = ""
    heads: HeadPart | None = None
    stack: tuple[int, int, int] | None = None

    def source(self, shape: tuple[int, ...]) -> TensorSource:
        if self.stack is not None:
            count, first, step = self.stack
            size = shape[0] // count * step
            return TensorSource(self.name, (count, size), every=(first, step), is_flat=True)
        if self.heads is None:
            return TensorSource(self.name, shape)
        rows, columns = shape[0] // self.heads.heads, shape[1]
        if self.heads.is_transposed:
            rows, columns = columns, rows
        return TensorSource(self.name, (self.heads.heads * self.heads.of_rows, columns), heads=self.heads)


def _layer_places(checkpoint: Checkpoint, layer: LayerSpec, names: DecoderNames, prefix: str) -> dict[str, _Place]:
    """Return where the dense weights of a layer lie. The result covers layers of every kind."""
    found = {name: _Place(prefix + on_disk) for name, on_disk in _LAYER_NAMES.items()}
    latent = layer.attention.latent
    if latent is not None:
        both, up = latent.plain_size + latent.value_size, prefix + "self_attn.kv_b_proj.weight"
        heads = layer.attention.num_heads
        found["query"] = _Place(prefix + f"self_attn.{'q_b_proj' if latent.query_rank else 'q_proj'}.weight")
        found["key_up"] = _Place(up, heads=HeadPart(heads, both, 0, latent.plain_size, is_transposed=True))
        found["value_up"] = _Place(up, heads=HeadPart(heads, both, latent.plain_size, both))
    on_disk = next((name for name in names.routers if prefix + name in checkpoint.tensors), names.routers[0])
    found["router"] = _Place(prefix + on_disk, prefix + names.loaded_router)
    found["router_bias"] = _Place(prefix + names.loaded_router.replace("weight", "bias"))
    count = layer.experts.count
    for name, bias, first, step in (("gate", "gate_up", 0, 2), ("up", "gate_up", 1, 2), ("down", "down", 0, 1)):
        found[f"experts_{name}_bias"] = _Place(prefix + f"mlp.experts.{bias}_proj_bias", stack=(count, first, step))
    shared, loaded = (names.shared, names.loaded_shared or names.shared) if count else ("mlp", "mlp")
    for name in ("gate", "up", "down"):
        found[f"shared_{name}"] = _Place(f"{prefix}{shared}.{name}_proj.weight", f"{prefix}{loaded}.{name}_proj.weight")
    found["shared_router"] = _Place(prefix + names.shared_router)
    return found


def _mxfp4_units(
    checkpoint: Checkpoint, model: ModelSpec, names: DecoderNames, layer: int
) -> list[tuple[UnitKey, TensorSource]]:
    """Return the sources of experts in MXFP4 stacks: blocks and scales, a tensor each. Raises CheckpointError."""
    count, sources = model.layers[layer].experts.count, []
    for expert in range(count):
        for projection in PROJECTIONS:
            rows, columns = model.unit_shape(layer, projection)
            is_down = projection == "down"
            stem = f"model.layers.{layer}.{names.stacked[0][1 if is_down else 0]}"
            whole = (count, rows if is_down else 2 * rows, columns // BLOCK_VALUES)
            scales = checkpoint.tensors.get(stem + SCALES_SUFFIX)
            if scales is None or scales.shape != whole:
                raise CheckpointError(
                    f"`{checkpoint.root}`: expected a tensor `{stem + SCALES_SUFFIX}` of shape {list(whole)}",
                    "copy the checkpoint again",
                )
            every = None if is_down else (0 if projection == "gate" else 1, 2)
            shape = (*whole, BLOCK_VALUES // 2)
            packed = TensorSource(
                stem + BLOCKS_SUFFIX, shape, expert, every=every, is_transposed=True, scales=stem + SCALES_SUFFIX
            )
            sources.append((UnitKey(layer, expert, projection), packed))
    return sources


def _units(
    checkpoint: Checkpoint, model: ModelSpec, names: DecoderNames, layer: int
) -> list[tuple[UnitKey, TensorSource]]:
    """Return the sources of the routed experts of one layer."""
    count, prefix = model.layers[layer].experts.count, f"model.layers.{layer}."
    stacked = next((pair for pair in names.stacked if prefix + pair[0] in checkpoint.tensors), None)
    if names.is_transposed and stacked is None:
        return _mxfp4_units(checkpoint, model, names, layer)
    sources = []
    for expert in range(count):
        for projection, own in zip(PROJECTIONS, names.projections, strict=True):
            rows, columns = model.unit_shape(layer, projection)
            if stacked is None:
                name = prefix + names.experts.format(expert=expert, projection=own)
                source = TensorSource(name, (rows, columns))
            elif projection == "down":
                shape = (count, columns, rows) if names.is_transposed else (count, rows, columns)
                source = TensorSource(prefix + stacked[1], shape, expert, is_transposed=names.is_transposed)
            elif names.is_transposed:
                every = (0 if projection == "gate" else 1, 2)
                shape = (count, columns, 2 * rows)
                source = TensorSource(prefix + stacked[0], shape, expert, every=every, is_transposed=True)
            else:
                start = 0 if projection == "gate" else rows
                shape = (count, 2 * rows, columns)
                source = TensorSource(prefix + stacked[0], shape, expert, (start, start + rows))
            sources.append((UnitKey(layer, expert, projection), source))
    return sources

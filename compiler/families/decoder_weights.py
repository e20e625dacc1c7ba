"""Names and places on disk of the weights of decoders of the Llama shape.

Weights on disk have one of two forms:
* one tensor per projection, as on the hub;
* one stack of all experts, as transformers 5 holds them in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from moec.manifests.errors import CheckpointError
from moec.manifests.model import PROJECTIONS, AttentionSpec, DeltaSpec, LayerSpec, ModelSpec, UnitKey

from ..checkpoint.weight_files import BLOCKS_SUFFIX, MXFP4_BLOCK_VALUES, SCALES_SUFFIX
from .lowering import HeadPart, Lowering, TensorSource, common_float_type

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
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
    "output_gate": "self_attn.g_proj.weight",
    "query_down": "self_attn.q_a_proj.weight",
    "query_down_norm": "self_attn.q_a_layernorm.weight",
    "latent_down": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "experts_norm": "post_attention_layernorm.weight",
    "experts_norm_bias": "post_attention_layernorm.bias",
}
_OUTER_NAMES = {
    "embedding": EMBEDDING, "final_norm": "model.norm.weight", "final_norm_bias": "model.norm.bias",
    "lm_head": HEAD, "lm_head_bias": "lm_head.bias",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Names specific to a family, relative to `model.layers.N.`. All other names are those of Llama.

    Where there are several names on disk, the first one that exists is used.
    routers: names of the router on disk.
    loaded_router: the router in transformers' model.
    experts: name of one projection of one expert on disk.
    projections: names of gate, up and down in `experts`.
    stacked: pairs of stacks: gate and up together, and down.
    shared: modules of the shared experts on disk.
    loaded_shared: the module in transformers' model, empty if its name is the first one.
    shared_stack: gate and up of the shared expert in one matrix, and down. Empty: each has its own in `shared`.
    shared_router: the gate of the shared expert.
    corrections: names of the term that is added to scores to choose experts.
    plain: gate, up and down of a layer without routed experts.
    own: names of other weights that differ from Llama's, by canonical name. Those outside the layers are whole.
    recurrent: names of the weights of a layer with a recurrent state, by canonical name.
    query_key_value_gate: of a delta rule: one matrix with the queries, keys, values and gates of each head of keys.
    rate_step: likewise, with its learning rates and steps.
    query_key_value_rows: of a delta rule: one matrix with all queries, then all keys, then all values.
    query_gate: one matrix with the query and the output gate of each head of attention.
    tables: names of tensors whose numbers stand in the manifest, by the field of the ModelSpec.
    query_key_value: one matrix of queries, keys and values on disk, empty if each has its own.
    renamed: further names on disk, by canonical name. Those outside the layers are whole.
    is_transposed: stacks are [inputs, outputs], and columns of gate and up alternate.
    """

    routers: tuple[str, ...] = ("mlp.gate.weight",)
    loaded_router: str = "mlp.gate.weight"
    experts: str = "mlp.experts.{expert}.{projection}.weight"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    shared: tuple[str, ...] = ("mlp.shared_experts",)
    loaded_shared: str = ""
    shared_stack: tuple[str, ...] = ()
    shared_router: str = "mlp.shared_expert_gate.weight"
    corrections: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    plain: tuple[str, str, str] = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    own: Mapping[str, str] = field(default_factory=dict)
    recurrent: Mapping[str, str] = field(default_factory=dict)
    query_key_value_gate: str = ""
    rate_step: str = ""
    query_key_value_rows: str = ""
    query_gate: str = ""
    tables: Mapping[str, str] = field(default_factory=dict)
    query_key_value: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    is_transposed: bool = False

    def renamed_tensors(self, layers: int) -> list[str]:
        """Return the names of the tensors on disk that stand in place of those of Llama."""
        outer = [name for weight, name in self.renamed.items() if weight in _OUTER_NAMES]
        of_layer = [name for weight, name in self.renamed.items() if weight not in _OUTER_NAMES]
        of_layer += [self.query_key_value] if self.query_key_value else []
        return outer + [f"model.layers.{layer}.{name}" for layer in range(layers) for name in of_layer]


def lower_decoder(checkpoint: Checkpoint, model: ModelSpec, names: DecoderNames) -> Lowering:
    """Find every weight of the model. Raises CheckpointError if 16-bit types are mixed."""
    places = {
        **{name: _place(checkpoint, "", names.own.get(name, on_disk), names.renamed.get(name))
           for name, on_disk in _OUTER_NAMES.items()},
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
    auxiliary = {
        name
        for name in checkpoint.tensors
        if name.endswith((*names.corrections, *names.tables.values(), SCALES_SUFFIX))
    } - ignored
    if model.tie_embeddings:
        ignored.add(HEAD)
    return Lowering(
        checkpoint, model, dense, units, loaded, frozenset(ignored), frozenset(auxiliary), float_type, notes
    )


def stated_numbers(model: ModelSpec, names: DecoderNames) -> dict[str, tuple[float, ...]]:
    """Return the numbers that stand in the manifest, by the names of their tensors on disk."""
    found = dict[str, tuple[float, ...]]()
    for at, layer in enumerate(model.layers):
        router = layer.experts.router
        numbers = {names.corrections[0]: router.correction}
        fields = {"expert_scales": router.expert_scales, "scale": (layer.scale,)}
        if layer.delta is not None:
            fields |= {"log_rates": layer.delta.log_rates, "step_biases": layer.delta.step_biases}
        numbers |= {names.tables[name]: values for name, values in fields.items() if name in names.tables}
        found |= {f"model.layers.{at}.{name}": values for name, values in numbers.items() if values}
    return found


def _plays_no_part(name: str, layers: int) -> bool:
    """Return whether a tensor is unused: a rotary table, or part of a layer for multi-token prediction."""
    match = _LAYER.match(name)
    is_of_prediction = name.startswith("mtp.") or (match is not None and int(match[1]) >= layers)
    return is_of_prediction or name.endswith(".rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of one dense weight.

    name: its tensor on disk.
    loaded: its parameter in transformers' model, empty if the name is the same.
    heads: the part of each head that is the weight.
    rows: start and stop of the weight in the tensor, and the rows of the tensor; None if it is whole.
    stack: number of experts, first column and column step of the weight in a stack of vectors.
    taps: positions of a convolution's kernel, [D, 1, taps]; 0 for other weights.
    """

    name: str
    loaded: str = ""
    heads: HeadPart | None = None
    rows: tuple[int, int, int] | None = None
    stack: tuple[int, int, int] | None = None
    taps: int = 0

    def source(self, shape: tuple[int, ...]) -> TensorSource:
        if self.taps:
            return TensorSource(self.name, (shape[0] // self.taps, 1, self.taps), is_flat=True)
        if self.rows is not None:
            return TensorSource(self.name, (self.rows[2], *shape[1:]), rows=self.rows[:2])
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


def _place(checkpoint: Checkpoint, prefix: str, name: str, other: str | None) -> _Place:
    """Return the place of a weight that may have another name on disk."""
    if other is not None and prefix + other in checkpoint.tensors:
        return _Place(prefix + other, prefix + name)
    return _Place(prefix + name)


def _layer_places(checkpoint: Checkpoint, layer: LayerSpec, names: DecoderNames, prefix: str) -> dict[str, _Place]:
    """Return where the dense weights of a layer lie. The result covers layers of every kind."""
    renamed = names.renamed
    usual = {**_LAYER_NAMES, **names.own, **({} if layer.recurrent is None else names.recurrent)}
    places = {name: _place(checkpoint, prefix, on_disk, renamed.get(name)) for name, on_disk in usual.items()}
    if layer.recurrent is not None:
        places["taps"] = replace(places["taps"], taps=layer.recurrent.taps)
    if layer.delta is not None:
        places |= _delta_places(layer.delta, prefix, names)
    if layer.attention is not None and prefix + names.query_key_value in checkpoint.tensors:
        places |= _fused_places(layer.attention, prefix, names.query_key_value)
    if layer.attention is not None and names.query_gate:
        heads, size, name = layer.attention.num_heads, layer.attention.head_size, prefix + names.query_gate
        places["query"] = _Place(name, heads=HeadPart(heads, 2 * size, 0, size))
        places["output_gate"] = _Place(name, heads=HeadPart(heads, 2 * size, size, 2 * size))
    latent = None if layer.attention is None else layer.attention.latent
    if layer.attention is not None and latent is not None:
        both, up = latent.plain_size + latent.value_size, prefix + "self_attn.kv_b_proj.weight"
        heads = layer.attention.num_heads
        places["query"] = _Place(prefix + f"self_attn.{'q_b_proj' if latent.query_rank else 'q_proj'}.weight")
        places["key_up"] = _Place(up, heads=HeadPart(heads, both, 0, latent.plain_size, is_transposed=True))
        places["value_up"] = _Place(up, heads=HeadPart(heads, both, latent.plain_size, both))
    on_disk = next((name for name in names.routers if prefix + name in checkpoint.tensors), names.routers[0])
    places["router"] = _Place(prefix + on_disk, prefix + names.loaded_router)
    places["router_bias"] = _Place(prefix + names.loaded_router.replace("weight", "bias"))
    count = layer.experts.count
    for name, bias, first, step in (("gate", "gate_up", 0, 2), ("up", "gate_up", 1, 2), ("down", "down", 0, 1)):
        places[f"experts_{name}_bias"] = _Place(prefix + f"mlp.experts.{bias}_proj_bias", stack=(count, first, step))
    places |= _shared_places(checkpoint, layer, names, prefix)
    places["shared_router"] = _Place(prefix + names.shared_router)
    return places


def _shared_places(checkpoint: Checkpoint, layer: LayerSpec, names: DecoderNames, prefix: str) -> dict[str, _Place]:
    """Return where the shared expert lies, or the feed-forward of a plain layer."""
    if names.shared_stack and layer.shared is not None:
        gate_up, down = (prefix + name for name in names.shared_stack)
        width = layer.shared.width
        halves = (HeadPart(1, 2 * width, start, start + width) for start in (0, width))  # of a single head
        gate, up = (_Place(gate_up, heads=half) for half in halves)
        return {"shared_gate": gate, "shared_up": up, "shared_down": _Place(down)}
    if not layer.experts.count:
        return {f"shared_{name}": _Place(prefix + plain) for name, plain in zip(PROJECTIONS, names.plain, strict=True)}
    loaded = names.loaded_shared or names.shared[0]
    is_there = (name for name in names.shared if f"{prefix}{name}.gate_proj.weight" in checkpoint.tensors)
    on_disk = next(is_there, names.shared[0])
    return {
        f"shared_{name}": _Place(f"{prefix}{on_disk}.{name}_proj.weight", f"{prefix}{loaded}.{name}_proj.weight")
        for name in ("gate", "up", "down")
    }


def _delta_places(delta: DeltaSpec, prefix: str, names: DecoderNames) -> dict[str, _Place]:
    """Return where the weights of a delta rule lie that share a matrix."""
    heads, shared = delta.key_heads, delta.value_heads // delta.key_heads
    keys, values = delta.key_size, shared * delta.value_size
    if names.query_key_value_rows:
        sizes = {"query": heads * keys, "key": heads * keys, "value": heads * values}
        stops = list(accumulate(sizes.values()))
        name = prefix + names.query_key_value_rows
        return {
            part: _Place(name, rows=(stop - size, stop, stops[-1]))
            for (part, size), stop in zip(sizes.items(), stops, strict=True)
        }
    places = dict[str, _Place]()
    for name, parts in (
        (names.query_key_value_gate, {"query": keys, "key": keys, "value": values, "output_gate": values}),
        (names.rate_step, {"rate": shared, "step": shared}),
    ):
        stops = list(accumulate(parts.values()))
        for (part, size), stop in zip(parts.items(), stops, strict=True):
            places[part] = _Place(prefix + name, heads=HeadPart(heads, stops[-1], stop - size, stop))
    return places


def _fused_places(attention: AttentionSpec, prefix: str, name: str) -> dict[str, _Place]:
    """Return where queries, keys and values lie if they follow each other in one matrix and in one bias."""
    places, start = dict[str, _Place](), 0
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    rows = sum(heads) * attention.head_size
    for part, count in zip(("query", "key", "value"), heads, strict=True):
        stop = start + count * attention.head_size
        for of, kind in ((part, "weight"), (f"{part}_bias", "bias")):
            on_disk = prefix + name.replace("weight", kind)
            places[of] = _Place(on_disk, prefix + _LAYER_NAMES[of], rows=(start, stop, rows))
        start = stop
    return places


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
            whole = (count, rows if is_down else 2 * rows, columns // MXFP4_BLOCK_VALUES)
            scales = checkpoint.tensors.get(stem + SCALES_SUFFIX)
            if scales is None or scales.shape != whole:
                raise CheckpointError(
                    f"`{checkpoint.place}`: expected a tensor `{stem + SCALES_SUFFIX}` of shape {list(whole)}",
                    "copy the checkpoint again",
                )
            every = None if is_down else (0 if projection == "gate" else 1, 2)
            shape = (*whole, MXFP4_BLOCK_VALUES // 2)
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
    if names.stacked and prefix + names.stacked[0][0] + BLOCKS_SUFFIX in checkpoint.tensors:
        return _mxfp4_units(checkpoint, model, names, layer)
    sources = []
    for expert in range(count):
        for projection, name_of_projection in zip(PROJECTIONS, names.projections, strict=True):
            rows, columns = model.unit_shape(layer, projection)
            if stacked is None:
                name = prefix + names.experts.format(expert=expert, projection=name_of_projection)
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

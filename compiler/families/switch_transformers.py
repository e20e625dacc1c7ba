"""Switch Transformers: a T5 encoder and decoder. An expert has two projections and ReLU; a token takes one expert.

Every few layers are routed. Positions are biases of the attention scores, which are not scaled.
Each expert has separate tensors on disk, in old and new releases.
Capacity drops tokens in the encoder only: transformers counts it within one call, and decoding passes one token a call.
Source: transformers, models/switch_transformers; Switch Transformers, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moec.manifests.errors import CheckpointError
from moec.manifests.model import (
    MAX_LAYERS,
    AttentionSpec,
    EncoderSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RelativeBiasSpec,
    RouterSpec,
    SharedSpec,
    UnitKey,
)

from ..checkpoint.model_files import CONFIG_NAME, GENERATION_CONFIG_NAME, ModelFiles
from .lowering import Lowering, TensorSource, common_float_type
from .settings import Settings

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

_FAMILY = "switch_transformers"
_EMBEDDING, _HEAD = "shared.weight", "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # present in old T5 checkpoints
_POSITIONS = 512  # value of the published checkpoints; used if config.json has no `n_positions`
_SPARSE_LAYERS = 3  # default of transformers, for encoder and decoder
_CAPACITY = 64
_MAX_EXPERTS_PER_LAYER = 4096  # bounds what a hostile config.json can make a family allocate
_PROJECTIONS = {"up": "wi", "down": "wo"}
_ATTENTION = {"query": "q", "key": "k", "value": "v", "output": "o"}


def describe(files: ModelFiles) -> ModelSpec:
    """Return the model that the settings describe.

    Raises CheckpointError, which names the key of config.json, if a setting is not supported.
    """
    settings = Settings(files)
    try:
        _check_fixed(settings)
        encoder = settings.integer("num_layers", MAX_LAYERS)
        decoder = settings.optional_integer("num_decoder_layers") or encoder
        if decoder > MAX_LAYERS:
            settings.fail("num_decoder_layers", f"a whole number from 1 to {MAX_LAYERS}")
        hidden, is_tied = settings.integer("d_model"), settings.boolean("tie_word_embeddings", True)
        layers = [
            *_stack(settings, "encoder", encoder, settings.optional_integer("expert_capacity") or _CAPACITY),
            *_stack(settings, "decoder", decoder, 0),
        ]
        model = ModelSpec(
            family=_FAMILY,
            hidden_size=hidden,
            vocab_size=settings.integer("vocab_size"),
            max_positions=settings.optional_integer("n_positions") or _POSITIONS,
            norm_eps=settings.number("layer_norm_epsilon", 1e-6),
            tie_embeddings=is_tied and not files.differ(_HEAD, _EMBEDDING),
            layers=tuple(layers),
            eos_token_ids=settings.eos_token_ids(),
            logits_scale=hidden**-0.5 if is_tied else 1.0,  # decided by the key, even if the weights differ
            encoder=EncoderSpec(encoder, _start_token(settings)),
        )
    except ValueError as error:
        raise CheckpointError(f"`{files.root / CONFIG_NAME}` contradicts itself: {error}", "repair it") from error
    settings.finish()
    return model


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a Switch Transformers checkpoint. Raises the errors of `describe`, and CheckpointError."""
    model = describe(checkpoint)
    for name in _COPIES:
        if checkpoint.differ(name, _EMBEDDING):
            raise CheckpointError(
                f"tensor `{name}` in `{checkpoint.place}` differs from `{_EMBEDDING}`, expected one embedding for all",
                "compile another checkpoint",
            )
    names = {"embedding": _EMBEDDING, "lm_head": _HEAD}
    names |= {"encoder_norm": "encoder.final_layer_norm.weight", "final_norm": "decoder.final_layer_norm.weight"}
    units: dict[UnitKey, TensorSource] = {}
    for index in range(model.num_layers):
        names |= {f"layers.{index}.{name}": tensor for name, tensor in _layer_names(model, index).items()}
    for key in model.unit_keys():
        tensor = f"{_feed_forward(model, key.layer)}.experts.expert_{key.expert}.{_PROJECTIONS[key.projection]}.weight"
        units[key] = TensorSource(tensor, model.unit_shape(key.layer, key.projection))
    dense = {name: _source(names[name], name, shape, model) for name, shape in model.dense_shapes().items()}
    read = [source.name for source in (*dense.values(), *units.values())]
    float_type, notes = common_float_type(checkpoint, read)
    ignored = {*_COPIES, _UNREAD, *((_HEAD,) if model.tie_embeddings else ())} & checkpoint.tensors.keys()
    loaded = {name: names[name] for name in dense}
    return Lowering(checkpoint, model, dense, units, loaded, frozenset(ignored), frozenset(), float_type, notes)


def _check_fixed(settings: Settings) -> None:
    """Check keys that must have one value, and mark keys without effect. Raises CheckpointError."""
    settings.passed_over("dropout_rate", "initializer_factor", "router_z_loss_coef", "add_router_probs", "output_past")
    # transformers reads these in training only.
    settings.passed_over("router_ignore_padding_tokens", "router_type", "batch_prioritized_routing")
    for key, value in (("dense_act_fn", "relu"), ("feed_forward_proj", "relu"), ("router_dtype", "float32")):
        if settings.raw(key) is not None:
            settings.one_of(key, (value,))
    for key, wanted in (("is_gated_act", False), ("is_encoder_decoder", True)):
        if settings.boolean(key, wanted) is not wanted:
            settings.fail(key, "false" if not wanted else "true", "compile another checkpoint")


def _stack(settings: Settings, kind: str, count: int, capacity: int) -> Iterator[LayerSpec]:
    """Return the layers of the encoder or the decoder. Raises CheckpointError or ValueError."""
    heads, head_size, width = (settings.integer(key) for key in ("num_heads", "d_kv", "d_ff"))
    bias = RelativeBiasSpec(
        settings.optional_integer("relative_attention_num_buckets") or 32,
        settings.optional_integer("relative_attention_max_distance") or 128,
    )
    self_attention = AttentionSpec(heads, heads, head_size, None, scale=1.0, relative_bias=bias)
    cross = AttentionSpec(heads, heads, head_size, None, scale=1.0) if kind == "decoder" else None
    router = RouterSpec("softmax", False, has_bias=settings.boolean("router_bias", False), capacity=capacity)
    routed = ExpertsSpec(settings.integer("num_experts", _MAX_EXPERTS_PER_LAYER), 1, width, "relu", router)
    plain = ExpertsSpec(0, 0, width, "relu", RouterSpec("softmax", False))
    step = _sparse_step(settings, kind, count)
    for index in range(count):
        is_routed = step == 1 or index % step == 1
        yield LayerSpec(self_attention, routed if is_routed else plain, None if is_routed else SharedSpec(width), cross)


def _sparse_step(settings: Settings, kind: str, layers: int) -> int:
    """Return n if every n-th layer is routed.

    Raises CheckpointError if the two keys for it disagree.
    """
    key, count_key = f"{kind}_sparse_step", f"num_sparse_{kind}_layers"
    routed = settings.raw(count_key)
    routed = _SPARSE_LAYERS if routed is None else routed
    if type(routed) is not int or not 0 <= routed <= layers:
        settings.fail(count_key, f"at most the {layers} layers there are")
    step = layers // routed if routed else layers
    if settings.raw(key) not in (None, step):
        settings.fail(key, f"{step}, by the {routed} of `{count_key}` and {layers} layers")
    return step


def _start_token(settings: Settings) -> int:
    """Return the first token of the decoder's text. generation_config.json takes precedence.

    Raises CheckpointError if neither file has one.
    """
    key = "decoder_start_token_id"
    stated, generation = settings.raw(key), settings.checkpoint.generation_config.get(key)
    start = stated if generation is None else generation
    if type(start) is not int:
        settings.fail(key, f"a token id, here or in {GENERATION_CONFIG_NAME}")
    return int(start)


def _source(tensor: str, name: str, shape: tuple[int, ...], model: ModelSpec) -> TensorSource:
    if not name.endswith(".relative_bias"):
        return TensorSource(tensor, shape)
    heads = model.attentions[0].num_heads
    return TensorSource(tensor, (shape[0] // heads, heads), is_flat=True)


def _block(model: ModelSpec, index: int) -> str:
    first = model.first_decoder_layer
    return f"encoder.block.{index}" if index < first else f"decoder.block.{index - first}"


def _feed_forward(model: ModelSpec, index: int) -> str:
    return f"{_block(model, index)}.layer.{1 if index < model.first_decoder_layer else 2}.mlp"


def _layer_names(model: ModelSpec, index: int) -> dict[str, str]:
    """Return canonical names of one layer -> tensors on disk. transformers' model uses the same names."""
    block, feed_forward = _block(model, index), _feed_forward(model, index)
    self_attention, cross = f"{block}.layer.0", f"{block}.layer.1"
    names = {
        "attention_norm": f"{self_attention}.layer_norm.weight",
        "cross_attention_norm": f"{cross}.layer_norm.weight",
    }
    for name, letter in _ATTENTION.items():
        names[name] = f"{self_attention}.SelfAttention.{letter}.weight"
        names[f"cross_{name}"] = f"{cross}.EncDecAttention.{letter}.weight"
    return {
        **names,
        "relative_bias": f"{self_attention}.SelfAttention.relative_attention_bias.weight",
        "experts_norm": feed_forward.removesuffix("mlp") + "layer_norm.weight",
        "router": f"{feed_forward}.router.classifier.weight",
        "router_bias": f"{feed_forward}.router.classifier.bias",
        "shared_up": f"{feed_forward}.wi.weight",
        "shared_down": f"{feed_forward}.wo.weight",
    }

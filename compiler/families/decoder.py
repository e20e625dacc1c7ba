"""Settings common to decoders of the Llama shape.

They have rotary attention with grouped heads, RMS norms and routed SwiGLU experts. A family supplies its
layers and its tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moec.manifests.errors import CheckpointError
from moec.manifests.model import (
    MAX_LAYERS,
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    SharedSpec,
)

from ..checkpoint.model_files import ModelFiles
from ..checkpoint.stand_ins import is_stood_in
from .decoder_weights import EMBEDDING, HEAD, DecoderNames, lower_decoder
from .lowering import Lowering
from .rope import read_rope
from .settings import Settings

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

MAX_EXPERTS_PER_LAYER = 4096  # bounds what a hostile config.json can make a family allocate
ReadRope = Callable[..., RopeSpec]
"""`read_rope`, or a family's own reader of its rotary embeddings."""


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The settings of config.json that a family reads itself.

    layers: one LayerSpec per layer.
    more: further fields of ModelSpec.
    ties: whether embeddings are tied if config.json does not say.
    has_activation: whether config.json names the activation of experts.
    """

    layers: tuple[LayerSpec, ...]
    more: Mapping[str, Any] = field(default_factory=dict)
    ties: bool = False
    has_activation: bool = True


def alike(settings: Settings, attention: AttentionSpec, experts: ExpertsSpec) -> DecoderParts:
    """Return parts whose layers are all equal."""
    return DecoderParts((LayerSpec(attention, experts),) * count_layers(settings))


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


Mixer = AttentionSpec | ConvolutionSpec | DeltaSpec


def layer_of(mixer: Mixer, experts: ExpertsSpec, shared: SharedSpec | None = None) -> LayerSpec:
    """Return a layer with this mixer. Raises ValueError."""
    if isinstance(mixer, AttentionSpec):
        return LayerSpec(mixer, experts, shared)
    if isinstance(mixer, ConvolutionSpec):
        return LayerSpec(None, experts, shared, convolution=mixer)
    return LayerSpec(None, experts, shared, delta=mixer)


def layers_of(
    settings: Settings,
    mixers: Sequence[Mixer],
    experts: ExpertsSpec,
    shared: SharedSpec | None,
    are_routed: Sequence[bool],
) -> tuple[LayerSpec, ...]:
    """Return routed layers, and plain ones of the width `intermediate_size`. Raises CheckpointError."""
    stated = settings.optional_integer("intermediate_size")
    width = experts.width if all(are_routed) else stated or settings.integer("intermediate_size")
    return tuple(
        layer_of(mixer, experts, shared) if is_routed else plain_layer(mixer, width)
        for mixer, is_routed in zip(mixers, are_routed, strict=True)
    )


def read_plain_layers(settings: Settings, default: Sequence[int] = ()) -> list[bool]:
    """Return whether each layer is plain, from `mlp_only_layers` and `decoder_sparse_step`. Raises CheckpointError.

    default: the plain layers if config.json has no `mlp_only_layers`.
    """
    stated, step = settings.raw("mlp_only_layers"), settings.optional_integer("decoder_sparse_step") or 1
    stated = default if stated is None else stated
    if not isinstance(stated, list | tuple) or not all(type(layer) is int for layer in stated):
        settings.fail("mlp_only_layers", "a list of layers")
    return [layer in stated or (layer + 1) % step != 0 for layer in range(count_layers(settings))]


def plain_first(settings: Settings, default: int) -> list[bool]:
    """Return whether each layer is routed: all after the first `first_k_dense_replace`. Raises CheckpointError."""
    first = first_routed(settings, default)
    return [layer >= first for layer in range(count_layers(settings))]


def read_routed(settings: Settings, are_routed: list[bool]) -> list[bool]:
    """Return whether each layer is routed, from `mlp_layer_types`.

    are_routed: the result if config.json has no `mlp_layer_types`.
    Raises CheckpointError.
    """
    kinds = read_kinds(settings, "mlp_layer_types", ("dense", "sparse"))
    return are_routed if kinds is None else [kind == "sparse" for kind in kinds]


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


def plain_layer(mixer: Mixer, width: int) -> LayerSpec:
    """Return a layer without routed experts, whose feed-forward stays resident. Raises ValueError."""
    return layer_of(mixer, ExpertsSpec(0, 0, width, "silu", RouterSpec("softmax", False)), SharedSpec(width))


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
    known = {"full_attention": 0, "sliding_attention": window}
    kinds = read_kinds(settings, "layer_types", tuple(known))
    return windows if kinds is None else [known[kind] for kind in kinds]


def read_kinds(settings: Settings, key: str, known: tuple[str, ...]) -> list[str] | None:
    """Return the kind of each layer; None if config.json does not say. Raises CheckpointError."""
    kinds, layers = settings.raw(key), count_layers(settings)
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(kind in list(known) for kind in kinds)
    ):
        settings.fail(key, f"{layers} times `{known[0]}` or `{known[1]}`")
    return kinds


def attentions_by_window(settings: Settings, windows: list[int], **more: Any) -> list[AttentionSpec]:
    """Return the attention of each layer. Layers with a window and those without have a rotary embedding of their own.

    windows: of each layer, in tokens; 0 for none.
    more: further fields of AttentionSpec.
    Raises CheckpointError or ValueError.
    """
    attentions = {
        size: attention_of(
            settings,
            rope=partial(read_rope, layer_type="sliding_attention" if size else "full_attention"),
            sliding_window=size,
            **more,
        )
        for size in set(windows)
    }
    return [attentions[size] for size in windows]


def read_corrections(settings: Settings, names: DecoderNames, layer: int, experts: int) -> tuple[float, ...]:
    """Return the score correction of each expert of a layer, exactly as on disk. Raises CheckpointError."""
    on_disk = [f"model.layers.{layer}.{name}" for name in names.corrections]
    name = next((name for name in on_disk if name in settings.checkpoint.tensors), on_disk[0])
    return read_vector(settings, name, experts)


def read_vector(settings: Settings, name: str, size: int) -> tuple[float, ...]:
    """Return the numbers of a tensor, exactly as on disk. Raises CheckpointError."""
    return tuple(settings.checkpoint.numbers(name, size))


def corrected_router(
    settings: Settings, *, scale: float = 1.0, groups: int = 1, kept_groups: int = 1, renormalize: bool = True
) -> RouterSpec:
    """Return a router with sigmoid scores. A group scores by its best two. Corrections are read later.

    scale, groups, kept_groups, renormalize: defaults of the family.
    Raises CheckpointError.
    """
    return RouterSpec(
        "sigmoid",
        renormalize=settings.boolean("norm_topk_prob", renormalize),
        scale=settings.number("routed_scaling_factor", scale),
        groups=settings.optional_integer("n_group") or groups,
        kept_groups=settings.optional_integer("topk_group") or kept_groups,
        group_score="top2",
    )


def with_corrections(settings: Settings, names: DecoderNames, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, each router with its own correction. Raises CheckpointError or ValueError."""
    corrected = []
    for at, layer in enumerate(layers):
        experts = layer.experts
        if experts.count:
            correction = read_corrections(settings, names, at, experts.count)
            experts = replace(experts, router=replace(experts.router, correction=correction))
        corrected.append(replace(layer, experts=experts))
    return tuple(corrected)


def shared_width(settings: Settings, keys: tuple[str, ...], width: int, absent: int) -> SharedSpec | None:
    """Return the shared experts as one expert of their total width, or None without any. Raises CheckpointError.

    keys: names of their number. The first one that is given is used.
    absent: their number if none is given.
    """
    key = next((key for key in keys if settings.is_given(key)), "")
    count = absent if not key else settings.integer(key) if settings.raw(key) else 0
    return SharedSpec(count * width) if count else None


def fixed(settings: Settings, key: str, value: object, is_required: bool = False) -> None:
    """Check a key that must have this value, or be absent unless it is required. Raises CheckpointError."""
    stated = settings.raw(key)
    if stated != value and (stated is not None or is_required):
        settings.fail(key, f"`{value}`", "compile another checkpoint")


def lower_family(
    family: str, names: DecoderNames, parts: Callable[[Settings], DecoderParts], checkpoint: Checkpoint
) -> Lowering:
    """Translate a checkpoint of a family.

    parts: reads the settings that are specific to the family.
    Raises CheckpointError, which names the key of config.json, if a setting is not supported.
    """
    return lower_decoder(checkpoint, describe_family(family, parts, checkpoint), names)


def describe_family(family: str, parts: Callable[[Settings], DecoderParts], files: ModelFiles) -> ModelSpec:
    """Return the model that the settings describe. Raises the errors of `lower_family`."""
    settings = Settings(files)
    try:
        model = _model_spec(files, settings, family, parts(settings))
    except ValueError as error:
        raise CheckpointError(f"`{files.settings_file}` contradicts itself: {error}", "repair it") from error
    windows = [layer.attention is not None and layer.attention.sliding_window for layer in model.layers]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    normalised = tuple({model.layers[index].experts.router.renormalize for index in model.expert_layers})
    settings.finish({"layer_types": (kinds,), "norm_topk_prob": normalised})
    return model


def _model_spec(files: ModelFiles, settings: Settings, family: str, parts: DecoderParts) -> ModelSpec:
    """Return the ModelSpec.

    Raises CheckpointError.
    Raises ValueError if settings contradict each other.
    """
    if parts.has_activation:
        settings.one_of("hidden_act", ("silu",))
    tie = settings.boolean("tie_word_embeddings", parts.ties)
    if tie and files.differ(HEAD, EMBEDDING):
        if is_stood_in(files):
            settings.fail("tie_word_embeddings", f"false, because `{HEAD}` and `{EMBEDDING}` differ")
        tie = False  # as transformers does
    return ModelSpec(
        family=family,
        hidden_size=settings.integer("hidden_size"),
        vocab_size=settings.integer("vocab_size"),
        max_positions=settings.integer("max_position_embeddings"),
        norm_eps=parts.more.get("norm_eps") or settings.number("rms_norm_eps"),
        tie_embeddings=tie,
        layers=parts.layers,
        eos_token_ids=settings.eos_token_ids(),
        **{name: value for name, value in parts.more.items() if name != "norm_eps"},
    )

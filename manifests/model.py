"""ModelSpec: the model that the runtime executes, independent of a checkpoint's names.

Shape letters: D hidden, F expert width, E experts, K top-k, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .attention import (
    MAX_POSITIONS,
    AttentionSpec,
    LatentSpec,
    LongRopeSpec,
    RelativeBiasSpec,
    RopeSpec,
    Shapes,
    attention_shapes,
    require,
)
from .optional_fields import OPTIONAL
from .recurrent import ConvolutionSpec, DeltaSpec, RecurrentSpec, state_bytes
from .runtime_limits import DEFAULT_CONTEXT

__all__ = [
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "PROJECTIONS",
    "AttentionSpec",
    "ConvolutionSpec",
    "DeltaSpec",
    "EncoderSpec",
    "ExpertKey",
    "ExpertsSpec",
    "LatentSpec",
    "LayerSpec",
    "LongRopeSpec",
    "ModelSpec",
    "RelativeBiasSpec",
    "RopeSpec",
    "RouterSpec",
    "SharedSpec",
    "StaticRouting",
    "UnitKey",
    "keeps_16_bits",
]

PROJECTIONS = ("gate", "up", "down")
MAX_LAYERS = 1024
MAX_EXPERTS = 65535


class ExpertKey(NamedTuple):
    """One routed expert: its layer (counted over all layers, an encoder's first) and its index in that layer."""

    layer: int
    expert: int


class UnitKey(NamedTuple):
    """The unit of the search: one projection of one expert."""

    layer: int
    expert: int
    projection: str


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The routed experts of one layer, each down(act(gate x) * (up x)). Without experts, count and top_k are 0.

    gelu: the function of the gate is GELU in its tanh form, else SiLU.
    relu: down(max(up x, 0)), without gate.
    clamped_swiglu: (u + 1) g / (1 + exp(-1.702 g)), with g = gate x at most `limit` and u = up x within +-limit.
    has_bias: whether each projection adds a bias.
    """

    count: int
    top_k: int
    width: int
    activation: Literal["silu", "clamped_swiglu", "relu", "gelu"]
    router: RouterSpec
    limit: float = 0.0
    has_bias: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.count <= MAX_EXPERTS, f"expert count must be 0 to {MAX_EXPERTS}, found {self.count}")
        least = min(self.count, 1)
        require(least <= self.top_k <= self.count, f"top_k must be {least} to {self.count}, found {self.top_k}")
        require(0 < self.width <= 1 << 20, f"expert width out of range: {self.width}")
        require(0 <= self.limit <= 1e4, f"activation limit out of range: {self.limit}")
        require(self.activation != "clamped_swiglu" or self.limit > 0, "a clamped activation needs a limit")
        require(self.activation != "relu" or not self.has_bias, "experts with the activation relu have no biases")
        groups, best_groups = self.router.groups, self.router.kept_groups
        require(self.count % groups == 0, f"{groups} groups must divide {self.count} experts")
        if groups > 1 and self.count:
            size = self.count // groups
            require(size >= (2 if self.router.group_score == "top2" else 1), "groups are too small for their score")
            require(
                self.top_k <= best_groups * size, f"{best_groups} groups of {size} experts cannot give {self.top_k}"
            )
        for name in ("correction", "expert_scales"):
            numbers = getattr(self.router, name)
            require(len(numbers) in (0, self.count), f"{name}: expected one number per expert, or none")
        is_fitting = self.router.scoring != "sparsemixer" or self.top_k in (0, 2)
        require(is_fitting, f"sparsemixer chooses 2 experts, not {self.top_k}")
        if self.router.static is not None:
            self.router.static.check(self.count, self.top_k)

    @property
    def can_lose_experts(self) -> bool:
        """True if experts can be left out. The router then chooses among the others."""
        return self.router.is_by_logits and self.count > self.top_k

    @property
    def projections(self) -> tuple[str, ...]:
        """Projections of one expert, in storage order."""
        return PROJECTIONS[1:] if self.activation == "relu" else PROJECTIONS


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert that every token uses, resident with the dense weights; or the feed-forward of a layer without routed
    experts.

    has_gate: whether its output is multiplied by the sigmoid of a product of its own.
    has_norms: it has an RMS norm of its own before it. Its output and that of the routed experts each pass one more.
    """

    width: int
    has_gate: bool = False
    has_norms: bool = field(default=False, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(0 < self.width <= 1 << 20, f"shared expert width out of range: {self.width}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: norm, mixer, residual; norm, routed experts and shared expert, residual.

    attention, convolution, delta: the mixer, which combines a token with earlier ones. Exactly one of them is given.
    cross: attention over the encoder's states of the prompt, after attention, with its own norm and residual.
    norms_after: the outputs of the mixer and of experts pass an RMS norm of their own before the residual.
    scale: factor of the residual stream after the layer.
    """

    attention: AttentionSpec | None
    experts: ExpertsSpec
    shared: SharedSpec | None = None
    cross: AttentionSpec | None = field(default=None, metadata=OPTIONAL)
    norms_after: bool = field(default=False, metadata=OPTIONAL)
    convolution: ConvolutionSpec | None = field(default=None, metadata=OPTIONAL)
    delta: DeltaSpec | None = field(default=None, metadata=OPTIONAL)
    scale: float = field(default=1.0, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        mixers = [mixer for mixer in (self.attention, self.convolution, self.delta) if mixer is not None]
        require(len(mixers) == 1, f"a layer has one of attention, convolution and delta, found {len(mixers)}")
        require(self.experts.count > 0 or self.shared is not None, "a layer must have routed experts or a shared one")
        is_clamped = self.experts.activation == "clamped_swiglu"
        require(self.shared is None or not is_clamped, "a shared expert has silu, gelu or relu")
        has_branches = self.shared is not None and self.shared.has_norms
        require(not has_branches or self.experts.count > 0, "has_norms is for a shared expert beside routed ones")
        require(0 < self.scale <= 1e4, f"scale of a layer out of range: {self.scale}")
        require(self.cross is None or self.cross.is_bare, "attention over the encoder has heads and a scale alone")

    @property
    def is_of_version_4(self) -> bool:
        """True if version 4 of the bundle format is the first that has all parts of the layer."""
        attention, router = self.attention, self.experts.router
        has_values = attention is not None and (attention.value_norm or attention.value_is_key)
        has_router = router.least_sum or router.norm_scale or router.expert_scales
        has_branches = self.shared is not None and self.shared.has_norms
        is_scaled = self.scale != 1 or self.experts.activation == "gelu"
        return bool(self.recurrent or has_values or has_router or has_branches or is_scaled)

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer if its memory of earlier tokens has a fixed size, else None."""
        return self.convolution or self.delta

    def mixer_shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the weights of the mixer, with the norm before it."""
        recurrent, attention = self.recurrent, self.attention
        shapes = {} if attention is None else attention_shapes(attention, hidden)
        return shapes if recurrent is None else recurrent.shapes(hidden)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder in the first num_layers layers. It computes the prompt once, and every token sees all the others.

    The decoder attends to the encoder's output after a last norm. The decoder's own text begins with start_token_id.
    """

    num_layers: int
    start_token_id: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A mixture of experts: a decoder, or an encoder and a decoder.

    max_positions: longest context that the checkpoint was made for.
    norm_eps: eps of every norm.
    layers: layers of the encoder, then of the decoder.
    eos_token_ids: tokens that end a generation.
    embedding_scale: factor of embeddings.
    residual_scale: factor of the outputs of attention and of experts.
    logits_scale: factor of logits.
    norm: kind of the norms of the residual stream. `rms` divides by the root mean square. `layer` also subtracts the
        mean first and adds a bias last.
    has_head_bias: whether a bias is added to the logits before they are scaled.
    norm_offset: number that is added to the weights of norms, except those of the output of a delta rule.
    logit_softcap: bound c of logits x, which become c tanh(x / c) after their scale; 0 for none.
    Raises ValueError if fields contradict each other.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...] = field(default=())
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    encoder: EncoderSpec | None = field(default=None, metadata=OPTIONAL)
    norm: Literal["rms", "layer"] = field(default="rms", metadata=OPTIONAL)
    has_head_bias: bool = field(default=False, metadata=OPTIONAL)
    norm_offset: float = field(default=0.0, metadata=OPTIONAL)
    logit_softcap: float = field(default=0.0, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(0 < self.hidden_size <= 1 << 20, f"hidden_size out of range: {self.hidden_size}")
        require(0 < self.vocab_size <= 1 << 24, f"vocab_size out of range: {self.vocab_size}")
        require(0 < self.max_positions <= MAX_POSITIONS, f"max_positions out of range: {self.max_positions}")
        require(0 < len(self.layers) <= MAX_LAYERS, f"a model has 1 to {MAX_LAYERS} layers, found {len(self.layers)}")
        require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        require(any(layer.experts.count for layer in self.layers), "no layer has routed experts")
        require(0 <= self.norm_offset <= 1, f"norm_offset out of range: {self.norm_offset}")
        require(0 <= self.logit_softcap <= 1e4, f"logit_softcap out of range: {self.logit_softcap}")
        for scale in (self.embedding_scale, self.residual_scale, self.logits_scale):
            require(0 < scale <= 1e4, f"scale out of range: {scale}")
        for token in self.eos_token_ids:
            require(0 <= token < self.vocab_size, f"eos token {token} outside the vocabulary")
        self._check_stacks()

    def _check_stacks(self) -> None:
        """Check the required and allowed parts of encoder and decoder."""
        if self.encoder is not None:
            start = self.encoder.start_token_id
            require(self.norm == "rms", "a model with an encoder has RMS norms")
            require(
                0 < self.encoder.num_layers < len(self.layers), "an encoder leaves at least one layer to the decoder"
            )
            require(0 <= start < self.vocab_size, f"start token {start} outside the vocabulary")
        first = self.first_decoder_layer
        for index, layer in enumerate(self.layers):
            decodes = index >= first
            require(
                (layer.cross is not None) == (decodes and first > 0),
                f"layer {index}: cross is for decoders after an encoder",
            )
            require(not (decodes and layer.experts.router.capacity), f"layer {index}: capacity is for encoders")
            require(not (layer.norms_after and first), f"layer {index}: a model with an encoder has no norms after")
            static = layer.experts.router.static
            require(decodes or static is None, f"layer {index}: static routing is for decoders")
            fits = static is None or len(static.experts) == self.vocab_size * layer.experts.top_k
            require(fits, f"layer {index}: static: expected experts of {self.vocab_size} tokens")
            if layer.attention is not None:
                self._check_attention(index, layer.attention, self.layers[first if decodes else 0].attention)
            else:
                require(first == 0, f"layer {index}: a model with an encoder has attention in every layer")

    def _check_attention(self, index: int, attention: AttentionSpec, shared: AttentionSpec | None) -> None:
        """Check the attention of a layer.

        shared: that of the first layer of its stack; None if it has another mixer.
        """
        decodes = index >= self.first_decoder_layer
        extras = attention.latent or attention.sliding_window or attention.sinks
        require(decodes or not extras, f"layer {index}: encoders have no latent vectors, windows, sinks")
        bias = None if shared is None else shared.relative_bias
        require(attention.relative_bias == bias, f"layer {index}: the layers of a stack share their relative bias")
        if shared is not None:
            # The table has a column for each head.
            fits = bias is None or attention.num_heads == shared.num_heads
            require(fits, f"layer {index}: layers that share a relative bias have as many heads")
            cached = (attention.num_kv_heads, attention.head_size)
            fits = decodes or cached == (shared.num_kv_heads, shared.head_size)
            require(fits, f"layer {index}: the layers of an encoder have keys and values of one size")

    @property
    def format_version(self) -> int:
        """The lowest version of the bundle format that has all parts of the model."""
        layers = self.layers
        if self.norm_offset or self.logit_softcap or any(layer.is_of_version_4 for layer in layers):
            return 4
        is_new = any(attention.output_gate != "none" for attention in self.attentions)
        is_new = is_new or any(layer.norms_after or layer.experts.router.corrects_logits for layer in layers)
        return 3 if is_new else 1

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Attention of each layer that has it, encoder first."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def needs_cpu(self) -> bool:
        """True if a layer has an operation that accelerators do not have."""
        return any(
            layer.experts.activation == "gelu" or (layer.shared is not None and layer.shared.has_norms)
            for layer in self.layers
        )

    @property
    def original_positions(self) -> int:
        """Longest context in which no rotary embedding uses its long form. A run exceeds it only on request."""
        ropes = [attention.rope for attention in self.attentions]
        longs = [rope.long.original_positions for rope in ropes if rope is not None and rope.long is not None]
        return min([self.max_positions, *longs])

    @property
    def num_layers(self) -> int:
        """Number of layers of encoder and decoder, with or without routed experts."""
        return len(self.layers)

    @property
    def first_decoder_layer(self) -> int:
        """Index of the first decoder layer, 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.num_layers

    def layer_after(self, layer: int, ahead: int = 1) -> int:
        """Return the layer that runs `ahead` layers later.

        After the last layer follows the decoder's first, for the next token.
        """
        first, following = self.first_decoder_layer, layer + ahead
        return following if following < self.num_layers else first + (following - first) % (self.num_layers - first)

    def reads_per_token(self, layer: int) -> int:
        """Return how many experts of a layer one decoded token reads.

        Experts of an encoder are read once for a prompt.
        """
        return self.layers[layer].experts.top_k if layer >= self.first_decoder_layer else 0

    def is_decoded_with(self, dense: str) -> bool:
        """Return whether every decoded token reads this dense weight. Others are used only for a prompt."""
        stem, _, rest = dense.partition(".")
        if stem != "layers":
            return dense != "encoder_norm"
        layer, _, name = rest.partition(".")
        return int(layer) >= self.first_decoder_layer and name not in ("cross_key", "cross_value")

    @property
    def cached_attentions(self) -> tuple[AttentionSpec, ...]:
        """Attentions with keys and values in the cache. The layers of an encoder share one pair."""
        decoder = self.layers[self.first_decoder_layer :]
        cross = [layer.cross for layer in decoder if layer.cross is not None]
        encoder = self.layers[: min(self.first_decoder_layer, 1)]
        return (*(layer.attention for layer in (*encoder, *decoder) if layer.attention is not None), *cross)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts.count)

    @property
    def default_context(self) -> int:
        """Positions of a run without the option `--context`."""
        return min(self.original_positions, DEFAULT_CONTEXT)

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the float32 keys and values of one position over all layers."""
        return sum(4 * a.cache_arrays * a.cache_heads * a.cache_size for a in self.cached_attentions)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence over all layers, float32."""
        states = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        return sum(state_bytes(recurrent, self.hidden_size) for recurrent in states)

    def adds_offset(self, norm: str) -> bool:
        """Return whether `norm_offset` is added to the weights of a norm."""
        return self.norm_offset != 0 and norm.endswith("_norm") and not norm.endswith("output_norm")

    def unit_shape(self, layer: int, projection: str) -> tuple[int, int]:
        """Return (rows, columns) of one projection of an expert: gate and up [F, D], down [D, F]."""
        width = self.layers[layer].experts.width
        return (self.hidden_size, width) if projection == "down" else (width, self.hidden_size)

    def expert_keys(self) -> tuple[ExpertKey, ...]:
        """Return all routed experts in storage order."""
        return tuple(
            ExpertKey(index, expert) for index, layer in enumerate(self.layers) for expert in range(layer.experts.count)
        )

    def units_of(self, key: ExpertKey) -> tuple[UnitKey, ...]:
        """Return the projections of one routed expert in storage order."""
        return tuple(UnitKey(*key, projection) for projection in self.layers[key.layer].experts.projections)

    def unit_keys(self) -> tuple[UnitKey, ...]:
        """Return all projections of all routed experts in storage order."""
        return tuple(unit for key in self.expert_keys() for unit in self.units_of(key))

    def units_of_layer(self, layer: int) -> tuple[UnitKey, ...]:
        """Return all projections of the routed experts of a layer in storage order."""
        experts = range(self.layers[layer].experts.count)
        return tuple(unit for expert in experts for unit in self.units_of(ExpertKey(layer, expert)))

    @property
    def head_name(self) -> str:
        """Name of the dense weight that makes logits."""
        return "embedding" if self.tie_embeddings else "lm_head"

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that is not a routed expert, by name, in storage order.

        Matrices are [rows, columns] = [outputs, inputs]; norms are [D]; a relative bias is [buckets, H], flat.
        """
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.layers):
            parts, attention = layer.mixer_shapes(hidden), layer.attention
            bias = None if attention is None else attention.relative_bias
            if attention is not None and bias is not None and index in (0, self.first_decoder_layer):
                parts["relative_bias"] = (bias.buckets * attention.num_heads,)
            if layer.cross is not None:
                parts.update({f"cross_{name}": shape for name, shape in attention_shapes(layer.cross, hidden).items()})
            if layer.norms_after:
                parts["attention_after_norm"] = (hidden,)
            parts.update(_feed_forward_shapes(layer, hidden))
            shapes.update({f"layers.{index}.{name}": shape for name, shape in parts.items()})
        if self.encoder is not None:
            shapes["encoder_norm"] = (hidden,)
        shapes["final_norm"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        if self.has_head_bias:
            shapes["lm_head_bias"] = (self.vocab_size,)
        if self.norm == "rms":
            return shapes
        with_biases: Shapes = {}
        for name, shape in shapes.items():
            with_biases[name] = shape
            if name.endswith(("attention_norm", "experts_norm", "final_norm")):
                with_biases[f"{name}_bias"] = shape
        return with_biases


def keeps_16_bits(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a dense weight is never quantized: vectors, routers, and the rates of recurrent states."""
    return len(shape) == 1 or name.rpartition(".")[2] in ("router", "rate", "step")


def _feed_forward_shapes(layer: LayerSpec, hidden: int) -> Shapes:
    """Return the shapes of the norm, the router, the biases of experts, and the shared expert with its own gate."""
    shapes: Shapes = {"experts_norm": (hidden,)}
    experts = layer.experts
    if experts.count and experts.router.scoring != "uniform":
        shapes["router"] = (experts.count, hidden)
    if experts.count and experts.router.norm_scale:
        shapes["router_norm"] = (hidden,)
    if experts.count and experts.router.has_bias:
        shapes["router_bias"] = (experts.count,)
    if experts.count and experts.has_bias:
        shapes["experts_gate_bias"] = shapes["experts_up_bias"] = (experts.count * experts.width,)
        shapes["experts_down_bias"] = (experts.count * hidden,)
    if layer.shared is not None:
        if "gate" in experts.projections:
            shapes["shared_gate"] = (layer.shared.width, hidden)
        shapes["shared_up"] = (layer.shared.width, hidden)
        shapes["shared_down"] = (hidden, layer.shared.width)
        if layer.shared.has_gate:
            shapes["shared_router"] = (1, hidden)
        if layer.shared.has_norms:
            shapes["shared_norm"] = shapes["shared_after_norm"] = shapes["routed_after_norm"] = (hidden,)
    if layer.norms_after:
        shapes["experts_after_norm"] = (hidden,)
    return shapes


@dataclass(frozen=True, slots=True)
class StaticRouting:
    """Experts that depend on the token alone.

    experts: top_k experts of each token id, best first; those of token t start at t * top_k.
    Source: Hash Layers For Large Sparse Models, section 3.
    """

    experts: tuple[int, ...]

    def check(self, count: int, top_k: int) -> None:
        """Raise ValueError unless this is a whole number of tokens, each with top_k different experts of `count`."""
        require(bool(self.experts) and len(self.experts) % max(top_k, 1) == 0, f"static: expected {top_k} per token")
        is_known = min(self.experts) >= 0 and max(self.experts) < count
        require(is_known, f"static: expected experts from 0 to {count - 1}")
        tokens = zip(*(self.experts[rank::top_k] for rank in range(top_k)), strict=True)
        require(all(len(set(chosen)) == top_k for chosen in tokens), "static: a token names an expert twice")


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Rule from router logits to experts and weights: scores of all experts, top-k, normalisation, scale.

    scoring: how logits become scores, see below.
    renormalize: whether the weights of the chosen experts are divided by their sum.
    scale: factor of the weights.
    correction: numbers added to the scores for the choice, not for the weights; empty for none.
    corrects_logits: the choice is by logits with the correction, not by scores with it.
    groups: number of groups of consecutive experts. The top-k experts come from the best kept_groups groups.
    group_score: a group is rated by its best expert (`max`) or its best two (`top2`).
    has_bias: whether a bias is added to the logits.
    capacity: in an encoder, most tokens of a sequence that an expert computes; later tokens skip it. 0 for no limit.
    margin: see sparsemixer.
    static: experts chosen by the token alone; scores only weigh them.
    norm_scale: the router reads the residual stream by an RMS norm of its own, whose weights have this factor; 0: it
        reads what the experts read.
    expert_scales: factor of the weight of each expert after all else; empty for none.
    least_sum: number added to the sum of the weights before they are divided by it; 0 for 1e-20.

    Scoring `uniform`: there is no router, and all chosen experts have equal weights. It is for static routing.
    Scoring `sparsemixer`: the two largest logits are chosen one after the other. Each is weighed by a softmax over the
    remaining logits x near the largest remaining logit m: (m - x) / max(|x|, m) <= margin. No other field applies.
    Source of capacity: Switch Transformers, section 2.2.
    Source of sparsemixer: GRIN, SparseMixer-v2.
    """

    scoring: Literal["softmax", "sigmoid", "sparsemixer", "uniform"]
    renormalize: bool
    scale: float = 1.0
    correction: tuple[float, ...] = ()
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False
    capacity: int = field(default=0, metadata=OPTIONAL)
    margin: float = field(default=0.0, metadata=OPTIONAL)
    static: StaticRouting | None = field(default=None, metadata=OPTIONAL)
    corrects_logits: bool = field(default=False, metadata=OPTIONAL)
    least_sum: float = field(default=0.0, metadata=OPTIONAL)
    norm_scale: float = field(default=0.0, metadata=OPTIONAL)
    expert_scales: tuple[float, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(0 < self.scale <= 1e4, f"router scale out of range: {self.scale}")
        require(0 < self.kept_groups <= self.groups <= MAX_EXPERTS, "kept_groups must be 1 to groups")
        require(all(abs(c) <= 1e4 for c in self.correction), "correction: expected numbers of at most 10,000")
        require(0 <= self.capacity <= MAX_POSITIONS, f"capacity out of range: {self.capacity}")
        require(0 <= self.margin <= 1e4, f"margin out of range: {self.margin}")
        is_summed = self.renormalize and self.scoring == "sigmoid"
        fits = 0 <= self.least_sum <= 1 and (is_summed or not self.least_sum)
        require(fits, "least_sum is at most 1, and for sigmoids that are renormalized")
        require(0 <= self.norm_scale <= 1e4, f"norm_scale out of range: {self.norm_scale}")
        require(all(abs(scale) <= 1e4 for scale in self.expert_scales), "expert_scales: expected at most 10,000 each")
        if self.scoring == "sparsemixer":
            others = self.correction or self.groups != 1 or self.has_bias or self.capacity or self.static
            require(not (self.renormalize or self.scale != 1 or others), "sparsemixer takes logits and margin only")
        else:
            require(self.margin == 0, "margin is for sparsemixer")
        if self.static is not None:
            chooses = self.correction or self.groups != 1 or self.capacity
            require(not chooses, "static routing has no correction, groups, capacity")
        if self.corrects_logits:
            is_alone = self.scoring == "sigmoid" and self.groups == 1
            require(
                bool(self.correction) and is_alone, "corrects_logits is for sigmoids with a correction, without groups"
            )
        if self.scoring == "uniform":
            is_bare = self.static is not None and not self.renormalize and not self.has_bias
            require(is_bare, "uniform is for static routing, without renormalizing and bias")

    @property
    def is_by_logits(self) -> bool:
        """True if the order of the logits alone decides the choice.

        Then an expert with a logit of -inf is never chosen.
        """
        is_alone = not self.correction and self.groups == 1 and self.static is None and not self.capacity
        return is_alone and self.scoring in ("softmax", "sigmoid")

    @property
    def is_plain(self) -> bool:
        """True if scoring is softmax alone, so that scores have the order of the logits."""
        return self.scoring == "softmax" and not self.correction and self.groups == 1 and self.static is None

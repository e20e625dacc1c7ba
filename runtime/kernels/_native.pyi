"""Types of the C++ extension. Meanings, shapes and errors of each function: `reference`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .packed_matrix import Bytes, Floats, Int32s, Int64s

Doubles = NDArray[np.float64]

class PackedMatrix:
    """A weight matrix. Keeps a reference to data.

    bitwidth: 243 for three values.
    float_type: 0 none, 1 bfloat16, 2 float16, 3 mxfp4.
    """

    def __init__(
        self,
        data: Bytes,
        rows: int,
        columns: int,
        bitwidth: int,
        group_size: int,
        symmetric: bool,
        float_type: int,
        byte_scales: bool,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    def move_to(self, data: Bytes) -> None: ...

class Expert:
    """The projections of one expert.

    activation: 0 silu, 1 clamped SwiGLU, 2 ReLU, which has no gate, 3 GELU.
    limit: of clamped SwiGLU.
    biases: none, or those of gate, up and down.
    reads_bfloats: bfloat16 matrices read activations rounded to bfloat16, by the kernels that are active now.
    """

    def __init__(
        self,
        gate: PackedMatrix | None,
        up: PackedMatrix,
        down: PackedMatrix,
        activation: int = 0,
        limit: float = 0.0,
        biases: list[Floats] = ...,
        reads_bfloats: bool = False,
    ) -> None: ...
    def follow_matrices(self) -> None: ...

class AttentionLayer:
    """Weights of grouped attention. Fields: kernels.AttentionLayer. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None, Floats | None],
        norm_eps: float,
        matrices: tuple[PackedMatrix | None, ...],
        biases: tuple[Floats | None, ...],
        head_norms: tuple[Floats | None, ...],
        head_norm_eps: float,
        rotation: tuple[Floats, Floats] | None,
        interleaved: bool,
        kv_heads: int,
        head_size: int,
        scale: float,
        window: int,
        sinks: Floats | None,
        distance_bias: Floats | None,
        gate: PackedMatrix | None,
        gate_function: str,
        value_norm: Floats | None,
        residual_scale: float,
    ) -> None: ...
    def attend(
        self,
        hidden: Floats,
        k_cache: Floats,
        v_cache: Floats,
        slots: Int32s,
        positions: Int32s,
        ends: Int32s | None = None,
    ) -> None: ...

class LatentLayer:
    """Weights of latent attention. Fields: kernels.LatentLayer. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None, Floats | None],
        norm_eps: float,
        query_down: PackedMatrix | None,
        query: PackedMatrix,
        latent_down: PackedMatrix,
        inner_norms: tuple[Floats | None, Floats],
        inner_norm_eps: float,
        key_up: tuple[PackedMatrix, ...],
        value_up: tuple[PackedMatrix, ...],
        output: PackedMatrix,
        rotation: tuple[Floats, Floats],
        interleaved: bool,
        scale: float,
        residual_scale: float,
    ) -> None: ...
    def attend(
        self,
        hidden: Floats,
        k_cache: Floats,
        v_cache: Floats,
        slots: Int32s,
        positions: Int32s,
        ends: Int32s | None = None,
    ) -> None: ...

class ConvolutionLayer:
    """Weights of a short convolution. Fields: kernels.ConvolutionLayer. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None, Floats | None],
        norm_eps: float,
        input: PackedMatrix,
        taps: Floats,
        output: PackedMatrix,
        residual_scale: float,
    ) -> None: ...
    def mix(
        self, hidden: Floats, live: Floats, kept: Floats, kept_at: Int32s, slots: Int32s, positions: Int32s
    ) -> None: ...

class DeltaLayer:
    """Weights of the gated delta rule. Fields: kernels.DeltaLayer. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None, Floats | None],
        norm_eps: float,
        matrices: tuple[PackedMatrix, ...],
        taps: Floats,
        decay_rate: Floats,
        step_bias: Floats,
        length_scales: tuple[Floats, Floats],
        output_norm: Floats,
        output_norm_eps: float,
        key_heads: int,
        value_heads: int,
        residual_scale: float,
    ) -> None: ...
    def mix(
        self,
        hidden: Floats,
        live_rows: Floats,
        kept_rows: Floats,
        live: Floats,
        kept: Floats,
        kept_at: Int32s,
        slots: Int32s,
        positions: Int32s,
    ) -> None: ...

def available() -> tuple[str, ...]: ...
def active() -> str: ...
def select(name: str) -> None: ...
def bfloat_kernels() -> str:
    """Return the name of the products with bfloat16 activations of the active kernels; empty if they have none."""

def set_threads(count: int) -> None: ...
def linears(matrices: list[PackedMatrix], x: Floats, outs: list[Floats]) -> None: ...
def linear_of_bfloats(matrix: PackedMatrix, x: Floats, out: Floats) -> None: ...
def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None: ...
def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None: ...
def experts_of_token(experts: list[Expert], x: Floats, ranks: Int32s, out: Floats) -> None: ...
def combine(parts: Floats, weights: Floats, out: Floats) -> None: ...
def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None: ...
def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None: ...
def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s, interleaved: bool = False) -> None: ...
def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None: ...
def attention(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    slots: Int32s,
    positions: Int32s,
    scale: float,
    window: int,
    out: Floats,
    sinks: Floats | None = None,
    ends: Int32s | None = None,
    bias: Floats | None = None,
) -> None: ...
def route(logits: Floats, renormalize: bool, experts: Int32s, weights: Floats) -> None: ...
def router_shares(
    matrices: list[PackedMatrix],
    norms: list[Floats],
    eps: float,
    x: Floats,
    out: Floats,
    biases: list[Floats | None] = ...,
) -> None: ...
def exp(x: Floats, out: Floats) -> None:
    """Compute out[i] = exp(x[i]), [n] each, with the exponential that attention, routing and silu use."""

def largest(values: Floats, count: int) -> tuple[list[int], list[float]]: ...

# Steps of a quantizer. Meanings and shapes: compiler/quantization/quantizers/column_steps.py and rtn.py. Matrices are
# stored column by column: [K, N], with grids [G, N].
def search_ranges(
    weights: Floats,
    importance: Floats,
    factors: Floats,
    largest: float,
    centre: float,
    symmetric: bool,
    ternary: bool,
    scales: Floats,
    minima: Floats,
) -> None:
    """Find the range of each group. factors: smaller ranges to try, over the whole one; ternary: they are not read."""

def nearest_codes(weights: Floats, scales: Floats, minima: Floats, largest: float, codes: Bytes) -> None: ...
def differences(
    weights: Floats,
    codes: Bytes,
    scales: Floats,
    minima: Floats,
    places: Int64s | None,
    out: Floats | None,
    squares: Doubles,
) -> None: ...
def code_sums(products: Floats, codes: Bytes, centre: float, sums: Floats) -> None: ...
def round_columns(
    work: Floats,
    factor: Floats,
    order: Int64s,
    scales: Floats,
    inverses: Floats,
    minima: Floats,
    largest: Bytes,
    begin: int,
    end: int,
    codes: Bytes,
    squares: Doubles,
) -> None: ...
def code_systems(codes: Bytes, centre: float, moment: Floats, sums: Floats, first: int, systems: Floats) -> None: ...
def multiply_systems(systems: Floats, x: Floats, out: Floats) -> None: ...
def solve_systems(systems: Floats, diagonal: Floats, right: Floats) -> None: ...
def watch_mapping(address: int, size_bytes: int) -> int:
    """Map zeros instead of raising SIGBUS when a page of a mapped file is missing.

    address, size_bytes: whole pages of the mapping.
    Returns the number of the watch, or -1 if this system cannot do that.
    """

def has_faulted(watch: int) -> bool:
    """Return whether a page of a watched mapping was missing."""

def first_changed(files: Int64s) -> int:
    """Return the first file that has changed since it was mapped, or that had a missing page; -1: none.

    files: int64 [n, 5]. Per file its watch, its descriptor, its size in bytes, and two times of change in ns.
    """

def forget_mapping(watch: int) -> None:
    """Stop watching a mapping. Call it before the mapping ends."""

Takes = Literal["any", "demand", "advice"]

class Eviction:
    """What an eviction policy goes by.

    policy: a name in runtime/expert_cache/policies.py.
    weights: of recency, uses, uses at high precision and nearness of the layer, for HOBBIT's score.
    frequency: share of its layer's tokens that chose each expert in calibration.
    high: per expert the index of its high version.
    num_layers, encoder_layers: all layers, and those of an encoder, which come first.
    """

    def __init__(
        self,
        policy: str,
        weights: list[float],
        frequency: list[float],
        high: list[int],
        num_layers: int,
        encoder_layers: int = 0,
    ) -> None: ...

class ExpertCache:
    """The expert cache: decisions as in residency.py and eviction.py of runtime/expert_cache/, reader threads, callers.

    arrays: written by the cache, [N] each unless noted.
    - uint8: `state`, `is_leased`, `is_ahead`, `is_seen`.
    - int64: `last_used`, `uses`, `prefetches` [2, N], `counts` (the fields of CacheStats).
    - float64: `heat`.

    sizes: bytes per expert.
    layers: layer per expert.
    next_in_file: per expert the one whose bytes follow in the file, or -1.

    half_life: in requests of a layer.
    eviction: what the eviction policy goes by.
    sources: one tuple per expert. File descriptor, offset, size, Expert or None, and where gate, up and down begin.
    A gate of -1: the expert has none.
    drops_pages: drop read pages from the page cache after every read.
    mapped: empty, or one tuple per expert if files are mapped. Address and size of its whole pages, number of the watch
    of their mapping, and address of the expert.
    most_queued: reads ahead that are queued at once; 0: all that fit.
    Raises ValueError.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        sizes: list[int],
        layers: list[int],
        next_in_file: list[int],
        readers: int,
        max_run_bytes: int,
        half_life: float,
        eviction: Eviction,
        capacity_bytes: int,
        pin_limit_bytes: int,
        sources: list[tuple[int, int, int, Expert | None, int, int, int]],
        drops_pages: bool,
        mapped: list[tuple[int, int, int, int]] = ...,
        most_queued: int = 0,
    ) -> None: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def pin_limit_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def demand(self) -> list[int]: ...
    @property
    def advice(self) -> list[int]: ...
    # Single decisions, as in Residency, without a lock: for one thread.
    def request(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]: ...
    def queue_and_lease(self, waiting: Sequence[int]) -> None: ...
    def advise(self, indices: Sequence[int]) -> None: ...
    def next_read(self, takes: Takes = "any") -> list[int]: ...
    def arrive(self, index: int) -> None: ...
    def fail_read(self, index: int) -> None: ...
    # The cache, with its lock. None: closed.
    def request_and_queue(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]] | None: ...
    def wait(
        self, remaining: Sequence[int], together: bool
    ) -> tuple[Literal["ready", "again", "failed", "too large", "closed"], list[int]]: ...
    def unlease(self, indices: Sequence[int]) -> None: ...
    def begin_sequence(self) -> None: ...
    def prefetch(self, indices: Sequence[int]) -> None: ...
    def warm(self, indices: Sequence[int]) -> None: ...
    def wait_warmed(self) -> bool: ...
    def resize(self, capacity_bytes: int, pin_limit_bytes: int) -> bool: ...
    def has_work(self) -> bool: ...
    # Used bytes as counted, and as the sum over all states.
    def audit(self) -> tuple[int, int]: ...
    # Changes since the last call: (old, new) experts of a place, and experts whose places are free.
    def take_places(self) -> tuple[list[tuple[int, int]], list[int]]: ...
    def place(self, index: int, address: int) -> None: ...
    # The loop of a reader thread, until `close`. load and check return the failed experts of a run, and never raise.
    def serve(
        self,
        load: Callable[[list[int]], list[int]],
        check: Callable[[list[int], list[int]], list[int]] | None,
        takes: Takes = "any",
    ) -> None: ...
    def close(self) -> None: ...

class LogicalCache:
    """The experts that would be in memory if every read took no time.

    The specification is runtime/modes/logical_cache.py.

    sizes, layers, heat: bytes, layer and first heat of each expert.
    The other parameters are those of ExpertCache. Raises ValueError.
    """

    def __init__(
        self,
        sizes: list[int],
        layers: list[int],
        heat: list[float],
        half_life: float,
        eviction: Eviction,
        capacity_bytes: int,
        pin_limit_bytes: int,
        max_run_bytes: int,
    ) -> None: ...
    def fill(self, indices: Sequence[int]) -> None: ...
    def is_resident(self, index: int) -> bool: ...
    # Request experts of a layer, then read ahead. Returns an expert that does not fit, or -1.
    def serve(self, layer: int, experts: Sequence[int], ahead: Sequence[int]) -> int: ...
    def read_ahead(self, indices: Sequence[int]) -> None: ...
    def begin_sequence(self) -> None: ...
    @property
    def bytes_read(self) -> int: ...

class ExpertLayers:
    """The experts of every layer for the tokens of a pass, read from a cache.

    The specification is `Model._experts_layer` in runtime/model/forward.py.

    layers: one dictionary per layer, with these keys:
    - `experts_norm`: float32 [D]; `norm_eps`; `norm_bias`: float32 [D] of a layer norm, or None. Or None: weights of
      RMS norms, float32 [D]: `experts_after_norm` of the sum; `router_norm`, `shared_norm` before the router and the
      shared expert; `routed_after_norm`, `shared_after_norm` of the two outputs.
    - `router`: PackedMatrix or None; `router_bias`: float32 [E] or None.
    - `rule`: None for a plain softmax, else eight values. They are the scoring (`softmax`, `sigmoid`, `sparsemixer`),
      the correction or None, the number of groups, how many are kept, whether the best two rate a group, the margin,
      whether logits are corrected, and what is added to the sum of the weights.
    - `shared`: Expert or None; `shared_router`: PackedMatrix [1, D] or None.
    - `layer`, `first_expert`, `top_k`, `renormalizes`, `weight_scale`, `residual_scale`, `stream_scale`.
    - `capacity`: tokens of a sequence that an expert computes in a pass; 0: all.
    - `expert_scales`: float32 [E] or None.
    - `experts`: one Expert per row of the router; None for one that is left out.
    - `low_experts`: with lossy modes the low version of each, or None; else empty.
    - `ahead`: later layers to predict, nearest first, one tuple each.

    A tuple of `ahead` has fourteen values:
    - How many layers route up to this one; its number, its first expert and its number of experts.
    - For a pass of the model's own, with big-little also for the little model and for tokens computed again: the top_k;
      the experts to read ahead for one token, -1 for as many as learned thresholds say; the most of them that count as
      predicted; the experts to read ahead for each of several tokens.
    - Whether a missing one ends the advice.
    - Its router, norm, bias, bias of the norm, and rule, the last three or None; or None five times, if there is no
      router to compute.
    - The layer whose experts predict it by paths, and the one before that; -1 for none.
    - Experts that are predicted without a router and a known path, and their scores.

    size: D.
    ahead_eps: epsilon of the norms before routers of later layers.
    rules: RULES of runtime/prefetch/read_ahead_margins.py; `most_tokens` of a pass; `choices_for_all`, from which a
        pass counts as one that needs all experts; `first_decoder`, the first layer after those of an encoder.
    paths: None, or the arrays of PathTables by name and `least_count`, the uses from which a path counts.
    lossy: None, or the lossy modes that decide, as in NativeModes of runtime/model/one_call.py.
    Raises ValueError.
    """

    def __init__(
        self,
        reads: ExpertCache,
        layers: list[dict[str, Any]],
        size: int,
        ahead_eps: float,
        rules: dict[str, float],
        paths: dict[str, Any] | None = None,
        lossy: dict[str, Any] | None = None,
    ) -> None: ...
    # Whether a layer is being computed. Then all other calls raise ValueError.
    @property
    def is_running(self) -> bool: ...
    # See kernels.experts_layer.
    def run(
        self, at: int, hidden: np.ndarray, sequences: int = 1, slots: np.ndarray | None = None
    ) -> tuple[str, int, int, int, int, int, int]: ...
    # foretold: by layer, the logits [T, E] of the pass that is computed again.
    def begin_pass(
        self,
        kind: Literal["exact", "prompt", "all", "little", "again"] = "exact",
        foretold: dict[int, np.ndarray] = ...,
    ) -> None: ...
    # Decisions of lossy modes since the last call: PASS_COUNTS of runtime/modes/mode_counts.py.
    def take_counts(self) -> tuple[float, ...]: ...
    def end_pass(self) -> None: ...
    def forget_guesses(self) -> None: ...
    def threshold(self, running: int, layer: int) -> float: ...
    # Results of the layer that ran last: experts of the tokens, T x K; experts to prefetch; float32 [T, E]; of one
    # token float32 [M, E], and float64 [E] or nothing.
    @property
    def chosen(self) -> list[int]: ...
    @property
    def advice(self) -> list[int]: ...
    @property
    def logits(self) -> bytes: ...
    @property
    def shares(self) -> bytes: ...
    @property
    def path_shares(self) -> bytes: ...

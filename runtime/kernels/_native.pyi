"""The C++ extension. Meanings, shapes and errors: `reference`, function by function."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from .packed_matrix import Bytes, Floats, Int32s, Int64s

class PackedMatrix:
    """bitwidth: 243 for three values. float_type: 0 none, 1 bfloat16, 2 float16, 3 mxfp4. Keeps a reference to data."""

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
    """activation: 0 silu, 1 clamped SwiGLU with its limit, 2 ReLU, which has no gate.

    biases: none, or those of gate, up and down.
    """

    def __init__(
        self,
        gate: PackedMatrix | None,
        up: PackedMatrix,
        down: PackedMatrix,
        activation: int = 0,
        limit: float = 0.0,
        biases: list[Floats] = ...,
    ) -> None: ...
    def follow_matrices(self) -> None: ...

class AttentionLayer:
    """What kernels.AttentionLayer describes. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None],
        norm_eps: float,
        matrices: tuple[PackedMatrix, ...],
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
    """What kernels.LatentLayer describes. Keeps references."""

    def __init__(
        self,
        norm: tuple[Floats, Floats | None],
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

def available() -> tuple[str, ...]: ...
def active() -> str: ...
def select(name: str) -> None: ...
def set_threads(count: int) -> None: ...
def linears(matrices: list[PackedMatrix], x: Floats, outs: list[Floats]) -> None: ...
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
    """out[i] = exp(x[i]), [n] each: the exponential that attention, routes and silu are made of."""

def largest(values: Floats, count: int) -> tuple[list[int], list[float]]: ...
def watch_mapping(address: int, size_bytes: int) -> int:
    """Put zeros where pages of a mapped file are missing, instead of SIGBUS. Returns a number; -1: not on this system.

    address: of whole pages, as `size_bytes`.
    """

def has_faulted(watch: int) -> bool:
    """Whether a page of a watched mapping was missing."""

def first_changed(files: Int64s) -> int:
    """The first file that has changed since it was mapped, or of which a page was missing; -1: none.

    files: int64 [n, 5], watch, descriptor and identity (size, bytes; times of change, ns) of each.
    """

def forget_mapping(watch: int) -> None:
    """Stop watching, before the mapping ends."""

class ExpertReads:
    """The expert cache: what runtime/expert_cache/residency.py decides, threads that read, callers that wait.

    arrays: written here, [N] each: state, is_leased, is_ahead, is_seen, uint8; last_used, uses, int64; heat, float64;
    prefetches, int64 [2, N]; counts, int64, the fields of CacheStats. sizes, layers, following: per expert; following:
    the one whose bytes lie behind, or -1. half_life: in acquisitions. policy: lrfu, lru or lfu. sources: per expert
    its file's descriptor, offset and size there, the Expert or None, and where gate (-1: none), up and down begin.
    drops_pages: of the page cache, behind every read. Raises ValueError.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        sizes: list[int],
        layers: list[int],
        following: list[int],
        readers: int,
        max_run_bytes: int,
        half_life: float,
        policy: str,
        capacity_bytes: int,
        pin_limit_bytes: int,
        sources: list[tuple[int, int, int, Expert | None, int, int, int]],
        drops_pages: bool,
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
    # Decisions one by one, as of Residency, without a lock: for one thread.
    def ask(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]: ...
    def issue(self, waiting: Sequence[int]) -> None: ...
    def advise(self, indices: Sequence[int]) -> None: ...
    def next_read(self) -> list[int]: ...
    def arrive(self, index: int) -> None: ...
    def withdraw(self, index: int) -> None: ...
    # The cache. None: closed.
    def begin(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]] | None: ...
    def wait(
        self, remaining: Sequence[int], together: bool
    ) -> tuple[Literal["ready", "again", "failed", "too large", "closed"], list[int]]: ...
    def unlease(self, indices: Sequence[int]) -> None: ...
    def prefetch(self, indices: Sequence[int]) -> None: ...
    def warm(self, indices: Sequence[int]) -> None: ...
    def wait_warmed(self) -> bool: ...
    def resize(self, capacity_bytes: int, pin_limit_bytes: int) -> bool: ...
    def has_work(self) -> bool: ...
    # Bytes as counted, and as the states add them up.
    def audit(self) -> tuple[int, int]: ...
    # {of, by} of places that went from one expert to another, and experts whose places are free; each told once.
    def take_places(self) -> tuple[list[tuple[int, int]], list[int]]: ...
    def place(self, index: int, address: int) -> None: ...
    # A reader thread, until `close`. Both return which of a run failed, and raise nothing.
    def serve(
        self, load: Callable[[list[int]], list[int]], check: Callable[[list[int], list[int]], list[int]] | None
    ) -> None: ...
    def close(self) -> None: ...

class ExpertLayers:
    """The routed experts of every layer for one token, out of a cache.

    The specification is `Model._experts_layer` of runtime/model/forward.py.

    layers: of each norm, float32 [D], norm_eps, router or None, shared or None, layer, first_expert, top_k,
    renormalizes, weight_scale, residual_scale, experts, one per row of the router, and ahead, nearest first: of layers
    that are looked at, how many route up to it, its number, first expert and top_k, its router and norm, [] and []; or
    None and None where no router can be asked, and what is always likely with its scores. size: D. ahead_eps: of all
    those norms. rules: the constants of runtime/prefetch/margins.py. Raises ValueError.
    """

    def __init__(
        self, reads: ExpertReads, layers: list[dict[str, Any]], size: int, ahead_eps: float, rules: dict[str, float]
    ) -> None: ...
    # Whether one of its layers is being computed; nothing else may be asked then.
    @property
    def is_running(self) -> bool: ...
    # See kernels.experts_layer.
    def run(self, at: int, hidden: np.ndarray) -> tuple[str, int, int, int, int, int]: ...
    def begin_pass(self) -> None: ...
    def forget_guesses(self) -> None: ...
    def margin(self, running: int, layer: int, rank: int) -> float: ...
    # Of the layer that ran last: experts, what was to be read ahead, float32 [E], float32 [M, E].
    @property
    def chosen(self) -> list[int]: ...
    @property
    def advice(self) -> list[int]: ...
    @property
    def logits(self) -> bytes: ...
    @property
    def shares(self) -> bytes: ...

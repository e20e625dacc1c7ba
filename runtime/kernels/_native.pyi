"""The C++ extension. Meanings, shapes and errors: `reference`, function by function."""

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
def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s) -> None: ...
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
def router_shares(matrices: list[PackedMatrix], norms: list[Floats], eps: float, x: Floats, out: Floats) -> None: ...
def exp(x: Floats, out: Floats) -> None:
    """out[i] = exp(x[i]), [n] each: the exponential that attention, routes and silu are made of."""

"""Layers whose memory of earlier tokens has a fixed size: short convolutions, and the gated delta rule.

Shape letters: D hidden, K taps, Hk and Hv heads of keys and values, Dk and Dv their sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .attention import Shapes, require

STATE_COLUMNS = 16
"""Features of a value whose states lie together. The size of a value is a multiple of it."""


def _check_taps(taps: int) -> None:
    require(2 <= taps <= 16, f"taps must be 2 to 16, found {taps}")


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A causal convolution of each feature by itself, between two gates: output(c * convolution(b * x)).

    b, c and x are the thirds of one product with the normed stream.
    taps: number of positions that a result sees, its own included.
    Source: LFM2 Technical Report, section 2.
    """

    taps: int

    def __post_init__(self) -> None:
        _check_taps(self.taps)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the weights of one layer, with the norm before it. Taps are [D, K], flat."""
        return {
            "attention_norm": (hidden,),
            "input": (3 * hidden, hidden),
            "taps": (hidden * self.taps,),
            "output": (hidden, hidden),
        }

    def state_shapes(self, hidden: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the state of one sequence: the inputs of the convolution that later tokens see."""
        return ((self.taps - 1, hidden),)

    def scratch_numbers(self, hidden: int) -> int:
        """Return the numbers of working memory for each token, in addition to the normed stream."""
        return 5 * hidden


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention with a state S per head, [Dk, Dv], by the gated delta rule.

    S decays by e^(-rate softplus(step + step_bias)), and then S += k (v - k S) * sigmoid(learning rate); the output is
    q S. Queries, keys and values first pass a causal convolution and SiLU. Queries and keys then have length one, and
    queries are divided by sqrt(Dk). The output passes an RMS norm per head and is multiplied by SiLU of a gate.
    key_heads, value_heads: a head of keys serves value_heads / key_heads heads of values.
    taps: of the convolution.
    norm_eps: of the norm of the output.
    log_rates: logarithm of the rate of each value head, exactly as on disk.
    step_biases: of each value head, exactly as on disk.
    Source: Gated Delta Networks, section 3.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    norm_eps: float
    log_rates: tuple[float, ...]
    step_biases: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_taps(self.taps)
        for name, heads in (("key_heads", self.key_heads), ("value_heads", self.value_heads)):
            require(0 < heads <= 4096, f"{name} must be 1 to 4096, found {heads}")
        require(self.value_heads % self.key_heads == 0, "key_heads must divide value_heads")
        require(0 < self.key_size <= 4096, f"key_size out of range: {self.key_size}")
        whole = self.value_size % STATE_COLUMNS == 0
        require(
            0 < self.value_size <= 4096 and whole,
            f"value_size must be a multiple of {STATE_COLUMNS} up to 4096, found {self.value_size}",
        )
        require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        for name, numbers in (("log_rates", self.log_rates), ("step_biases", self.step_biases)):
            fits = len(numbers) == self.value_heads and all(abs(number) <= 80 for number in numbers)
            require(fits, f"{name}: expected {self.value_heads} numbers from -80 to 80")

    @property
    def features(self) -> int:
        """Features that pass the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the weights of one layer, with the norm before it.

        output_gate: the gate of the output. rate: the learning rate. step: the step of the decay.
        taps: [features, K], flat.
        """
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return {
            "attention_norm": (hidden,),
            "query": (keys, hidden),
            "key": (keys, hidden),
            "value": (values, hidden),
            "output_gate": (values, hidden),
            "rate": (self.value_heads, hidden),
            "step": (self.value_heads, hidden),
            "taps": (self.features * self.taps,),
            "output_norm": (self.value_size,),
            "output": (hidden, values),
        }

    def state_shapes(self, hidden: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the state of one sequence: inputs of the convolution, and S in blocks of its columns."""
        blocks = self.value_size // STATE_COLUMNS
        return (
            (self.taps - 1, self.features),
            (self.value_heads, blocks * self.key_size, STATE_COLUMNS),
        )

    def scratch_numbers(self, hidden: int) -> int:
        """Return the numbers of working memory for each token, in addition to the normed stream."""
        return 2 * self.features + 2 * self.value_heads * self.value_size + 2 * self.value_heads


RecurrentSpec = ConvolutionSpec | DeltaSpec


def state_bytes(spec: RecurrentSpec, hidden: int) -> int:
    """Return the bytes of the float32 state of one sequence in one layer."""
    return 4 * sum(math.prod(shape) for shape in spec.state_shapes(hidden))

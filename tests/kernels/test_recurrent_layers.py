"""Layers with a recurrent state: the values of their specification, and bits that depend on a token's past alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.conftest import need
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, matrix_of

HIDDEN, SLOTS = 64, 3
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 17, 32
FEATURES = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
TEXT = 40


def matrix(rows: int, columns: int, seed: int) -> kernels.PackedMatrix:
    return matrix_of(random_matrix(rows, columns, QuantSpec.parse("q8g32s"), seed))


def convolution(tap_count: int = 3, **more: Any) -> kernels.ConvolutionLayer:
    fields: dict[str, Any] = {
        "norm": 1 + inputs(1, HIDDEN, 2)[0] / 4, "norm_eps": 1e-5, "input": matrix(3 * HIDDEN, HIDDEN, 3),
        "taps": inputs(tap_count, HIDDEN, 4), "output": matrix(HIDDEN, HIDDEN, 5),
    }  # fmt: skip
    return kernels.ConvolutionLayer(**{**fields, **more})


def delta(**more: Any) -> kernels.DeltaLayer:
    keys, values = KEY_HEADS * KEY_SIZE, VALUE_HEADS * VALUE_SIZE
    rows = (keys, keys, values, values, VALUE_HEADS, VALUE_HEADS)
    matrices = (*(matrix(count, HIDDEN, 10 + at) for at, count in enumerate(rows)), matrix_of(
        random_matrix(HIDDEN, values, QuantSpec.parse("bf16"), 20)))  # fmt: skip
    fields: dict[str, Any] = {
        "norm": 1 + inputs(1, HIDDEN, 2)[0] / 4, "norm_eps": 1e-5, "matrices": matrices, "taps": inputs(4, FEATURES, 4),
        "decay_rate": np.abs(inputs(1, VALUE_HEADS, 5)[0]), "step_bias": inputs(1, VALUE_HEADS, 6)[0],
        "length_scales": (np.full(KEY_SIZE, 1 / KEY_SIZE, np.float32), np.full(KEY_SIZE, KEY_SIZE**-0.5, np.float32)),
        "output_norm": 1 + inputs(1, VALUE_SIZE, 7)[0] / 4, "output_norm_eps": 1e-6, "key_heads": KEY_HEADS,
        "value_heads": VALUE_HEADS,
    }  # fmt: skip
    return kernels.DeltaLayer(**{**fields, **more})


Layer = kernels.ConvolutionLayer | kernels.DeltaLayer
LAYERS = {
    "convolution": convolution,
    "long convolution": lambda: convolution(6, after_norm=1 + inputs(1, HIDDEN, 8)[0] / 4, residual_scale=0.3),
    "delta": delta,
    "delta, layer norm": lambda: delta(norm_bias=inputs(1, HIDDEN, 9)[0], residual_scale=0.5),
}


class State:
    """State arrays of all slots, zeros at first."""

    def __init__(self, layer: Layer) -> None:
        if isinstance(layer, kernels.ConvolutionLayer):
            shapes = [(SLOTS, len(layer.taps) - 1, HIDDEN)]
        else:
            blocks = VALUE_SIZE // 16 * KEY_SIZE
            shapes = [(SLOTS, len(layer.taps) - 1, FEATURES), (SLOTS, VALUE_HEADS, blocks, 16)]
        self.live = [np.zeros(shape, np.float32) for shape in shapes]
        self.kept = [np.zeros(shape, np.float32) for shape in shapes]
        self.kept_at = np.zeros(SLOTS, np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        parts = [array for pair in zip(self.live, self.kept, strict=True) for array in pair]
        return (*parts, self.kept_at)

    def run(self, layer: Layer, x: np.ndarray, slots: list[int], positions: list[int]) -> np.ndarray:
        hidden = x.copy()
        places = kernels.TokenPlaces(np.array(slots, np.int32), np.array(positions, np.int32))
        kernels.mix(layer, hidden, self.arrays, places)
        return hidden

    def text(self, layer: Layer, x: np.ndarray, cuts: tuple[int, ...], slot: int = 1) -> np.ndarray:
        """Run a text from its beginning, in passes that end at these positions."""
        starts, stops = (0, *cuts), (*cuts, len(x))
        rows = [
            self.run(layer, x[a:b], [slot] * (b - a), list(range(a, b))) for a, b in zip(starts, stops, strict=True)
        ]
        return np.concatenate(rows)


@gate
@pytest.mark.parametrize("name", LAYERS)
def test_the_values_are_those_of_the_specification(name: str, native: str) -> None:
    layer, x = LAYERS[name](), inputs(TEXT, HIDDEN, 1)
    state, expected, own = State(layer), x.copy(), State(layer)
    found = state.text(layer, x, (7, 8))
    slots, positions = np.full(TEXT, 1, np.int32), np.arange(TEXT, dtype=np.int32)
    kernels.select("numpy")
    layer.mix_in_steps(kernels, expected, own.arrays, kernels.TokenPlaces(slots, positions))
    assert np.abs(found - expected).max() <= 3e-5 * np.abs(expected).max()
    for array, other in zip(state.live, own.live, strict=True):
        assert np.abs(array - other).max() <= 3e-5 * np.abs(other).max()


@gate
@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_passes_threads_and_other_texts(name: str, native: str) -> None:
    layer, x = LAYERS[name](), inputs(TEXT, HIDDEN, 1)
    expected = bits(State(layer).text(layer, x, ()))
    for cuts in (tuple(range(1, TEXT)), (1, 2, 19), (37,)):
        for threads in (1, 2):
            kernels.set_threads(threads)
            assert (bits(State(layer).text(layer, x, cuts)) == expected).all()
    state, others = State(layer), inputs(TEXT, HIDDEN, 30)
    state.text(layer, x[:5], (), slot=2)
    state.text(layer, others[:9], (), slot=0)
    rows = np.concatenate([others[9:20], x[5:]])
    mixed = state.run(layer, rows, [0] * 11 + [2] * (TEXT - 5), [*range(9, 20), *range(5, TEXT)])
    assert (bits(mixed[11:]) == expected[5:]).all()


@gate
@pytest.mark.parametrize("name", LAYERS)
def test_instruction_sets_agree(name: str, pair: tuple[str, str]) -> None:
    x, found = inputs(TEXT, HIDDEN, 1), []
    for kernel in pair:
        need(kernel)
        kernels.select(kernel)
        layer = LAYERS[name]()
        state = State(layer)
        found.append([bits(array) for array in (state.text(layer, x, (5, 6)), *state.live)])
    assert all((first == second).all() for first, second in zip(*found, strict=True))


@gate
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kept_at", [1, 6, 7, 20, TEXT])
def test_a_kept_state_is_the_one_of_its_position(name: str, kept_at: int, every: str) -> None:
    layer, x = LAYERS[name](), inputs(TEXT, HIDDEN, 1)
    state, there = State(layer), State(layer)
    state.kept_at[1] = kept_at
    state.text(layer, x, (6,))
    there.text(layer, x[:kept_at], (2,) if kept_at > 2 else ())
    for kept, live in zip(state.kept, there.live, strict=True):
        assert (bits(kept[1]) == bits(live[1])).all()
        assert not kept[0].any() and not kept[2].any()


@pytest.mark.parametrize(
    ("slots", "positions"),
    [([0, 1, 0], [0, 0, 1]), ([0, 0], [1, 3]), ([0, 0], [1, 1]), ([3], [0]), ([0], [-1])],
    ids=["a slot twice", "a gap", "a position twice", "no such slot", "a negative position"],
)
def test_places_that_do_not_follow_each_other_are_refused(slots: list[int], positions: list[int], native: str) -> None:
    layer = convolution()
    with pytest.raises(ValueError, match=r"slots|positions"):
        State(layer).run(layer, inputs(len(slots), HIDDEN, 1), slots, positions)


def test_shapes_that_do_not_fit_are_refused(native: str) -> None:
    for make in (
        lambda: convolution(1),
        lambda: convolution(taps=inputs(3, HIDDEN + 1, 4)),
        lambda: convolution(output=matrix(HIDDEN, 32, 5)),
        lambda: convolution(input=matrix(2 * HIDDEN, HIDDEN, 5)),
        lambda: delta(key_heads=3),
        lambda: delta(value_heads=16),
        lambda: delta(matrices=delta().matrices[:6]),
        lambda: delta(taps=inputs(4, FEATURES - 1, 4)),
        lambda: delta(output_norm=inputs(1, VALUE_SIZE + 1, 7)[0]),
        lambda: delta(decay_rate=inputs(1, VALUE_HEADS + 1, 7)[0]),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()
    layer, state = delta(), State(delta())
    x = inputs(2, HIDDEN, 1)
    places = kernels.TokenPlaces(np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    for wrong in (
        (*state.arrays[:2], *state.arrays[:2], state.kept_at),
        (*state.arrays[:3], state.arrays[2], state.kept_at),
        (*state.arrays[:4], state.kept_at[:2]),
    ):
        with pytest.raises((ValueError, TypeError)):
            kernels.mix(layer, x.copy(), wrong, places)

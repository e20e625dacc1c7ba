"""Triton's kernels compute what torch and numpy compute: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.accelerator.device import COPY_SLOTS
from moec.runtime.accelerator.grouped.triton_check import differs_from_torch, why_no_triton
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.torch_device import TorchDevice
from moec.runtime.accelerator.torch_weights import unpack
from moec.runtime.kernels import reference
from tests.accelerator import experts as experts_on_device
from tests.accelerator.experts import RANKS, TOKENS, computed_by, computed_by_numpy, launched_together
from tests.kernels.packer import FORMATS, bits, random_matrix
from tests.kernels.products import EXPERTS, biases_of, expert_of, inputs

# Each number of bits, and of wide groups each kind: zero points, symmetric codes, byte scales, ternary codes.
IN_CI = ("q1g32", "q2g32s", "q5g32b", "q6", "q8s", "mxfp4", "bf16", "fp16", "q4g64", "q3g128s", "q4g64b", "q1.6g64s")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, in the interpreter


@pytest.fixture(scope="module")
def device() -> torch.device:
    """A GPU, or the CPU with Triton's interpreter; see conftest.py."""
    pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


opened = partial(experts_on_device.opened, has_triton=True)


def formats() -> list[Any]:
    """All formats. Without a GPU most are slow, because every tile of them is interpreted."""
    assert {*IN_CI} <= {*map(str, FORMATS)}
    slow = [] if torch.cuda.is_available() else [pytest.mark.slow]
    return [pytest.param(spec, marks=[] if str(spec) in IN_CI else slow, id=str(spec)) for spec in FORMATS]


@pytest.mark.parametrize("spec", formats())
def test_every_format_unpacks_to_the_bits_of_torch(device: torch.device, spec: QuantSpec) -> None:
    """Rows that do not fill a block, and tiles that do not fill a step, for formats whose groups allow it.

    A row with a single 1 gives a column of the weights. Its products with other weights are 0. Of 384 columns the first
    128 and the last 64 are computed: a whole group, and the end of the last one.
    """
    from moec.runtime.accelerator.grouped.grouped_experts import Jobs, multiply, shape_of

    rows, columns = 17, 192 if spec.fits(192) else 384
    data = torch.from_numpy(random_matrix(rows, columns, spec).data.copy()).to(device)
    pairs = torch.tensor([*range(128), *range(columns - 64, columns)], device=device)
    found = torch.empty((len(pairs), rows), dtype=torch.float32, device=device)
    table = torch.tensor([[data.data_ptr(), 0, first, 64, 0] for first in range(0, len(pairs), 64)], device=device)
    jobs = Jobs(table, 0, len(table), pairs, 64)
    multiply(shape_of(rows, columns, spec), jobs, torch.eye(columns, device=device), found)
    expected = unpack(data, rows, columns, spec)[:, pairs]
    # A weight of -0 comes out as 0
    assert np.array_equal(bits(found.T.cpu().numpy() + 0.0), bits(expected.cpu().numpy() + 0.0))


FORMS = [(32, 64, (text,) * 3) for text in ("q1g32", "q3g32", "q4g32s", "q5g32b", "q6s", "mxfp4", "bf16")]


@pytest.mark.parametrize(("width", "hidden", "texts"), [*FORMS, *EXPERTS], ids=str)
def test_an_expert_computes_what_numpy_computes(
    device: torch.device, width: int, hidden: int, texts: tuple[str, str, str]
) -> None:
    expert, _ = expert_of(width, hidden, texts)
    x = inputs(9, hidden)
    expected, tolerance = computed_by_numpy(expert, x)
    found = computed_by(opened(device, [expert], 1), expert, x, is_kept=True)
    assert np.abs(expected).max() > 0
    assert np.abs(found - expected).max() <= tolerance


@pytest.mark.parametrize("activation", ["relu", "clamped_swiglu"])
@pytest.mark.parametrize("text", ["q4g32", "fp16"])
def test_activations_and_biases(device: torch.device, activation: str, text: str) -> None:
    options: dict[str, Any] = {"activation": activation}
    if activation == "clamped_swiglu":
        options |= {"limit": 1.5, "biases": biases_of(96, 64)}
    expert, _ = expert_of(96, 64, (text,) * 3, **options)
    x = inputs(9, 64)
    expected, tolerance = computed_by_numpy(expert, x)
    assert np.abs(computed_by(opened(device, [expert], 1), expert, x, is_kept=False) - expected).max() <= tolerance


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(
    ("activation", "texts"),
    [("silu", ("q4g32",) * 3), ("relu", ("fp16", "fp16", "q4g32")), ("clamped_swiglu", ("bf16",) * 3)],
)
def test_what_is_no_number_spoils_its_token_alone(
    device: torch.device, value: float, activation: str, texts: tuple[str, str, str]
) -> None:
    """As in the kernels: nothing finite comes of it, and other tokens keep their results."""
    options: dict[str, Any] = {"activation": activation}
    if activation == "clamped_swiglu":
        options |= {"limit": 1.5, "biases": biases_of(32, 32)}
    expert, _ = expert_of(32, 32, texts, **options)
    x = inputs(9, 32)
    plain = computed_by(opened(device, [expert], 1), expert, x, is_kept=True)
    x[TOKENS[0], 5] = value
    expected = np.zeros((9, 2, 32), np.float32)
    with np.errstate(all="ignore"):
        reference.expert_ffn(expert, x, TOKENS, RANKS, expected)
    found = computed_by(opened(device, [expert], 1), expert, x, is_kept=True)
    spoiled = expected[TOKENS[0], RANKS[0]]
    assert np.array_equal(np.isnan(found[TOKENS[0], RANKS[0]]), np.isnan(spoiled))
    assert np.isnan(spoiled).any() or value == np.inf
    assert np.array_equal(found[TOKENS[1:], RANKS[1:]], plain[TOKENS[1:], RANKS[1:]])


def test_a_device_that_cannot_record_computes_all_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.runtime.accelerator.grouped import grouped_experts

    expert, _ = expert_of(32, 32, ("q4g32",) * 3)
    x, chosen = inputs(9, 32), opened(device, [expert], 1)
    kept, tokens = chosen.keep(expert), places((2,), 9)
    expected = layer(chosen, [kept], x, tokens, 32)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(grouped_experts, "Recorder", refuse)
    assert np.array_equal(layer(chosen, [kept], x, tokens, 32), expected)
    assert "no graphs here" in chosen.note
    assert np.array_equal(layer(chosen, [kept], x, tokens, 32), expected)


def test_an_error_in_a_layer_does_not_spoil_the_next(device: torch.device) -> None:
    expert, _ = expert_of(32, 32, ("q4g32",) * 3)
    x, chosen = inputs(9, 32), opened(device, [expert], 1)
    kept, tokens = chosen.keep(expert), places((2,), 9)
    expected = [layer(chosen, [kept], x, tokens, 32) for _ in range(2)][1]
    chosen.begin(x)
    chosen.run(kept, tokens[0], np.zeros_like(tokens[0]))
    chosen.launch()
    with pytest.raises(IndexError):
        chosen.run(kept, tokens[0], np.zeros_like(tokens[0]))
        chosen.launch()
        chosen.collect(np.empty((1, 1, 32), np.float32))
    assert np.array_equal(layer(chosen, [kept], x, tokens, 32), expected)


def test_experts_of_several_formats_are_launched_together(device: torch.device) -> None:
    """Each result is that of the expert alone, bit for bit; there are more copies than slots."""
    texts = ("q2g32", "q4g32", "q8", "bf16", "q3g32", "q4g32")
    assert len(texts) > COPY_SLOTS
    experts = [expert_of(32, 32, (text,) * 3)[0] for text in texts]
    x, chosen = inputs(9, 32), opened(device, experts, 0)
    alone = [computed_by(chosen, expert, x, is_kept=False) for expert in experts]
    together = launched_together(chosen, experts, x)
    for rank, single in enumerate(alone):
        assert np.array_equal(together[TOKENS, rank], single[TOKENS, RANKS])


def layer(device: TorchDevice, experts: list[Any], x: np.ndarray, tokens: list[np.ndarray], hidden: int) -> np.ndarray:
    """Return the results of a layer, float32 [T, experts, D]. Expert n has the tokens tokens[n]."""
    parts = np.zeros((len(x), len(experts), hidden), np.float32)
    device.begin(x)
    for rank, (expert, own) in enumerate(zip(experts, tokens, strict=True)):
        device.run(expert, own, np.full_like(own, rank))
    device.launch()
    device.collect(parts)
    return parts


def places(counts: tuple[int, ...], rows: int) -> list[np.ndarray]:
    """Return some tokens for each expert, int32 [n] each."""
    source = np.random.default_rng(3)
    return [np.sort(source.choice(rows, count, replace=False)).astype(np.int32) for count in counts]


@pytest.mark.parametrize("counts", [(3, 1), (5, 70)], ids=str)
def test_any_number_of_tokens_gives_what_torch_gives(device: torch.device, counts: tuple[int, ...]) -> None:
    """Kernels for one, 16 and 64 pairs; jobs that are not full; two formats."""
    experts = [expert_of(96, 64, (text,) * 3)[0] for text in ("q4g32", "bf16")]
    x, found = inputs(80, 64), []
    for has_triton in (True, False):
        sizes = [expert_bytes(expert) for expert in experts]
        chosen = TorchDevice("test", device, sum(sizes), max(sizes), has_triton)
        kept = [chosen.keep(expert) for expert in experts]
        found.append(layer(chosen, kept, x, places(counts, 80), 64))
    # An input of down that falls to the next 8-bit code moves a result by a step times a weight
    assert np.abs(found[0] - found[1]).max() <= 1e-2 * np.abs(found[1]).max()
    assert np.median(np.abs(found[0] - found[1])) <= 1e-6 * np.abs(found[1]).max()


def test_a_recorded_layer_gives_the_same_bits(device: torch.device) -> None:
    """The second layer of a plan is recorded, later ones are replayed: other experts, rows, and numbers of tokens."""
    experts = [expert_of(32, 32, (text,) * 3)[0] for text in ("q4g32", "q2g32", "q4g32")]
    swapped = kernels.Expert(experts[0].up, experts[0].gate, experts[0].down)
    every = [*experts, swapped]
    recording = opened(device, every, 4)
    kept = [recording.keep(expert) for expert in every]
    for turn in range(4):
        chosen = [kept[turn % 4], kept[1], kept[(turn + 2) % 4]]
        x = inputs(9, 32) * np.float32(turn + 1)
        tokens = places((1, 2, turn % 3 + 1), 9)
        found = layer(recording, chosen, x, tokens, 32)
        plain = opened(device, every, 4)
        again = [plain.keep(expert) for expert in every]
        expected = layer(plain, [again[turn % 4], again[1], again[(turn + 2) % 4]], x, tokens, 32)
        assert np.array_equal(found, expected) and found.any()


def test_two_launches_of_a_layer_do_not_share_memory(device: torch.device) -> None:
    """Residents are launched first. Copies follow while the first results have not been read."""
    expert, _ = expert_of(32, 32, ("q4g32",) * 3)
    x, tokens = inputs(9, 32), places((2,), 9)[0]
    chosen = opened(device, [expert], 1)
    kept, expected = chosen.keep(expert), None
    for _ in range(3):
        parts = np.zeros((9, 3, 32), np.float32)
        chosen.begin(x)
        for rank in range(3):
            chosen.run(kept if rank == 0 else chosen.copy(expert), tokens, np.full_like(tokens, rank))
            chosen.launch()
        chosen.collect(parts)
        assert np.array_equal(parts[:, 0], parts[:, 1]) and np.array_equal(parts[:, 0], parts[:, 2])
        expected = parts if expected is None else expected
        assert np.array_equal(parts, expected) and parts.any()


def test_more_pairs_than_fit_are_computed_in_turns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.runtime.accelerator.grouped import bounds

    expert, _ = expert_of(32, 32, ("q4g32",) * 3)
    x, tokens = inputs(40, 32), places((30, 20, 40), 40)
    whole = opened(device, [expert], 1)
    expected = layer(whole, [whole.keep(expert)] * 3, x, tokens, 32)
    monkeypatch.setattr(bounds, "MOST_PAIRS", 32)
    divided = opened(device, [expert], 1)
    found = layer(divided, [divided.keep(expert)] * 3, x, tokens, 32)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def test_the_check_names_the_reason() -> None:
    assert "needs a GPU" in why_no_triton(torch.device("cpu"))


def test_the_check_computes_with_all_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.runtime.accelerator.grouped import grouped_experts

    assert not differs_from_torch(device)
    monkeypatch.setitem(grouped_experts.ACTIVATIONS, "silu", grouped_experts.ACTIVATIONS["relu"])
    assert differs_from_torch(device)


def test_the_check_passes_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: no CUDA device here")
    assert why_no_triton(torch.device("cuda", 0)) == ""

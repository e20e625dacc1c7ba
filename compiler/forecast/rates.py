"""Pieces of a compile, timed on one layer of the checkpoint. A forecast multiplies these rates.

Each piece runs the code of the compile, on as many threads, with the checkpoint's own weights and texts.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moec.manifests.model import PROJECTIONS, ModelSpec, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.probe import measure_memory
from moec.profiles.weight_counts import active_layer_weights, expert_weights, layer_weights
from moec.runtime import kernels

from ..calibration.layer_inputs import LayerInputs, calibrate_layer
from ..checkpoint.checkpoint import Checkpoint
from ..families import Lowering
from ..quantization.layer_quantizer import ExpertQuantizer, LayerQuantizer
from ..quantization.own_codes import exact_matrices, unit_matrix
from ..quantization.packing import pack, unpack
from ..quantization.quantized import RangeExceeded
from ..quantization.quantizers import WITH_MOMENTS
from ..quantization.quantizers import quantizer as find_quantizer
from ..quantization.quantizers.rtn import rounded_rows
from ..walker.loaded_layer import LoadedLayer
from ..walker.texts import TOKENS_PER_FORWARD, TextStates, TokenTexts
from ..workspace.durable import Disk, disk_errors
from ..workspace.parallel import Workers, one_torch_thread, workers

_DIGESTED_BYTES = 256 << 20
_ROUNDED_ROWS = 1024
_LOGIT_TOKENS = 256
_PRODUCT_ROWS = 256
_COPIED_BYTES = 64 << 20
_STREAMED_BYTES = 32 << 20
_LONG_SECONDS = 3.0
_STREAMED_SECONDS = 0.1
_SOME_BYTE = 0x11  # zeros would be pages that share one place in the memory


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Seconds per byte.

    digested_byte: a checkpoint byte is read and hashed by one thread.
    written_byte: a byte is written, hashed and synced.
    """

    digested_byte: float
    written_byte: float


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """Seconds with all threads at work.

    expert: one expert is read, rounded in every format and packed.
    rounded_weight: one dense weight is rounded with clip search.
    """

    expert: float
    rounded_weight: float


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Seconds of wall time with all threads at work. Times of a layer are those of the layer `layer`.

    loaded_layer: its weights are loaded from the checkpoint as float32.
    token: one token of a text passes through it.
    calibration_token: the same, with routes, samples and second moments recorded.
    expert: one expert is quantized in every format, priced and packed.
    restored_expert: one format of an expert is unpacked and dequantized by one thread.
    rounded_weight: one dense weight is rounded with clip search.
    logit_token: the logits of one token.
    read_token: one token of a prompt passes the layer in the runtime, at 16 bits, without attention to earlier tokens.
    tried_token: the same at 4 bits.
    decoded_token: one of the tokens that are decoded together, likewise at 16 bits.
    memory_byte: one byte of memory is read or written.
    product: one product of two float64 numbers in a product of matrices, by one thread.
    """

    layer: int
    loaded_layer: float
    token: float
    calibration_token: float
    expert: float
    restored_expert: float
    rounded_weight: float
    logit_token: float
    read_token: float
    tried_token: float
    decoded_token: float
    memory_byte: float
    product: float


class _Clock:
    """Seconds of a with block."""

    seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - started


def measure_disk(checkpoint: Checkpoint, folder: Path, disk: Disk) -> DiskRates:
    """Read the start of the largest file. Write, sync and remove as many bytes next to the output.

    folder: the folder of the output.
    Raises MoecError if the folder is not writable.
    """
    largest = max((checkpoint.root / name for name in checkpoint.weight_files()), key=lambda path: path.stat().st_size)
    clock = _Clock()
    with clock.running(), largest.open("rb") as file:
        data = file.read(_DIGESTED_BYTES)
        hashlib.sha256(data)
    digested = clock.seconds / len(data)
    with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".moec-forecast-") as place:  # noqa: SIM117
        with clock.running(), disk.create(Path(place) / "written") as written:  # includes the sync, not the removal
            written.write(data)
    return DiskRates(digested, clock.seconds / len(data))


def measured_layer(model: ModelSpec) -> int:
    """Return the layer that stands for all: the largest one with experts."""
    return max(model.expert_layers, key=lambda layer: layer_weights(model, layer))


def measure_layer(
    lowering: Lowering, texts: TokenTexts, specs: Sequence[QuantSpec], quantizer: str, slots: int, progress: Progress
) -> LayerRates:
    """Run every piece once. It takes the memory of a compile, and a minute per half a billion weights.

    texts: calibration texts.
    specs: formats on offer. Those of 16 bits need no work.
    slots: sequences that are decoded together.
    """
    layer, threads, clock = measured_layer(lowering.model), torch.get_num_threads(), _Clock()
    pieces, formats = 7, [spec for spec in specs if spec.bitwidth < 16]
    progress(0, pieces)
    slot = LoadedLayer(lowering)
    with clock.running():
        slot.load(layer)
    loaded = clock.seconds
    progress(1, pieces)
    with workers(threads) as pool:
        few, many = (_states(slot, texts, times * threads * TOKENS_PER_FORWARD) for times in (1, 2))
        slot.run([few.copy()], pool)  # warm-up: starts threads and maps pages
        with clock.running():
            slot.run([few], pool)
        token = clock.seconds / few.num_moving
        progress(2, pieces)
        with clock.running():
            inputs, _ = calibrate_layer(slot, many, pool, quantizer in WITH_MOMENTS)
        calibration_token = clock.seconds / many.num_moving
        progress(3, pieces)
        how, exact = ExpertQuantizer(layer, quantizer, tuple(formats)), partial(exact_matrices, lowering)
        quantizing = LayerQuantizer(slot.experts, how, exact=exact)
        expert, packed = _quantized_expert(quantizing, inputs, pool, threads)
        progress(4, pieces)
    with clock.running():
        for (unit, spec), data in packed.items():
            shape = lowering.model.unit_shape(layer, unit.projection)
            unpack(data, *shape, spec).dequantize()
    restored = clock.seconds / max(len(packed), 1) * len(PROJECTIONS)
    progress(5, pieces)
    rounded = _rounded_weight(lowering)
    head, states = slot.head(), torch.randn(_LOGIT_TOKENS, lowering.model.hidden_size)
    with clock.running():
        head.logits(states).log_softmax(-1)
    progress(6, pieces)
    logit, product = clock.seconds / _LOGIT_TOKENS, _product(lowering.model.hidden_size)
    progress(7, pieces)
    memory = 1 / measure_memory(_COPIED_BYTES)
    answers = (
        _answer_seconds(lowering, layer, *of) for of in ((16, MAX_PASS_TOKENS), (4, MAX_PASS_TOKENS), (16, slots))
    )
    times = (token, calibration_token, expert, restored, rounded, logit, *answers, memory, product)
    return LayerRates(layer, loaded, *times)


def _quantized_expert(
    quantizing: LayerQuantizer, inputs: LayerInputs, pool: Workers, threads: int
) -> tuple[float, dict[tuple[UnitKey, QuantSpec], np.ndarray]]:
    """Return the seconds of one expert in every format, and its packed units. Each thread takes an expert."""
    clock, packed = _Clock(), dict[tuple[UnitKey, QuantSpec], np.ndarray]()
    chosen = torch.argsort(inputs.tokens, descending=True)[:threads].tolist()
    for _ in range(2):
        with clock.running():
            for _, matrices, _ in quantizing.run(inputs, pool, chosen):
                packed |= {key: pack(matrix) for key, matrix in matrices.items()}
        if clock.seconds > _LONG_SECONDS:
            break  # the start of threads and pages is negligible then
    return clock.seconds / len(chosen), packed


def _states(
    slot: LoadedLayer, texts: TokenTexts, tokens: int, tokens_per_batch: int = TOKENS_PER_FORWARD
) -> TextStates:
    """Return the first texts before the loaded layer. A decoder reads the embeddings of the prompts."""
    states = TextStates.begin(texts.first(tokens), slot.embed, tokens_per_batch)
    if states.is_encoding and slot.layer >= slot.model.first_decoder_layer:
        states.begin_decoding(slot.encoder_normed)
    return states


def _product(width: int) -> float:
    """Return the seconds of one product, measured on a part of the second moments of float64 rows of this width."""
    rows, clock = torch.randn(_PRODUCT_ROWS, width, dtype=torch.float64), _Clock()
    some = rows[:, :_ROUNDED_ROWS].T
    with one_torch_thread():
        for _ in range(2):
            with clock.running():
                some @ rows
    return clock.seconds / (some.numel() * width)


def _answer_seconds(lowering: Lowering, layer: int, bits: int, tokens: int) -> float:
    """Return the seconds of one of `tokens` tokens that pass a layer together in the runtime.

    It is the rate of the shipped products of an expert's shape, for dense weights and for routed experts, whose tokens
    are shared out.
    bits: 4, or 16 for the checkpoint's own format.
    """
    model = lowering.model
    experts, (rows, columns) = model.layers[layer].experts, model.unit_shape(layer, "up")
    spec = next(s for s in (QuantSpec(4, 64), QuantSpec(4, 32), QuantSpec(4)) if s.fits(columns))
    spec = lowering.spec_16bit if bits == 16 else spec
    matrices = [
        kernels.PackedMatrix(np.full(spec.packed_bytes(rows, columns), _SOME_BYTE, np.uint8), rows, columns, spec)
        for _ in range(max(1, _STREAMED_BYTES // spec.packed_bytes(rows, columns)))
    ]
    kernels.set_threads(torch.get_num_threads())

    def weight(count: int) -> float:
        """Return the seconds of one weight and token, if `count` tokens use each matrix."""
        inputs, outputs = np.ones((count, columns), np.float32), np.empty((count, rows), np.float32)
        kernels.linear(matrices[-1], inputs, outputs)  # warm-up: starts threads
        started, seconds, used = time.perf_counter(), 0.0, 0
        while used < len(matrices) and seconds < _STREAMED_SECONDS:
            kernels.linear(matrices[used], inputs, outputs)
            used, seconds = used + 1, time.perf_counter() - started
        return seconds / (used * rows * columns * count)

    routed = expert_weights(model, layer) * experts.top_k
    dense = active_layer_weights(model, layer) - routed
    return dense * weight(tokens) + routed * weight(max(1, tokens * experts.top_k // experts.count))


def measure_expert(lowering: Lowering, specs: Sequence[QuantSpec], quantizer: str) -> ExpertRates:
    """Read a few experts, round them in every format that fits, without input weights, and pack them."""
    model, threads = lowering.model, torch.get_num_threads()
    layer, clock = measured_layer(model), _Clock()
    experts = range(min(2 * threads, model.layers[layer].experts.count))
    rounding = find_quantizer(quantizer)

    def one(expert: int) -> None:
        for projection in model.layers[layer].experts.projections:
            unit = UnitKey(layer, expert, projection)
            for spec in specs:
                if spec.bitwidth == 16:
                    lowering.unit(unit)
                elif spec.fits(model.unit_shape(layer, projection)[1]):
                    with suppress(RangeExceeded):
                        pack(unit_matrix(lowering, unit, spec, rounding))

    with workers(threads) as pool:
        list(pool.in_order(one, experts[:threads]))  # warm-up: starts threads and maps pages
        with clock.running():
            list(pool.in_order(one, experts))
    return ExpertRates(clock.seconds / len(experts), _rounded_weight(lowering))


def _rounded_weight(lowering: Lowering) -> float:
    """Return the seconds to round one weight, measured on the first rows of the output matrix."""
    name = "embedding" if lowering.model.tie_embeddings else "lm_head"
    rows, clock = lowering.dense_weight(name)[:_ROUNDED_ROWS], _Clock()
    spec = next(s for s in (QuantSpec(4, 32), QuantSpec(4, 0)) if s.fits(rows.shape[1]))
    with clock.running(), suppress(RangeExceeded):
        for _, matrix in rounded_rows(rows, spec):
            pack(matrix)
    return clock.seconds / rows.numel()

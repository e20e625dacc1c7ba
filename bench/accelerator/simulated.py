"""A simulated accelerator.

    python -m bench.accelerator.simulated [--model olmoe|mixtral] ...

No part of this runs on a GPU. The processor's times are measured on this machine: one expert of the model's shape and
format, its dense products, its head, and the copy of an expert into a buffer.

The device's times are computed from the GPU of a device profile and from constants that the options name. An expert
takes LAUNCHES starts of a kernel, its bytes through the device's memory, and its products at the device's rate. The
link carries an expert at its own rate.

Experts of tokens are drawn from popularities rank^-SKEW. Attention over cached keys is left out on all sides. Prints a
Markdown table: tokens/s of decoding, time to the first token of 512 to 4,096 tokens, and steps/s of beams of 4, 8 and
12.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.accelerator.workload import STRATEGIES, Workload, decode_ns, prefill_ns
from moec.manifests.quant import QuantSpec
from moec.profiles.loading import load_profile
from moec.runtime import kernels
from moec.runtime.accelerator.image import expert_bytes, write_image
from moec.runtime.accelerator.latency import SAMPLE_TOKENS, LatencyModel, fit_line

PROMPTS, BEAMS = (512, 1024, 2048, 4096), (4, 8, 12)
DECODED = 16
LAUNCHES = 55
"""Kernels that `torch_device.py` starts for one expert with a gate, counted from its source."""
DENSE_LAUNCHES = 60
"""Kernels that `torch_attention.py` starts for a layer with rotation, counted from its source."""
HEAD_LAUNCHES = 15
MOVED_PER_WEIGHT = {4: 28.0, 16: 18.0}
"""Bytes of device memory read and written for a weight while it is unpacked and used, counted from its source."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model that decide its times. residents: experts on the device."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    vocabulary: int
    spec: QuantSpec
    residents: int


MODELS = {
    "olmoe": Shape(16, 64, 8, 2048, 1024, 50304, QuantSpec.parse("q4g64"), 341),  # a third
    "mixtral": Shape(32, 8, 2, 4096, 14336, 32000, QuantSpec.parse("bf16"), 56),  # Twiddler, table 1, environment 1
}


def random_matrix(rows: int, columns: int, spec: QuantSpec) -> kernels.PackedMatrix:
    """Return a matrix of numbers of ordinary size, so that no denormal slows the products down."""
    count = spec.packed_bytes(rows, columns)
    if spec.bitwidth == 16:
        block = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
        data = np.resize((block.view(np.uint32) >> 16).astype(np.uint16), count // 2).view(np.uint8)
    else:
        data = np.resize(np.random.default_rng(0).integers(0, 60, 1 << 16).astype(np.uint8), count)
    return kernels.PackedMatrix(data, rows, columns, spec)


def median_ns(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times)


def line_of_tokens(call: Callable[[int], object]) -> tuple[float, float]:
    return fit_line(SAMPLE_TOKENS, [median_ns(partial(call, tokens)) for tokens in SAMPLE_TOKENS])


def measured_expert(shape: Shape) -> tuple[tuple[float, float], float, int]:
    """Return an expert's fixed ns and ns per token on this processor, ns per byte of its copy, and its bytes."""
    up = random_matrix(shape.width, shape.hidden, shape.spec)
    expert = kernels.Expert(up, up, random_matrix(shape.hidden, shape.width, shape.spec))
    buffer = np.zeros(expert_bytes(expert), np.uint8)

    def compute(tokens: int) -> None:
        x = np.ones((tokens, shape.hidden), np.float32)
        at, out = np.arange(tokens, dtype=np.int32), np.empty((tokens, 1, shape.hidden), np.float32)
        kernels.expert_ffn(expert, x, at, np.zeros(tokens, np.int32), out)

    staging = median_ns(lambda: write_image(expert, buffer)) / len(buffer)
    return line_of_tokens(compute), staging, len(buffer)


def measured_dense(shape: Shape) -> tuple[tuple[float, float], float]:
    """Return fixed ns and ns per token of a layer's four products D x D at 8 bits, and ns of the head of one row."""
    spec = QuantSpec.parse("q8g64")
    square, head = random_matrix(shape.hidden, shape.hidden, spec), random_matrix(shape.vocabulary, shape.hidden, spec)

    def compute(tokens: int) -> None:
        x = np.ones((tokens, shape.hidden), np.float32)
        kernels.linears([square] * 4, x, [np.empty((tokens, shape.hidden), np.float32) for _ in range(4)])

    row, logits = np.ones((1, shape.hidden), np.float32), np.empty((1, shape.vocabulary), np.float32)
    return line_of_tokens(compute), median_ns(lambda: kernels.linear(head, row, logits))


def device_times(shape: Shape, options: argparse.Namespace) -> tuple[float, float]:
    """Return fixed ns and ns per token of an expert on the device, from the stated constants."""
    weights = 3 * shape.hidden * shape.width
    moved = weights * MOVED_PER_WEIGHT[int(shape.spec.bitwidth)] / (options.device_gb_per_s * 1e9)
    per_token = 2 * weights / (options.device_tflops * 1e12)
    return LAUNCHES * options.launch_us * 1e3 + moved * 1e9, per_token * 1e9


def dense_device_times(shape: Shape, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return fixed ns and ns per token of a layer's attention on the device, and ns of the head.

    The device holds these weights as float32.
    """

    def times(launches: int, weights: int) -> tuple[float, float]:
        read_ns = 4 * weights / options.device_gb_per_s
        return launches * options.launch_us * 1e3 + read_ns, 2 * weights / (options.device_tflops * 1e3)

    rows_ns = 2 * 4 * shape.hidden / options.link_gb_per_s  # to the device and back
    fixed_ns, token_ns = times(DENSE_LAUNCHES, 4 * shape.hidden**2)
    return fixed_ns, token_ns + rows_ns, sum(times(HEAD_LAUNCHES, shape.vocabulary * shape.hidden))


def row_of(work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str) -> list[float]:
    figures = [1e9 / decode_ns(work, latency, residents, strategy, 1, DECODED)]
    figures += [prefill_ns(work, latency, residents, strategy, tokens) / 1e9 for tokens in PROMPTS]
    return figures + [1e9 / decode_ns(work, latency, residents, strategy, width, DECODED) for width in BEAMS]


def read_options() -> argparse.Namespace:
    """Return what the command line says of the model and of the simulated device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="olmoe")
    parser.add_argument("--profile", default="quadro-rtx-6000-host", help="device profile with a GPU")
    parser.add_argument("--link-gb-per-s", type=float, help="pinned copies; default: the profile's")
    parser.add_argument("--device-gb-per-s", type=float, help="device memory; default: the profile's")
    parser.add_argument("--device-tflops", type=float, help="float32; default: half of the profile's peak")
    parser.add_argument("--launch-us", type=float, default=6.0, help="time to start an eager torch kernel")
    parser.add_argument("--cpu-speed", type=float, default=1.0, help="simulated processor divided by this machine")
    parser.add_argument("--skew", type=float, default=0.3, help="popularity falls with rank^-SKEW")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    gpu = load_profile(options.profile).gpu
    if gpu is None or gpu.link_bytes_per_s is None or gpu.flops_per_s is None:
        parser.error(f"the profile {options.profile} states no GPU with a link and a rate of operations")
    options.link_gb_per_s = options.link_gb_per_s or gpu.link_bytes_per_s / 1e9
    options.device_gb_per_s = options.device_gb_per_s or gpu.memory_bytes_per_s / 1e9
    options.device_tflops = options.device_tflops or gpu.flops_per_s / 2e12
    return options


def conditions(model: str, size_bytes: int, work: Workload, latency: LatencyModel) -> str:
    """Return one line that says what is simulated. size_bytes: of an expert."""
    shape = MODELS[model]
    experts = shape.layers * shape.experts
    return (
        f"SIMULATED device. {model}, {shape.spec}, {size_bytes / 1e6:.1f} MB per expert, "
        f"{shape.residents} of {experts} on the device. {latency.to_text()}; "
        f"a copy keeps the processor busy for {latency.staging_ns(size_bytes) / 1e3:.0f} us "
        f"and the link for {latency.link_ns(size_bytes) / 1e3:.0f} us; "
        f"dense {work.dense_fixed_ns / 1e3:.0f} + {work.dense_token_ns / 1e3:.1f} us per token and layer, "
        f"head {work.head_ns / 1e6:.1f} ms."
    )


def main() -> None:
    """Read the command line, measure this machine, simulate and print a table."""
    options = read_options()
    kernels.set_threads(options.threads)
    shape = MODELS[options.model]
    (fixed, per_token), staging, size = measured_expert(shape)
    dense, head = measured_dense(shape)
    speed = options.cpu_speed
    latency = LatencyModel(
        fixed / speed, per_token / speed, *device_times(shape, options), staging / speed, 1 / options.link_gb_per_s
    )
    ranks = np.arange(1, shape.experts + 1, dtype=np.float64) ** -options.skew
    shuffled = np.stack([np.random.default_rng(layer).permutation(ranks) for layer in range(shape.layers)])
    work = Workload(shuffled, shape.top_k, size, dense[0] / speed, dense[1] / speed, head / speed)
    residents = work.residents(shape.residents)
    print(f"{conditions(options.model, size, work, latency)}\n")
    names = [
        "tokens/s",
        *(f"TTFT {tokens} [s]" for tokens in PROMPTS),
        *(f"beams {width} [steps/s]" for width in BEAMS),
    ]
    print(f"| | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    dense_fixed, dense_token, device_head = dense_device_times(shape, options)
    there = replace(work, dense_fixed_ns=dense_fixed, dense_token_ns=dense_token, head_ns=device_head)
    for name, strategy, chosen in [
        *((strategy, strategy, work) for strategy in STRATEGIES),
        ("planner, dense on device", "planner", there),
    ]:
        cells = [f"{value:.3g}" for value in row_of(chosen, latency, residents, strategy)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Time of a layer of experts on an accelerator, with and without Triton, next to the CPU.

    python -m bench.accelerator.layers [--accelerator cuda] [--formats q4g32s,q2g32] [--tokens 1,8,64] [--experts 8]

A layer has some experts of one format, which are on the device. Each has the same number of tokens. The time includes
the way of the rows to the device and of the results back. Prints one JSON line for each format and number of tokens.
Times are medians, in us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

# Set before torch is imported, as in the console script. Threads that spin while they wait slow the kernels down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch

from moec.runtime import kernels
from moec.runtime.accelerator.grouped.triton_check import why_no_triton
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.torch_device import TorchDevice
from tests.kernels.products import expert_of

REPEATS = 20


def median_us(call: Callable[[], object]) -> float:
    """Return the median time of a call. Three more run first: they compile and record kernels."""
    times = []
    for number in range(REPEATS + 3):
        started = time.perf_counter()
        call()
        if number >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def on_device(device: TorchDevice, expert: kernels.Expert, x: np.ndarray, parts: np.ndarray) -> Callable[[], None]:
    """Return a function that computes a layer on a device that has room for its experts."""
    experts_on_device = [device.keep(expert) for _ in range(parts.shape[1])]
    tokens = np.arange(len(x), dtype=np.int32)

    def compute() -> None:
        device.begin(x)
        for rank, device_expert in enumerate(experts_on_device):
            device.run(device_expert, tokens, np.full_like(tokens, rank))
        device.launch()
        device.collect(parts)

    return compute


def on_cpu(expert: kernels.Expert, x: np.ndarray, parts: np.ndarray) -> Callable[[], None]:
    """Return a function that computes the same layer on the CPU."""
    tokens = np.arange(len(x), dtype=np.int32)

    def compute() -> None:
        for rank in range(parts.shape[1]):
            kernels.expert_ffn(expert, x, tokens, np.full_like(tokens, rank), parts)

    return compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--formats", default="q4g32s,q2g32,q3g64b,bf16")
    parser.add_argument("--tokens", default="1,2,8,16,64,256", help="tokens of each expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    device = torch.device(options.accelerator)
    note = why_no_triton(device)
    print(note or "Triton works here", file=sys.stderr)
    kernels.set_threads(options.threads)
    for text in options.formats.split(","):
        expert, _ = expert_of(options.width, options.hidden, (text,) * 3)
        size = expert_bytes(expert)
        for count in map(int, options.tokens.split(",")):
            x = np.random.default_rng(0).standard_normal((count, options.hidden)).astype(np.float32)
            parts = np.zeros((count, options.experts, options.hidden), np.float32)
            row: dict[str, object] = {"format": text, "tokens": count, "experts": options.experts}
            row["cpu_us"] = median_us(on_cpu(expert, x, parts))
            for name, has_triton in (("torch_us", False), ("triton_us", True)):
                if has_triton and note:
                    continue
                opened = TorchDevice("bench", device, options.experts * size, size, has_triton)
                row[name] = median_us(on_device(opened, expert, x, parts))
                opened.close()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

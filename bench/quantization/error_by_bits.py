"""Output error and size of formats, with random weights and random inputs that depend on each other.

    python -m bench.quantization.error_by_bits [--formats q4g64,q5g64] [--seeds 3]

Weights are Gaussian. Inputs are Gaussian vectors times a random matrix plus the identity. The error is the squared
difference of the outputs over the squared outputs: the mean over the seeds, least and greatest.
"""

from __future__ import annotations

import argparse

import torch

from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.quant import QuantSpec

ROWS, COLUMNS, TOKENS = 256, 512, 4096
FORMATS = "q3g64,q4g64,q4g64b,q4g32s,q5g128,q5g64,q5g64b,q5g32b,q5g32s,q6g128,q6g64,q6g32,q6g32s,q8g128,q8g64,q8g32s"


def errors(spec: QuantSpec, seed: int) -> tuple[float, float]:
    """Return the relative squared output errors of GPTQ and of rounding to nearest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5 + torch.eye(COLUMNS)
    inputs = torch.randn(TOKENS, COLUMNS, generator=generator) @ mixing
    plain = (inputs @ weight.T).square().sum()
    matrices = quantize_gptq(weight, spec, inputs.T @ inputs, TOKENS), quantize_rtn(weight, spec)
    gptq, rtn = (float((inputs @ (m.dequantize() - weight).T).square().sum() / plain) for m in matrices)
    return gptq, rtn


def main() -> None:
    """Read the command line and print a table."""
    parser = argparse.ArgumentParser(description="measure the output error of formats")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'format':<9}{'bits':>6}{'bytes':>9}  {'GPTQ (least to greatest)':<36}nearest")
    for text in options.formats.split(","):
        spec = QuantSpec.parse(text)
        measured = [errors(spec, seed) for seed in range(options.seeds)]
        gptq, rtn = [pair[0] for pair in measured], [pair[1] for pair in measured]
        mean = f"{sum(gptq) / len(gptq):.3e} ({min(gptq):.3e} to {max(gptq):.3e})"
        size = f"{spec.bits_per_weight(COLUMNS):>6.3f}{spec.packed_bytes(ROWS, COLUMNS):>9}"
        print(f"{text:<9}{size}  {mean:<36}{sum(rtn) / len(rtn):.3e}", flush=True)


if __name__ == "__main__":
    main()

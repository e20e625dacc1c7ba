"""Quantize matrices with GPTQModel and write what they become. Runs in an environment of its own, without moec.

    python gptqmodel_script.py SOURCE TARGET BITS GROUP_SIZE THREADS

SOURCE and TARGET are safetensors files: float32 matrices, and the same in bfloat16 after quantization. SOURCE also has
the second moments of the inputs; its header names the moment of each matrix. The header of TARGET has the seconds of
processor time.
"""

import json
import sys
import time

import torch
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

ENOUGH_TOKENS = 1 << 20
"""Tokens that GPTQModel is told of, so that it never falls back to rounding to nearest."""


def quantized(weight: Tensor, moment: Tensor, bits: int, group_size: int) -> Tensor:
    """Return a matrix [N, K] after GPTQ with the second moment [K, K] of its inputs.

    Asymmetric groups, and columns in the order of their activity within groups, which the project recommends.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    settings = QuantizeConfig(
        bits=bits, group_size=group_size, sym=False, desc_act=False, act_group_aware=True, offload_to_disk=False
    )
    task = GPTQ(linear, settings)
    task.quantizer.configure(perchannel=True)
    task.H = moment * (2 / moment.diagonal().mean().clamp_min(1e-30))
    task.nsamples = ENOUGH_TOKENS
    rounded: Tensor = task.quantize(blocksize=128)[0]
    return rounded


def main() -> None:
    """Read the command line and quantize."""
    source, target, bits, group_size, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    rounded, seconds = {}, 0.0
    with safe_open(source, framework="pt") as file:
        shared = json.loads(file.metadata()["moments"])
        for name, moment in sorted(shared.items()):
            weight, inputs = file.get_tensor(name), file.get_tensor(moment)
            begun = time.process_time()
            result = quantized(weight, inputs, int(bits), int(group_size))
            seconds += time.process_time() - begun
            rounded[name] = result.to(torch.bfloat16).contiguous()
    save_file(rounded, target, metadata={"seconds": str(seconds)})


if __name__ == "__main__":
    main()

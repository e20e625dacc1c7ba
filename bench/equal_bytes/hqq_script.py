"""Quantize matrices with HQQ and write what they become. Runs in an environment of its own, without moec.

    python hqq_script.py SOURCE TARGET BITS GROUP_SIZE THREADS

SOURCE and TARGET are safetensors files: float32 matrices, and the same in bfloat16 after quantization. The header of
TARGET has the seconds of processor time.
"""

import sys
import time

import torch
from hqq.core.quantize import Quantizer
from safetensors import safe_open
from safetensors.torch import save_file


def main() -> None:
    """Read the command line and quantize."""
    source, target, bits, group_size, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    rounded, begun = {}, time.process_time()
    with safe_open(source, framework="pt") as file:
        for name in sorted(file.keys()):
            packed, meta = Quantizer.quantize(
                file.get_tensor(name),
                nbits=int(bits),
                group_size=int(group_size),
                axis=1,
                device="cpu",
                compute_dtype=torch.float32,
                optimize=True,
            )
            meta["compute_dtype"] = torch.float32
            rounded[name] = Quantizer.dequantize(packed, meta).to(torch.bfloat16).contiguous()
    save_file(rounded, target, metadata={"seconds": str(time.process_time() - begun)})


if __name__ == "__main__":
    main()

"""Quantize the routed experts of a checkpoint with AutoRound and write what they become.

    python autoround_script.py SOURCE TARGET BITS GROUP_SIZE THREADS MODEL

Runs in an environment of its own, without moec. SOURCE is a safetensors file with `tokens`, int64 [texts, length]: the
calibration texts. TARGET gets the matrices in bfloat16, named LAYER.EXPERT.PROJECTION. Its header has the seconds of
processor time. AutoRound's own defaults: 200 steps, batches of 8 texts, asymmetric groups as the others have them.
"""

import re
import sys
import time

import torch
from auto_round import AutoRound
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 200
EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(gate|up|down)_proj$")
ROUTED = re.compile(r"layers\.\d+\..*(?<!shared_)experts(\.|$)")


def other_layers(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the settings of the linear layers outside the routed experts: they keep 16 bits."""
    named = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: {"bits": 16, "act_bits": 16} for name in named if not ROUTED.search(name)}


def experts_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the matrices of the routed experts by name."""
    tensors = {}
    for name, module in model.named_modules():
        if (place := EXPERT.search(name)) is not None:
            layer, expert, projection = place.groups()
            tensors[f"{layer}.{expert}.{projection}"] = module.weight.data.to(torch.bfloat16).contiguous()
    return tensors


def main() -> None:
    """Read the command line and quantize."""
    source, target, bits, group_size, threads, folder = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokens = load_file(source)["tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    begun = time.process_time()
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        bits=int(bits),
        group_size=int(group_size),
        sym=False,
        iters=STEPS,
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        batch_size=8,
        dataset=[{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens],
        layer_config=other_layers(model),
        device_map="cpu",
        amp=False,
    )
    quantized, _ = quantizer.quantize()
    seconds = time.process_time() - begun
    save_file(experts_of(quantized), target, metadata={"seconds": str(seconds)})


if __name__ == "__main__":
    main()

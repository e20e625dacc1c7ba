"""Write the yardstick's checkpoint.

    python -m bench.yardstick.checkpoint.write FOLDER [--layers N]

It has 13.8 GB, one shard per layer; fewer layers are for measurements of one layer. The tokenizer is a byte-level BPE
of 4,096 tokens trained on `text.txt`. The runs decode the same text. The other rows of the embedding are never used. A
short run of any model leaves most rows unused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .weights import Shape, Weights

TEXT = Path(__file__).parents[1] / "text.txt"
TOKENIZER_TOKENS = 4_096
END = "</s>"


def text() -> str:
    """Return real text, the same for every run: older pages of this project."""
    return TEXT.read_text(encoding="utf-8")


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_TOKENS,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text()], trainer)
    return tokenizer


def config(shape: Shape) -> dict[str, object]:
    """Return the content of ``config.json`` of an OLMoE checkpoint."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "max_position_embeddings": shape.context,
        "norm_topk_prob": False,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
    }


def write(folder: Path, weights: Weights) -> None:
    """Write the folder. An existing shard is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = range(weights.shape.layers)
    outside = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    shards: list[Iterable[str]] = [outside, *(tuple(weights.layer_names(layer)) for layer in layers)]
    where: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where.update(dict.fromkeys(names, file))
        if not (folder / file).exists():
            tensors = {name: weights.tensor(name).to(torch.bfloat16) for name in names}
            save_file(tensors, folder / (file + ".new"), metadata={"format": "pt"})
            (folder / (file + ".new")).rename(folder / file)
        total += (folder / file).stat().st_size
        print(f"{file}: {number} of {len(shards)}", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config(weights.shape), indent=1) + "\n", encoding="utf-8")
    train_tokenizer().save(str(folder / "tokenizer.json"))


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description="Write the yardstick's checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    options = parser.parse_args()
    write(options.folder, Weights(Shape(layers=options.layers)))


if __name__ == "__main__":
    main()

"""Memory and time of a compile with a vocabulary of 150,000 tokens, and what `--estimate` says of both.

    python -m bench.runs.large_vocabulary --folder FOLDER

It makes a small Mixtral with random weights and a tokenizer of one token per word. The texts are random words: 500 of
256 tokens in each split. Log-probabilities of all texts would be 77 GB in float32. The compile runs in a process of its
own. Its peak is the largest resident memory that the kernel reports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from ..search.plans import markdown

VOCABULARY, TEXTS, WORDS = 150_000, 500, 256
HIDDEN, LAYERS, EXPERTS, TOP_K = 256, 4, 8, 2
SPECIAL = ("<s>", "</s>", "<unk>")
SEED = 20261126


def write_model(folder: Path) -> None:
    """Write the checkpoint and its tokenizer."""
    settings = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(SEED)
    MixtralForCausalLM(settings).bfloat16().save_pretrained(folder)
    words = {word: number for number, word in enumerate((*SPECIAL, *map(word_of, range(VOCABULARY - len(SPECIAL)))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    begin, end, unknown = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, unk_token=unknown
    ).save_pretrained(folder)


def word_of(number: int) -> str:
    """Return the word with a number."""
    return f"w{number}"


def write_texts(folder: Path) -> None:
    """Write random words in three splits."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(SEED)
    for split in ("train", "validation", "test"):
        numbers = draws.integers(0, VOCABULARY - len(SPECIAL), (TEXTS, WORDS)).tolist()
        lines = [json.dumps({"text": " ".join(map(word_of, row))}) for row in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def compile_command(folder: Path, *more: str) -> list[str]:
    """Return the command of the compile."""
    return [
        str(Path(sys.executable).with_name("moec")), "compile", str(folder / "model"), "--loss", "2%", "--task",
        "perplexity", "--data", str(folder / "data"), "-o", str(folder / "bundle"), "--overwrite", "--no-comparisons",
        "--swaps", "2", *more,
    ]  # fmt: skip


def estimated(folder: Path) -> tuple[float, float]:
    """Return the seconds and the bytes that `--estimate` predicts."""
    done = subprocess.run(compile_command(folder, "--estimate", "--json"), capture_output=True, text=True, check=True)
    stages = json.loads(done.stdout)["stages"]
    return sum(stage["seconds"] for stage in stages), max(stage["memory_bytes"] for stage in stages)


def main() -> None:
    """Make the inputs, compile, and print a table."""
    parser = argparse.ArgumentParser(description="Memory of a compile with a large vocabulary.")
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    if not (folder / "data").exists():
        write_model(folder / "model")
        write_texts(folder / "data")
    seconds, memory = estimated(folder)
    begin = time.monotonic()
    subprocess.run(compile_command(folder), check=True, stdout=subprocess.DEVNULL)
    took, peak = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    weights = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    rows = [
        ["peak, MiB", f"{peak / 2**20:,.0f}", f"{memory / 2**20:,.0f}", f"{memory / peak:.2f}"],
        ["peak beyond the weights, MiB", f"{(peak - weights) / 2**20:,.0f}", "", ""],
        ["time, s", f"{took:,.0f}", f"{seconds:,.0f}", f"{seconds / took:.2f}"],
    ]
    print(markdown(["", "measured", "estimated", "ratio"], rows))


if __name__ == "__main__":
    main()

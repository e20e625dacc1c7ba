"""Memory and time of a compile with a large vocabulary.

    python -m bench.walker.large_vocabulary FOLDER [--words N] [--texts N] [--loss SHARE] [--memory SIZE]

FOLDER gets a random Mixtral checkpoint and texts of 256 random words. `moec compile --task perplexity` searches a plan
for them. Prints one JSON object: the forecast of `--estimate`, peak memory and time of the compile, and both ratios.
Takes about 20 minutes on two cores with the default sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
TEXT_WORDS = 256


def save_model(folder: Path, words: int) -> None:
    """Write a random checkpoint whose tokenizer knows so many words."""
    vocabulary = {word: at for at, word in enumerate((*SPECIAL, *(f"w{at}" for at in range(words))))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=len(vocabulary),
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_texts(folder: Path, words: int, texts: int) -> None:
    """Write the splits: `texts` texts for validation and for the test, a tenth for calibration."""
    draw = random.Random(0)
    folder.mkdir()
    for split, count in (("train", max(1, texts // 10)), ("validation", texts), ("test", texts)):
        rows = (" ".join(f"w{draw.randrange(words)}" for _ in range(TEXT_WORDS)) for _ in range(count))
        lines = [json.dumps({"text": row}) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def moec(*arguments: object) -> tuple[dict[str, Any], float, int]:
    """Run `moec ... --json`. Returns its object, the elapsed seconds, and the peak memory of the process in bytes."""
    command = [sys.executable, "-m", "moec.cli.main", *map(str, arguments), "--json"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed = process.stdout.read() if process.stdout is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(printed), time.monotonic() - began, usage.ru_maxrss * 1024


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Memory of a compile with a large vocabulary.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--words", type=int, default=150_000)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--loss", default="2%")
    parser.add_argument("--memory", help="`--memory` of the compile")
    options = parser.parse_args()
    folder: Path = options.folder
    if not folder.exists():
        folder.mkdir(parents=True)
        save_model(folder / "model", options.words)
        save_texts(folder / "texts", options.words, options.texts)
    command = ["compile", folder / "model", "--data", folder / "texts", "--task", "perplexity", "--loss", options.loss]
    if options.memory:
        command += ["--memory", options.memory]
    forecast, _, _ = moec(*command, "-o", folder / "bundle", "--estimate")
    _, seconds, peak = moec(*command, "-o", folder / "bundle")
    weights = (folder / "model" / "model.safetensors").stat().st_size
    print(json.dumps({"weights_bytes": weights, "forecast": forecast, "seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()

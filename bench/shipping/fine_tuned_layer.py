"""A copy of a Mixtral checkpoint in which the experts of one layer were trained a little further.

`python -m bench.shipping.fine_tuned_layer MODEL DATA OUT --layer 2` writes OUT. DATA is a JSONL file in GSM8K's form.
All other weights keep their bytes. `bench.shipping.shared_bytes` then compares compiles of MODEL and OUT.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH, STEPS, RATE, SEED = 16, 30, 1e-4, 0
UNSCORED = -100
"""The label of a token that has no part in the loss."""


def batches(data: Path, folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return STEPS batches of token ids [BATCH, T], and the same with UNSCORED for all tokens but the answers'."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = []
    rows = [json.loads(line) for line in data.read_text().splitlines()[: BATCH * STEPS]]
    for start in range(0, len(rows), BATCH):
        texts, labels = [], []
        for row in rows[start : start + BATCH]:
            prompt = tokenizer(f"Question: {row['question']}\nAnswer:", add_special_tokens=False).input_ids
            answer = tokenizer(f" {row['answer']}</s>", add_special_tokens=False).input_ids
            texts.append(torch.tensor([*prompt, *answer]))
            labels.append(torch.tensor([*[UNSCORED] * len(prompt), *answer]))
        pad = torch.nn.utils.rnn.pad_sequence
        names.append((pad(texts, batch_first=True), pad(labels, batch_first=True, padding_value=UNSCORED)))
    return names


def train(folder: Path, data: Path, layer: int) -> dict[str, torch.Tensor]:
    """Return the trained weights of the experts of a layer, float32, by their names in the module."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = {name: weight for name, weight in model.named_parameters() if f"layers.{layer}.mlp.experts." in name}
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in trained.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    for number, (ids, labels) in enumerate(batches(data, folder), 1):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {number}: loss {float(loss.detach()):.4f}")
    return {name: weight.detach() for name, weight in trained.items()}


def main() -> None:
    """Write the copy, and tell how many weights differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layer", type=int, default=2)
    given = parser.parse_args()
    trained = train(given.model, given.data, given.layer)
    shutil.copytree(given.model, given.out)
    (path,) = given.out.glob("*.safetensors")
    weights = load_file(path)
    changed = total = 0
    for name, weight in weights.items():
        tuned = _trained(name, trained, given.layer)
        if tuned is None:
            continue
        rounded = tuned.to(weight.dtype)
        changed, total = changed + int((rounded != weight).sum()), total + weight.numel()
        weights[name] = rounded.contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    print(f"{changed:,} of {total:,} weights of layer {given.layer} differ ({changed / total:.1%})")


def _trained(name: str, trained: dict[str, torch.Tensor], layer: int) -> torch.Tensor | None:
    """Return the trained weight of a tensor of the checkpoint; None for others.

    The module holds gate and up of all experts in one tensor [E, 2F, D], and down in another one [E, D, F].
    """
    start = f"model.layers.{layer}.block_sparse_moe.experts."
    if not name.startswith(start):
        return None
    expert, projection, _ = name.removeprefix(start).split(".")
    joined = {key.rsplit(".", 1)[1]: weight for key, weight in trained.items()}
    both, down = joined["gate_up_proj"][int(expert)], joined["down_proj"][int(expert)]
    width = len(both) // 2
    return {"w1": both[:width], "w3": both[width:], "w2": down}[projection]


if __name__ == "__main__":
    main()

"""Data of tasks in a compile: items that are too long, and multiple choice with the likelihoods of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.measuring.text_engines import checkpoint_engine
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import Target
from moec.compiler.request.task_data import fit_splits, load_task_data
from moec.evaluation.data import load_items
from moec.evaluation.long_items import Context
from moec.evaluation.run import evaluate
from moec.evaluation.tasks.choices import choices_of
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import ContextOverflow
from moec.runtime.options.runtime import RuntimeOptions
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import WORDS, compile_tiny, save_model


def words(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Return a token per word."""
    return [([0] * len(prompt.split()), [0] * len(answer.split())) for prompt, answer in pairs]


CONTEXT = Context(50, words)


def test_each_long_item_is_named_and_cut(tmp_path: Path) -> None:
    for split, size in (("train", 90), ("validation", 60), ("test", 70)):
        rows = [{"text": f"{split} {at} " + "word " * (size if at == 1 else 5)} for at in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = CompileOptions(Target("kl", 0.1), data=str(tmp_path))
    splits, shots = load_task_data(options, lambda sentence: None)
    notes = list[str]()
    (fitted,) = fit_splits(splits, shots, CONTEXT, options.long_items, notes.append)
    assert [len(part) for _, part in fitted.sets] == [4, 4, 4]
    assert fitted.train is splits[0].train
    assert max(len(item["text"].split()) for item in fitted.test.items) == 49
    assert notes == [
        f"perplexity, {name}: 1 items lose the end of their text: item 1 has {size} tokens; the context has 50"
        for name, size in (("validation", 63), ("test", 73))
    ]
    (skipped,) = fit_splits(splits, shots, CONTEXT, "skip", notes.append)
    assert [len(part) for _, part in skipped.sets] == [4, 3, 3]
    with pytest.raises(ContextOverflow, match="item 1 has 63 tokens"):
        fit_splits(splits, shots, CONTEXT, "refuse", notes.append)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, and `piqa` with three splits."""
    root, draw = tmp_path_factory.mktemp("choices"), random.Random(2)
    save_model(root / "model")
    (root / "piqa").mkdir()
    for split, count in (("train", 6), ("validation", 8), ("test", 20)):
        rows = [
            {
                "goal": f"{split} {at}: " + " ".join(draw.choices(WORDS, k=3)),
                "sol1": " ".join(draw.choices(WORDS, k=2)), "sol2": " ".join(draw.choices(WORDS, k=3)),
                "label": draw.randrange(2),
            }
            for at in range(count)
        ]  # fmt: skip
        (root / "piqa" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_predictions_are_those_of_transformers(place: Path, tmp_path: Path) -> None:
    items, _ = load_items(place / "piqa", "piqa")
    tokenizer = load_tokenizer(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).eval()
    expected = []
    for item in items.items:
        choices, _ = choices_of(item)
        totals = []
        for prompt, answer in choices:
            ((before, own),) = encode_pairs(tokenizer, [(prompt, answer)])
            with torch.no_grad():
                log_p = model(torch.tensor([before + own])).logits[0].log_softmax(-1)
            totals.append(sum(float(log_p[len(before) - 1 + at, token]) for at, token in enumerate(own)))
        expected.append(choices[int(np.argmax(totals))][1].strip())
    with checkpoint_engine(place / "model", RuntimeOptions(slots=4)) as engine:
        found = evaluate(items.task, items.items, engine)
    assert [item.prediction for item in found.items] == expected
    bundle = emit_bundle(place / "model", tmp_path / "bundle")
    with open_partial(bundle) as engine:
        shipped = evaluate(items.task, items.items, engine)
    assert [item.prediction for item in shipped.items] == expected and shipped.value == found.value
    assert 0 < found.value < 1


def test_a_compile_is_certified_by_accuracy(place: Path, tmp_path: Path) -> None:
    result = compile_tiny(place / "model", tmp_path / "out", "kl", 0.5, data=str(place / "piqa"), tasks=("piqa",))
    task = result.quality["tasks"]["piqa"]
    assert task["metric"] == "accuracy" and task["n"] == 20 and 0 < task["baseline"] < 1
    assert "accuracy_by_length" in json.dumps(task)
    lossy = compile_tiny(place / "model", tmp_path / "loss", "loss", 0.9, data=str(place / "piqa"), tasks=("piqa",))
    assert lossy.quality["tasks"]["piqa"]["verdict"] is not None

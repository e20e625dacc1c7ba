"""Validation and test items that exceed the context of a certificate do not end a compile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import Target
from moec.compiler.request.task_data import fit_splits, load_task_data
from moec.evaluation.long_items import Context
from moec.manifests.errors import ContextOverflow


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

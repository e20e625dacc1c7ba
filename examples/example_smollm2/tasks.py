"""Tasks of the example, built from the splits of its text.

| task | folder | item |
|---|---|---|
| perplexity | `prose` | a text of a few paragraphs |
| multiple choice | `next_sentence` | in the form of HellaSwag: the next sentence, and three others of like length |
| continuation | `continuation` | in the form of XSum: what the text says next, scored with Rouge |
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from example_smollm2.prose import SPLITS, Document, load_documents, write_lines

SEED = 20261125
TASKS = ("prose", "next_sentence", "continuation")
_COUNTS = {"train": 1_000, "validation": 1_000, "test": 2_500, "unseen": 2_500}
_PROSE_WORDS = 160
_CONTEXT_WORDS = (12, 80)
_ENDING_WORDS = (8, 30)
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class _Passage:
    """Sentences of one paragraph: those before, and the next one."""

    before: str
    after: str
    document: str


def make_tasks(texts: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Write the items of every task and split, and return their numbers."""
    counts: dict[str, dict[str, int]] = {task: {} for task in TASKS}
    for split in SPLITS:
        documents = load_documents(texts, split)
        passages = list(_passages(documents))
        random.Random(SEED).shuffle(passages)
        rows = {
            "prose": list(_prose(documents)),
            "next_sentence": list(_choices(passages)),
            "continuation": [{"document": item.before, "summary": item.after} for item in passages],
        }
        for task, items in rows.items():
            if task == "prose":
                random.Random(SEED).shuffle(items)
            kept = items[: _COUNTS[split]]
            write_lines(folder / task / f"{split}.jsonl", kept)
            counts[task][split] = len(kept)
    return counts


def _prose(documents: list[Document]) -> Iterator[dict[str, object]]:
    """Yield texts of whole paragraphs."""
    for document in documents:
        text: list[str] = []
        for paragraph in document.paragraphs:
            text.append(paragraph)
            if sum(len(part.split()) for part in text) >= _PROSE_WORDS:
                yield {"text": "\n\n".join(text)}
                text = []


def _passages(documents: list[Document]) -> Iterator[_Passage]:
    """Yield at most one passage of each paragraph."""
    for document in documents:
        for paragraph in document.paragraphs:
            sentences = _SENTENCE_ENDS.split(paragraph)
            for at in range(1, len(sentences)):
                before, after = " ".join(sentences[:at]), sentences[at]
                if _has_words(before, _CONTEXT_WORDS) and _has_words(after, _ENDING_WORDS):
                    yield _Passage(before, after, f"{document.source}/{document.page}")
                    break


def _has_words(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text.split()) <= bounds[1]


def _choices(passages: list[_Passage]) -> Iterator[dict[str, object]]:
    """Yield a passage with its next sentence and three next sentences of other passages, of the nearest lengths."""
    ranked = sorted(passages, key=lambda item: len(item.after))
    order = {id(item): at for at, item in enumerate(ranked)}
    for number, passage in enumerate(passages):
        draw = random.Random(f"{SEED} {number}")
        at = order[id(passage)]
        nearby = [item for item in ranked[max(0, at - 20) : at + 20] if item.document != passage.document]
        if len(nearby) < 3:
            continue
        endings = [item.after for item in draw.sample(nearby, 3)]
        label = draw.randrange(4)
        endings.insert(label, passage.after)
        yield {
            "activity_label": passage.document.split("/")[0],
            "ctx_a": passage.before, "ctx_b": "", "endings": endings, "label": label,
        }  # fmt: skip

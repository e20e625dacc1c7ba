"""Small data sets with the columns, types, splits and files of published ones. The texts are our own.

Sources: the data set cards and file lists of the named repositories on the hub, November 2026.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import ClassLabel, Features, Value
from datasets import Sequence as ListOf

Row = dict[str, Any]
TEXT, INTEGER = Value("string"), Value("int32")


@dataclass(frozen=True)
class PublishedSet:
    """A set.

    name: on the hub, with the configuration.
    task: the task that reads it.
    features: column types.
    row: makes row i of a split.
    sizes: rows of each split, in the order of the set.
    folder: configuration folder of its Parquet files; empty for `data`.
    """

    name: str
    task: str
    features: Mapping[str, Any]
    row: Callable[[str, int], Row]
    sizes: Mapping[str, int]
    folder: str

    def tables(self) -> datasets.DatasetDict:
        """Return the set as `datasets` holds it."""
        features = Features(dict(self.features))
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list(self.rows(split), features=features) for split in self.sizes}
        )

    def rows(self, split: str) -> list[Row]:
        """Return the rows of a split, which differ from those of the others."""
        return [self.row(split, at) for at in range(self.sizes[split])]

    def write_parquet(self, root: Path, parts: int = 1) -> Path:
        """Write the files of the repository on the hub, each split in some parts."""
        folder = root / (self.folder or "data")
        folder.mkdir(parents=True)
        for split, table in self.tables().items():
            for part in range(parts):
                name = f"{split}-{part:05}-of-{parts:05}.parquet"
                table.shard(parts, part, contiguous=True).to_parquet(str(folder / name))
        return root


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a CSV file with a line of names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _gsm8k(split: str, at: int) -> Row:
    return {
        "question": f"{split}: Ann has {at} apples and buys 2. How many has she?",
        "answer": f"She has {at} + 2 = <<{at}+2={at + 2}>>{at + 2} apples.\n#### {at + 2:,}",
    }


def _samsum(split: str, at: int) -> Row:
    is_blank = split == "train" and at == 3  # the set has one dialogue without text
    dialogue = "" if is_blank else f"Ann: {split} number {at}?\r\nBob: Yes, 2020-01-{at % 28 + 1:02}."
    return {"id": f"{split}-{at}", "dialogue": dialogue, "summary": f"Ann asks Bob about {at}."}


def _xsum(split: str, at: int) -> Row:
    return {"document": f"A town of {split} built {at} bridges.\nIt rained.", "summary": "Bridges.", "id": str(at)}


def _mmlu(split: str, at: int) -> Row:
    options = [str(at + shift) for shift in range(4)]
    return {"question": f"{split}: what is {at}?", "subject": "sums", "choices": options, "answer": at % 4}


def _hellaswag(split: str, at: int) -> Row:
    return {
        "ind": at, "activity_label": "Walking", "ctx_a": f"A man of {split} walks {at} miles.", "ctx_b": "he",
        "ctx": f"A man walks {at} miles. he", "endings": ["rests [step] now.", "flies.", "melts.", "sings."],
        "source_id": f"activitynet~{at}", "split": split, "split_type": "indomain",
        "label": "" if split == "test" else str(at % 4),
    }  # fmt: skip


def _piqa(split: str, at: int) -> Row:
    label = -1 if split == "test" else at % 2
    return {"goal": f"{split}: open jar {at}", "sol1": "Turn the lid.", "sol2": "Paint the lid.", "label": label}


def _winogrande(split: str, at: int) -> Row:
    answer = "" if split == "test" else str(at % 2 + 1)
    sentence = f"{split}: the cup {at} was not in the box because _ was small."
    return {"sentence": sentence, "option1": "the cup", "option2": "the box", "answer": answer}


def _truthfulqa(split: str, at: int) -> Row:
    first = {"choices": [f"{at} is a number.", "It is a colour."], "labels": [1, 0]}
    second = {"choices": [f"{at} is a number.", "A number.", "A colour."], "labels": [1, 1, 0]}
    return {"question": f"What is {at}?", "mc1_targets": first, "mc2_targets": second}


def _humaneval(split: str, at: int) -> Row:
    prompt = f'def add_{at}(x: int) -> int:\n    """Add {at}, for {split}."""\n'
    check = f"def check(candidate):\n    assert candidate(1) == {at + 1}\n"
    row = {"task_id": f"HumanEval/{at}", "prompt": prompt, "canonical_solution": f"    return x + {at}\n"}
    return row | {"test": check, "entry_point": f"add_{at}"}


def _wikitext(split: str, at: int) -> Row:
    texts = ("", f" = Heading {at} of {split} = \n", f" Line {at} of {split} .\n")
    return {"text": texts[at % 3]}


def _choices(labels: Any) -> Mapping[str, Any]:
    return {"choices": ListOf(TEXT), "labels": labels}


SETS = (
    PublishedSet("openai/gsm8k:main", "gsm8k", {"question": TEXT, "answer": TEXT}, _gsm8k,
                 {"train": 200, "test": 20}, "main"),
    PublishedSet("knkarthick/samsum", "samsum", {"id": TEXT, "dialogue": TEXT, "summary": TEXT}, _samsum,
                 {"train": 20, "validation": 10, "test": 10}, ""),
    PublishedSet("EdinburghNLP/xsum", "xsum", {"document": TEXT, "summary": TEXT, "id": TEXT}, _xsum,
                 {"train": 20, "validation": 10, "test": 10}, ""),
    PublishedSet("cais/mmlu:all", "mmlu",
                 {"question": TEXT, "subject": TEXT, "choices": ListOf(TEXT), "answer": ClassLabel(names=list("ABCD"))},
                 _mmlu, {"test": 30, "validation": 200, "dev": 5, "auxiliary_train": 9}, "all"),
    PublishedSet("Rowan/hellaswag", "hellaswag",
                 {"ind": INTEGER, "activity_label": TEXT, "ctx_a": TEXT, "ctx_b": TEXT, "ctx": TEXT,
                  "endings": ListOf(TEXT), "source_id": TEXT, "split": TEXT, "split_type": TEXT, "label": TEXT},
                 _hellaswag, {"train": 200, "test": 20, "validation": 20}, ""),
    PublishedSet("ybisk/piqa", "piqa",
                 {"goal": TEXT, "sol1": TEXT, "sol2": TEXT, "label": ClassLabel(names=["0", "1"])}, _piqa,
                 {"train": 200, "test": 20, "validation": 20}, "plain_text"),
    PublishedSet("allenai/winogrande:winogrande_xl", "winogrande",
                 {"sentence": TEXT, "option1": TEXT, "option2": TEXT, "answer": TEXT}, _winogrande,
                 {"train": 200, "test": 20, "validation": 20}, "winogrande_xl"),
    PublishedSet("truthfulqa/truthful_qa:multiple_choice", "truthfulqa",
                 {"question": TEXT, "mc1_targets": _choices(ListOf(INTEGER)), "mc2_targets": _choices(ListOf(INTEGER))},
                 _truthfulqa, {"validation": 300}, "multiple_choice"),
    PublishedSet("openai/openai_humaneval", "humaneval",
                 dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), TEXT),
                 _humaneval, {"test": 164}, "openai_humaneval"),
    PublishedSet("Salesforce/wikitext:wikitext-2-raw-v1", "perplexity", {"text": TEXT}, _wikitext,
                 {"test": 30, "train": 60, "validation": 30}, "wikitext-2-raw-v1"),
)  # fmt: skip
BY_NAME = {each.name.partition("/")[2].partition(":")[0]: each for each in SETS}

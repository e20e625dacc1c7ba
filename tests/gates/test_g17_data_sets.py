"""G17: data sets load in the forms in which they are published, and each split is the one that was asked for.

Small sets have the columns, types, splits and files of published ones. The texts are our own. Sources: the data set
cards and file lists of the named repositories on the hub, November 2026.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import datasets
from datasets import ClassLabel, Features, Value
from datasets import Sequence as ListOf

from moec.evaluation.data import SPLITS, ItemSet, load_items, load_splits
from moec.manifests.errors import DataError

pytestmark = [pytest.mark.gate("G17"), pytest.mark.filterwarnings("ignore")]
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
IDS = [each.name for each in SETS]
HIDDEN = {"Rowan/hellaswag", "ybisk/piqa", "allenai/winogrande:winogrande_xl"}
"""Sets whose test split hides its answers."""


@pytest.fixture(autouse=True)
def nothing_in_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a home folder, which must stay empty."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


def prompts(items: ItemSet) -> list[str]:
    """Return the inputs of the items."""
    return [item[items.task.input_fields[0]] for item in items.items]


def check(published: PublishedSet, source: str | Path) -> None:
    """Load a set for `compile` and for `eval`, and compare it with what the set has."""
    splits = load_splits(source, published.task)
    kept = {name: sum(f"{name}" in prompt for prompt in prompts(getattr(splits, name))) for name in SPLITS}
    if published.name in HIDDEN:
        assert splits.hidden == ("test",)
        assert kept["validation"] == len(splits.validation) == published.sizes["validation"]
        assert len(splits.train) + len(splits.test) == published.sizes["train"]
        assert splits.test.source.endswith("(test share)")
        with pytest.raises(DataError, match="hides its answer"):
            load_items(source, published.task)
        assert len(load_items(source, published.task, "validation")[0]) == published.sizes["validation"]
        return
    assert splits.hidden == ()
    if len(published.sizes) == 1:  # one split is divided, and evaluated as a whole
        assert sum(len(getattr(splits, name)) for name in SPLITS) == next(iter(published.sizes.values()))
        for asked in (None, next(iter(published.sizes))):
            assert len(load_items(source, published.task, asked)[0]) == next(iter(published.sizes.values()))
        return
    items, _ = load_items(source, published.task)
    assert items.items == splits.test.items and len(items) + items.skipped == published.sizes["test"]
    assert kept["test"] == len(items), "test items come from the test split alone"
    assert not items.source.endswith("share)")
    for name in SPLITS:
        is_share = getattr(splits, name).source.endswith(f"({name} share)")
        lacks = name not in published.sizes or (name == "validation" and "train" not in published.sizes)
        base = "train" if "train" in published.sizes else "validation"
        assert is_share == (lacks or (name == base and not set(SPLITS) <= set(published.sizes)))


@pytest.mark.parametrize("published", SETS, ids=IDS)
def test_parquet_files_as_on_the_hub(published: PublishedSet, tmp_path: Path, nothing_in_home: Path) -> None:
    check(published, published.write_parquet(tmp_path / "parts", parts=1 if published is SETS[0] else 3))
    assert not any(nothing_in_home.iterdir())


@pytest.mark.parametrize("published", SETS, ids=IDS)
def test_folders_that_datasets_saved(published: PublishedSet, tmp_path: Path) -> None:
    published.tables().save_to_disk(str(tmp_path / "saved"))
    check(published, tmp_path / "saved")


@pytest.mark.parametrize("published", SETS, ids=IDS)
def test_json_lines(published: PublishedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines need no extra."""
    for split in published.sizes:
        write_jsonl(tmp_path / f"{split}.jsonl", published.rows(split))
    monkeypatch.setitem(sys.modules, "datasets", None)
    check(published, tmp_path)


def test_all_forms_give_the_same_texts(tmp_path: Path) -> None:
    """A text that looks like a date stays a text, and line ends stay as they are."""
    samsum = BY_NAME["samsum"]
    for split in SPLITS:
        rows = samsum.rows(split)
        write_jsonl(tmp_path / "lines" / f"{split}.jsonl", rows)
        write_csv(tmp_path / "csv" / f"{split}.csv", rows)
        (tmp_path / "list").mkdir(exist_ok=True)
        (tmp_path / "list" / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    samsum.write_parquet(tmp_path / "parquet")
    samsum.tables().save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "arrow").mkdir()
    for split in SPLITS:
        saved = next((tmp_path / "saved" / split).glob("*.arrow"))
        os.link(saved, tmp_path / "arrow" / f"{split}.arrow")
    wanted = load_splits(tmp_path / "lines")
    assert wanted.train.skipped == 1 and "\r\n" in wanted.train.items[0]["dialogue"]
    for form in ("csv", "list", "parquet", "saved", "arrow"):
        found = load_splits(tmp_path / form)
        assert [getattr(found, name).items for name in SPLITS] == [getattr(wanted, name).items for name in SPLITS]


def test_the_release_of_gsm8k_lacks_a_split(tmp_path: Path) -> None:
    """Its folder has two files of the set, and files of another form of the answers."""
    gsm8k = BY_NAME["gsm8k"]
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", gsm8k.rows(split))
        write_jsonl(tmp_path / f"{split}_socratic.jsonl", [{"question": "not this one", "answer": "#### 1"}])
    check(gsm8k, tmp_path)


def test_the_release_of_samsum_calls_a_split_val(tmp_path: Path) -> None:
    samsum = BY_NAME["samsum"]
    for name, split in (("train", "train"), ("val", "validation"), ("test", "test")):
        (tmp_path / f"{name}.json").write_text(json.dumps(samsum.rows(split), indent=1), encoding="utf-8")
    check(samsum, tmp_path)


def test_several_configurations_are_named(tmp_path: Path) -> None:
    mmlu = BY_NAME["mmlu"]
    mmlu.write_parquet(tmp_path)
    os.rename(tmp_path / "all", tmp_path / "astronomy")
    mmlu.write_parquet(tmp_path)
    with pytest.raises(DataError, match="holds the configurations all and astronomy") as caught:
        load_splits(tmp_path, "mmlu")
    assert str(tmp_path / "all") in str(caught.value.hint)
    check(mmlu, tmp_path / "all")


def test_a_sample_of_plain_text(tmp_path: Path) -> None:
    """C4 has a time next to each text, and one file of JSON lines."""
    rows = [
        {"text": f"Page {at}.\nMore.", "timestamp": "2019-04-25T12:57:54Z", "url": f"page/{at}"} for at in range(200)
    ]
    path = tmp_path / "c4-train.00000-of-01024.json"
    write_jsonl(path, rows)
    items, _ = load_items(path)
    assert items.task.name == "perplexity" and [item["text"] for item in items.items] == [row["text"] for row in rows]
    assert len(load_splits(path).test) == pytest.approx(100, abs=30)


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_a_damaged_table_is_one_sentence(tmp_path: Path, name: str) -> None:
    gsm8k = BY_NAME["gsm8k"]
    whole = next((gsm8k.write_parquet(tmp_path / "whole") / "main").glob("train*")).read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2], b"PAR1" + bytes(500) + b"PAR1"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_items(tmp_path / name, "gsm8k")
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value) and caught.value.hint


def test_two_forms_of_a_split_are_refused(tmp_path: Path) -> None:
    gsm8k = BY_NAME["gsm8k"]
    gsm8k.write_parquet(tmp_path / "set")
    write_jsonl(tmp_path / "set/main/train.jsonl", gsm8k.rows("train"))
    with pytest.raises(
        DataError, match=r"expected one form of the split `train`, found files with .jsonl and .parquet"
    ):
        load_splits(tmp_path / "set/main")


def test_a_fault_in_a_part_names_the_part(tmp_path: Path) -> None:
    gsm8k = BY_NAME["gsm8k"]
    rows = gsm8k.rows("train")
    write_jsonl(tmp_path / "train-00000-of-00002.jsonl", rows[:100])
    write_jsonl(tmp_path / "train-00001-of-00002.jsonl", [*rows[100:], {"question": "q", "answer": "none"}])
    with pytest.raises(DataError, match=r"train-00001-of-00002\.jsonl:101`: the field `answer` holds no number"):
        load_items(tmp_path)

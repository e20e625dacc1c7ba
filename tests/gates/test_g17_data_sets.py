"""G17: data sets load in the forms in which they are published, and each split is the one that was asked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from moec.evaluation.data import SPLITS, ItemSet, load_items, load_splits
from moec.manifests.errors import DataError
from tests.published_sets import BY_NAME, SETS, PublishedSet, write_csv, write_jsonl

pytestmark = [pytest.mark.gate("G17"), pytest.mark.filterwarnings("ignore")]
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

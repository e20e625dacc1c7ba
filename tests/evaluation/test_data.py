"""Splits that are disjoint and stable, subsets, few-shot examples, hub sets, and faults with file and line."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import Target
from moec.compiler.request.task_data import load_task_data
from moec.evaluation.data import SPLITS, item_key, items_sha256, load_items, load_splits, split_of
from moec.evaluation.tasks import find_task
from moec.manifests.errors import DataError, MissingDependency, OptionError

GSM8K = find_task("gsm8k")
TEXT = find_task("perplexity")


def _folder(write, problems, name: str = "set", sizes=(3, 4, 5)):
    start = 0
    for split, size in zip(SPLITS, sizes, strict=True):
        path = write(f"{name}/{split}.jsonl", problems(start, size))
        start += size
    return path.parent


def test_folder_of_three_files(write, problems) -> None:
    data = load_splits(_folder(write, problems))
    assert data.task is GSM8K
    assert (len(data.train), len(data.validation), len(data.test), data.repeated) == (3, 4, 5, 0)
    assert data.test.items[0] == {"question": "What is 7 + 1?", "answer": "#### 8"}


def test_folder_with_a_folder_per_task(write, problems, tmp_path) -> None:
    _folder(write, problems, "both/gsm8k")
    assert load_splits(tmp_path / "both").task is GSM8K
    write("both/samsum/test.jsonl", [{"dialogue": "A: hi", "summary": "A greets."}])
    assert len(load_splits(tmp_path / "both", "gsm8k").test) == 5
    assert load_items(tmp_path / "both", "samsum")[0].task.name == "samsum"
    with pytest.raises(DataError, match=r"holds the tasks gsm8k and samsum .*--task"):
        load_splits(tmp_path / "both")


def test_single_file_is_divided_20_30_50(write, problems) -> None:
    path = write("all.jsonl", problems(0, 2000))
    data = load_splits(str(path))
    sets = (data.train, data.validation, data.test)
    keys = [{item_key(GSM8K, item) for item in part.items} for part in sets]
    assert [len(part) for part in sets] == [len(key) for key in keys]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 2000
    # binomial standard deviations are 18, 20 and 22
    assert [len(part) for part in sets] == pytest.approx([400, 600, 1000], abs=70)
    shuffled = load_splits(write("shuffled.jsonl", problems(0, 2000)[::-1]))
    assert {item_key(GSM8K, item) for item in shuffled.test.items} == keys[2]


def test_the_split_of_an_item_never_changes() -> None:
    found = [split_of(TEXT, {"text": f"text {i}"}) for i in range(40)]
    assert found[:6] == ["test", "test", "test", "validation", "test", "test"]
    assert set(found) == set(SPLITS)


@given(st.text(min_size=1, max_size=30))
def test_case_and_white_space_do_not_move_an_item(text: str) -> None:
    other = "  " + "\n".join(text.lower().split()) + "\t"
    assert split_of(TEXT, {"text": text}) == split_of(TEXT, {"text": other})


def test_repeated_inputs_stay_where_they_are_held_out_longest(write, problems) -> None:
    write("set/train.jsonl", [*problems(0, 3), *problems(20, 1), {"question": "what IS  5 + 1?", "answer": "#### 6"}])
    write("set/validation.jsonl", [*problems(3, 2), *problems(20, 1), *problems(3, 1)])
    folder = write("set/test.jsonl", problems(5, 2)).parent
    data = load_splits(folder)
    assert (len(data.train), len(data.validation), len(data.test), data.repeated) == (3, 3, 2, 3)


def test_split_without_items_of_its_own(write, problems) -> None:
    folder = _folder(write, problems)
    write("set/train.jsonl", problems(7, 2))
    with pytest.raises(DataError, match="split `train` has no items of its own"):
        load_splits(folder)
    with pytest.raises(DataError, match=r"has no items of its own .*more items"):
        load_splits(write("one.jsonl", problems(0, 1)))


def test_a_missing_split_is_a_share_and_is_named(write, problems) -> None:
    write("set/train.jsonl", problems(0, 400))
    folder = write("set/test.jsonl", problems(400, 5)).parent
    data = load_splits(folder)
    assert len(data.train) + len(data.validation) == 400 and len(data.test) == 5
    assert data.validation.source == f"{folder / 'train.jsonl'} (validation share)"
    assert len(load_items(folder)[0]) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "the field `answer` of task `gsm8k` is missing"),
        ({"question": 3, "answer": "#### 1"}, "expected text in `question`, found int"),
        ({"question": None, "answer": "#### 1"}, "expected text in `question`, found NoneType"),
        ({"question": "q", "answer": "unknown"}, "the field `answer` holds no number"),
        ('{"question": "\\ud800", "answer": "#### 1"}', "`question` holds half a surrogate pair"),
    ],
)
def test_faulty_items_name_file_and_line(write, problems, row: object, message: str) -> None:
    path = write("bad.jsonl", [*problems(0, 2), "", row])
    with pytest.raises(DataError) as caught:
        load_items(path)
    assert f"`{path}:4`: {message}" in str(caught.value)
    assert caught.value.hint


def test_task_whose_fields_are_missing(write, problems) -> None:
    path = write("a.jsonl", problems(0, 2))
    with pytest.raises(DataError, match=r"a\.jsonl:1`: the field `dialogue` of task `samsum` is missing"):
        load_items(path, "samsum")
    with pytest.raises(DataError, match=r"b\.jsonl:2`: expected the fields of a known task, found `body`"):
        load_items(write("b.jsonl", ["", {"body": "x"}]))


def test_blank_items_are_skipped_and_counted(write) -> None:
    items, _ = load_items(write("a.jsonl", [{"text": "one"}, {"text": "  "}, {"text": "two"}]))
    assert (len(items), items.skipped) == (2, 1)
    with pytest.raises(DataError, match=r"b\.jsonl:1`: expected text, found a blank field in every item"):
        load_items(write("b.jsonl", [{"text": ""}]))


def test_texts_stay_as_they_are_written(write) -> None:
    texts = ["2020-01-01", "1e5", " lead\r\ntrail ", "true"]
    path = write("a.jsonl", [{"text": text, "n": n} for text, n in zip(texts, [1, "x", None, [2]], strict=True)])
    items, _ = load_items(path)
    assert [item["text"] for item in items.items] == texts
    assert set(items.items[0]) == {"text"}


def test_identity_follows_exact_texts_and_order(write, problems) -> None:
    items, _ = load_items(write("a.jsonl", problems(0, 3)))
    assert items.sha256 == items_sha256(GSM8K, problems(0, 3))
    changed = problems(0, 3)
    changed[1]["answer"] += " "
    other = [problems(0, 3)[::-1], problems(0, 2), changed]
    assert len({items.sha256, *(items_sha256(GSM8K, rows) for rows in other)}) == 4


def test_subsets_are_stable_and_nested(write, problems) -> None:
    items, _ = load_items(write("a.jsonl", problems(0, 100)))
    small, large = items.limit(10), items.limit(40)
    keys = [[item_key(GSM8K, item) for item in part.items] for part in (small, large, items)]
    assert [len(part) for part in keys] == [10, 40, 100]
    assert set(keys[0]) < set(keys[1])
    assert keys[1] == [key for key in keys[2] if key in set(keys[1])]
    assert keys[0] != keys[2][:10]
    assert items.limit(10) == small
    assert items.limit(10, seed=1) != small
    assert items.limit(None) == items == items.limit(1000)
    backwards, _ = load_items(write("b.jsonl", problems(0, 100)[::-1]))
    assert {item_key(GSM8K, item) for item in backwards.limit(10).items} == set(keys[0])
    with pytest.raises(OptionError, match="`--limit` must be at least 1, found 0"):
        items.limit(0)
    assert items.sample(10) == backwards.sample(10) == items.sample(40)[:10]
    assert [item_key(GSM8K, item) for item in items.sample(10)] != keys[0], "its own order is no sample"
    assert sorted(items.sample(10), key=items.items.index) == list(small.items)
    assert sorted(items.order()) == list(range(100)) != items.order()


def test_shots_come_from_train_and_are_not_evaluated(write, problems) -> None:
    folder = _folder(write, problems)
    items, shots = load_items(folder, shots=2)
    assert (len(items), len(shots)) == (5, 2)
    assert {item_key(GSM8K, shot) for shot in shots} <= {item_key(GSM8K, i) for i in problems(0, 3)}
    path = write("all.jsonl", problems(0, 200))
    items, shots = load_items(path, shots=3)
    assert (len(items), len(shots)) == (197, 3)
    assert all(split_of(GSM8K, shot) == "train" for shot in shots)
    assert not [item for item in items.items if item in shots]
    assert load_items(path, shots=3)[1] == shots


def test_one_split_of_a_file(write, problems) -> None:
    path = write("all.jsonl", problems(0, 200))
    parts = [load_items(path, split=name)[0].items for name in SPLITS]
    assert sum(map(len, parts)) == 200
    assert all(split_of(GSM8K, item) == name for name, part in zip(SPLITS, parts, strict=True) for item in part)


def test_unusable_options(write, problems) -> None:
    folder = _folder(write, problems)
    with pytest.raises(OptionError, match=r"`dev` is not a split .*train, validation, test"):
        load_items(folder, split="dev")
    with pytest.raises(OptionError, match="must not be negative"):
        load_items(folder, shots=-1)
    with pytest.raises(OptionError, match="has 3 train items for 4 shots"):
        load_items(folder, shots=4)
    with pytest.raises(OptionError, match="takes no solved examples"):
        load_items(write("t.jsonl", [{"text": "a"}]), shots=1)
    with pytest.raises(DataError, match="no items are left"):
        load_items(folder, split="train", shots=3)
    with pytest.raises(DataError, match="`nowhere` does not exist"):
        load_splits("nowhere")
    with pytest.raises(DataError, match=r"`data/nowhere.jsonl` does not exist"):
        load_splits("data/nowhere.jsonl")


class _Hub(types.ModuleType):
    """Stands in for `datasets`: a table of sets by (name, configuration)."""

    def __init__(self, sets: dict[tuple[str, str | None], Any]) -> None:
        super().__init__("datasets")
        self.sets = sets
        self.exceptions = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
        self.DownloadConfig = lambda max_retries: max_retries
        self.disable_progress_bars = lambda: None

    def load_dataset(self, name: str, configuration: str | None, **options: object) -> Any:
        assert not str(options["cache_dir"]).startswith(str(Path.home()))
        if (name, configuration) not in self.sets:
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nlong story")
        return self.sets[name, configuration]


def test_hub_sets_are_completed_to_three_splits(problems, monkeypatch) -> None:
    sets = {
        ("a/full", None): {"train": problems(0, 5), "validation": problems(5, 5), "test": problems(10, 5)},
        ("a/two", "main"): {"train": problems(0, 500), "test": problems(500, 5)},
        ("a/one", None): {"test": problems(0, 500)},
        ("a/odd", None): {"extra": problems(0, 5)},
        ("a/bad", None): {"train": problems(0, 2), "test": [{"question": "q", "answer": 1}]},
    }
    monkeypatch.setitem(sys.modules, "datasets", _Hub(sets))
    full = load_splits("a/full")
    assert (len(full.train), len(full.validation), len(full.test)) == (5, 5, 5)
    two = load_splits("a/two:main")
    assert len(two.train) + len(two.validation) == 500
    assert len(two.train) == pytest.approx(200, abs=40)  # standard deviation 11
    assert len(two.test) == 5
    one = load_splits("a/one")
    assert len(one.test) == pytest.approx(250, abs=40)
    assert len(load_items("a/two:main", shots=2)[0]) == 5
    with pytest.raises(DataError, match="expected the splits train, validation, test, found extra"):
        load_splits("a/odd")
    with pytest.raises(DataError, match="`hub:a/bad/test:1`: expected text in `answer`, found int"):
        load_splits("a/bad")


def mmlu_rows(first: int, count: int, answer: object = 1) -> list[dict[str, Any]]:
    """Rows as `cais/mmlu` has them."""
    return [
        {"question": f"What is {n}?", "subject": "sums", "choices": ["one", "two", "three", "four"], "answer": answer}
        for n in range(first, first + count)
    ]


def test_a_hub_set_without_a_train_split_is_scored_on_its_own_test_split(monkeypatch) -> None:
    """`cais/mmlu:all` has validation and test: calibration takes validation items, never test items."""
    sets = {
        ("cais/mmlu", "all"): {"auxiliary_train": [{}], "validation": mmlu_rows(0, 200), "test": mmlu_rows(200, 50)}
    }
    monkeypatch.setitem(sys.modules, "datasets", _Hub(sets))
    items, examples = load_items("cais/mmlu:all", "mmlu", shots=2)
    assert len(items) == 50 and items.source == "hub:cais/mmlu:all/test" and len(examples) == 2
    assert all(f"What is {n}?" in item["question"] for n, item in enumerate(items.items, 200))
    splits = load_splits("cais/mmlu:all", "mmlu")
    assert splits.test.items == items.items and splits.hidden == ()
    assert len(splits.train) + len(splits.validation) == 200
    assert len(splits.train) == pytest.approx(80, abs=35)  # standard deviation 7
    assert splits.train.source == "hub:cais/mmlu:all/validation (train share)"


@pytest.mark.parametrize("hidden", [-1, "-1", ""])
def test_hidden_answers_of_other_splits_are_no_hindrance(monkeypatch, hidden: object) -> None:
    rows = {"train": mmlu_rows(0, 100), "validation": mmlu_rows(100, 20), "test": mmlu_rows(120, 20, hidden)}
    monkeypatch.setitem(sys.modules, "datasets", _Hub({("a/hidden", None): rows}))
    items, _ = load_items("a/hidden", "mmlu", split="validation", shots=1)
    assert len(items) == 20 and items.source == "hub:a/hidden/validation"
    with pytest.raises(DataError, match=r"`hub:a/hidden/test:1`: the row hides its answer") as caught:
        load_items("a/hidden", "mmlu")
    assert "another `--split`" in str(caught.value.hint)
    splits = load_splits("a/hidden", "mmlu")
    assert splits.hidden == ("test",) and splits.test.source == "hub:a/hidden/train (test share)"
    assert len(splits.validation) == 20 and len(splits.train) + len(splits.test) == 100
    notes: list[str] = []
    load_task_data(CompileOptions(Target("kl", 0.1), data="a/hidden", tasks=("mmlu",)), notes.append)
    assert notes[0] == "mmlu: the split `test` hides its answers and is not used"
    assert "validation from `hub:a/hidden/validation` (20 items), " in notes[1]
    assert "test from `hub:a/hidden/train (test share)` (" in notes[1]


def test_faults_of_splits_that_are_not_used_are_not_looked_at(problems, monkeypatch) -> None:
    sets = {("a/bad", None): {"train": [{"question": 5}], "validation": problems(0, 5), "test": problems(5, 5)}}
    monkeypatch.setitem(sys.modules, "datasets", _Hub(sets))
    assert len(load_items("a/bad", "gsm8k")[0]) == 5
    with pytest.raises(DataError, match="`hub:a/bad/train:1`"):
        load_items("a/bad", "gsm8k", shots=1)


def test_hub_out_of_reach(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Hub({}))
    with pytest.raises(DataError) as caught:
        load_splits("openai/gsm8k")
    assert "is not a file here and could not be loaded from the hub: Couldn't reach 'openai/gsm8k'" in str(caught.value)
    assert "long story" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match="the hub set `openai/gsm8k` needs the package `datasets`"):
        load_splits("openai/gsm8k")

"""Check the items of a data set, and divide them into disjoint splits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moec.manifests.codec import canonical_json
from moec.manifests.errors import DataError, OptionError

from .sources import SPLITS, DataSource, open_source
from .tasks import TASKS, HiddenAnswer, Item, Task, find_task, infer_task
from .text_files import Rows

SHARES = {"train": 20, "validation": 30, "test": 50}
"""Shares of a divided set, in %: calibration, search, certification."""
MAX_CHARACTERS = 1 << 30
"""Characters of the items of a split. The train split of XSum has 480 million."""


@dataclass(frozen=True, slots=True)
class ItemSet:
    """Checked items of one task, in the order of reading.

    skipped: number of items that were left out because a field is blank.
    """

    task: Task
    source: str
    items: tuple[Item, ...]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.items)

    @property
    def sha256(self) -> str:
        """Identity of the set: a digest of task and exact texts, in order."""
        return items_sha256(self.task, self.items)

    def limit(self, count: int | None, seed: int = 0) -> ItemSet:
        """Return `count` items chosen by a hash of seed and text, in file order; all if count is None or too large.

        The choice is independent of the file's order. A smaller subset is inside a larger one with the same seed.
        Raises OptionError if count is below 1.
        """
        if count is None:
            return self
        if count < 1:
            raise OptionError(f"`--limit` must be at least 1, found {count}", "leave it out to take all items")
        return replace(self, items=tuple(self.items[at] for at in sorted(self.order(seed)[:count])))

    def order(self, seed: int = 0) -> list[int]:
        """Return the indices of the items, sorted by a hash of seed and text. Any first part of them is a sample.

        A file may be sorted, by subject or by source, so its own first items are none.
        """
        ranks = ((_digest(f"limit {seed} {item_key(self.task, item)}"), at) for at, item in enumerate(self.items))
        return [at for _, at in sorted(ranks)]

    def sample(self, count: int, seed: int = 0) -> tuple[Item, ...]:
        """Return the first items by `order`."""
        return tuple(self.items[at] for at in self.order(seed)[:count])


@dataclass(frozen=True, slots=True)
class SplitData:
    """Three disjoint sets.

    repeated: number of dropped items, whose input occurs twice or in a set that is held out longer.
    hidden: splits of the set without public answers. Their items are shares of another split.
    """

    task: Task
    train: ItemSet
    validation: ItemSet
    test: ItemSet
    repeated: int
    hidden: tuple[str, ...] = ()

    @property
    def sets(self) -> tuple[tuple[str, ItemSet], ...]:
        """Name and set of each split."""
        return (("train", self.train), ("validation", self.validation), ("test", self.test))


Change = Callable[[Task], Task]
"""Returns a task with other prompts or another metric."""


def unchanged(task: Task) -> Task:
    """Return the task as it is."""
    return task


def item_key(task: Task, item: Item) -> str:
    """Return the normalised item: its input in lower case, with runs of white space as one space."""
    return " ".join(" ".join(item[name] for name in task.input_fields).lower().split())


def items_sha256(task: Task, items: Iterable[Item]) -> str:
    """Return a digest of the task's name, its settings and the exact texts of all fields, in order."""
    digest = hashlib.sha256(task.name.encode())
    if task.settings:
        digest.update(canonical_json(dict(task.settings)))
    for item in items:
        for name in task.fields:
            digest.update(hashlib.sha256(item[name].encode()).digest())
    return digest.hexdigest()


def split_of(task: Task, item: Item) -> str:
    """Return the split of an item if there are no files for splits: by SHA-256 of the normalised item, 20/30/50 %."""
    return _share_of(task, item, SPLITS)


def load_splits(source: str | Path, task: str | Task | None = None, change: Change = unchanged) -> SplitData:
    """Load train, validation and test items, disjoint in their normalised inputs.

    source: a folder, a file or a hub name, see below.
    task: the task or its name; None: inferred from the fields.
    change: returns the task with other prompts or another metric.

    A folder has files of the splits train, validation (or valid, val) and test. They may be in its folder `data`, or in
    one with the name of the task. Files are JSON Lines, a JSON list, CSV, Parquet or Arrow. A folder may also be one
    that `datasets` saved.
    A hub name is `owner/set` or `owner/set:configuration`.
    Splits that a folder or a hub set lacks, or whose answers it hides, are shares of its train split. Without a train
    split they are shares of its validation split. One file, or one split alone, is divided by `split_of`. An input
    that occurs in several splits stays in the split that is held out longest.
    Raises DataError (with file and line if there is one), OptionError, MissingDependency.
    """
    hidden = list[str]()
    chosen, parts, _ = _read_parts(source, task, change, SPLITS, hidden)
    sets = _divided(chosen, parts)
    seen: set[str] = set()
    unique_sets: dict[str, ItemSet] = {}
    repeated = 0
    for name in reversed(SPLITS):
        unique_items = []
        for item in sets[name].items:
            key = item_key(chosen, item)
            if key not in seen:
                seen.add(key)
                unique_items.append(item)
        unique = replace(sets[name], items=tuple(unique_items))
        repeated += len(sets[name]) - len(unique)
        if not len(unique):
            raise DataError(
                f"`{source}`: the split `{name}` has no items of its own", "give more items, or one file per split"
            )
        unique_sets[name] = unique
    return SplitData(
        chosen, unique_sets["train"], unique_sets["validation"], unique_sets["test"], repeated, tuple(hidden)
    )


def load_items(
    source: str | Path,
    task: str | Task | None = None,
    split: str | None = None,
    shots: int = 0,
    seed: int = 0,
    change: Change = unchanged,
) -> tuple[ItemSet, tuple[Item, ...]]:
    """Return the items to evaluate, and `shots` solved examples from the train split, which are not among the items.

    split: None means the test split of a folder or hub set. A single file, or the only split of a set, is used as a
        whole, and its train share gives the examples.
    Unused splits are not checked. A split that hides its answers is refused.
    Raises the errors of `load_splits`. Raises OptionError for an unknown split or too many shots.
    """
    if split not in (None, *SPLITS):
        raise OptionError(f"`{split}` is not a split", f"choose one of {', '.join(SPLITS)}")
    if shots < 0:
        raise OptionError(f"`--shots` must not be negative, found {shots}", "leave it out for none")
    wanted = tuple(name for name in SPLITS if name == (split or "test") or (shots and name == "train"))
    chosen, parts, only = _read_parts(source, task, change, wanted)
    if shots and chosen.answer_field is None:
        raise OptionError(f"task `{chosen.name}` scores plain text and takes no solved examples", "drop `--shots`")
    sets = _divided(chosen, parts)
    whole = "file" in parts and split in (None, only)
    items = parts["file"] if whole else sets[split or "test"]
    examples = sets["train"].limit(shots, seed).items if shots else ()
    if len(examples) < shots:
        raise OptionError(f"`{source}` has {len(examples)} train items for {shots} shots", "lower `--shots`")
    shown = {item_key(chosen, item) for item in examples}
    items = replace(items, items=tuple(item for item in items.items if item_key(chosen, item) not in shown))
    if not len(items):
        raise DataError(f"`{source}`: no items are left to evaluate", "give more items")
    return items, examples


def _read_parts(
    source: str | Path,
    task: str | Task | None,
    change: Change,
    wanted: Sequence[str],
    hidden: list[str] | None = None,
) -> tuple[Task, dict[str, ItemSet], str]:
    """Return the task, the wanted sets by split name, and the name of the only split if there is one.

    A single file, or a set of one split, has the name `file`.

    hidden: receives the names of splits that hide their answers and are replaced; None: none are replaced.
    """
    chosen = find_task(task) if isinstance(task, str) else task
    data = open_source(source, [chosen.name] if chosen else list(TASKS))
    if chosen is None:
        first = data.rows(next(name for name in (*wanted, *SPLITS, "file") if name in data.readers))
        place, value = first.first()
        chosen = infer_task(value, place)
    chosen = change(chosen)
    if data.is_file:
        return chosen, {"file": check_items(chosen, data.rows("file"))}, data.only
    return chosen, _parts(chosen, data, wanted, hidden), ""


def check_items(task: Task, rows: Rows) -> ItemSet:
    """Return the task's fields of every row. Items with a blank field are skipped and counted.

    Raises DataError with the place if a field is missing, is not text, or has an answer that cannot be scored.
    """
    items: list[Item] = []
    count, characters, first_place = 0, 0, ""
    for place, value in rows.read({*task.row_fields, *task.fields}):
        count, first_place = count + 1, first_place or place
        row = value if task.read is None else _read_row(task, place, value)
        item = {name: _text(task, place, row, name) for name in task.fields}
        characters += sum(map(len, item.values()))
        if characters > MAX_CHARACTERS:
            raise DataError(
                f"{place}: expected at most {MAX_CHARACTERS} characters in all items", "give a part of the data"
            )
        if not all(text.strip() for text in item.values()):
            continue
        fault = task.answer_fault(item)
        if fault:
            raise DataError(
                f"{place}: the field `{task.answer_field}` {fault}",
                f"correct the item, or choose another task than `{task.name}`",
            )
        items.append(item)
    if not items:
        raise DataError(
            f"{first_place}: expected text, found a blank field in every item",
            f"fill in the fields {', '.join(task.fields)}",
        )
    return ItemSet(task, rows.source, tuple(items), count - len(items))


def _read_row(task: Task, place: str, value: dict[str, object]) -> dict[str, object]:
    """Convert a row of the data set's form to the task's own fields. A row with these fields is unchanged.

    Raises DataError.
    """
    if isinstance(value.get("choices"), str):
        return value
    hint = f"task `{task.name}` needs rows of the fields {', '.join(task.row_fields)}, as on the hub"
    missing = [name for name in task.row_fields if name not in value]
    if missing or task.read is None:
        raise DataError(f"{place}: the field `{missing[0]}` of task `{task.name}` is missing", hint)
    try:
        return dict(task.read(value))
    except HiddenAnswer as error:
        raise DataError(f"{place}: the row {error}", "choose another `--split`, such as `validation`") from error
    except ValueError as error:
        raise DataError(f"{place}: the row {error}", hint) from error


def _text(task: Task, place: str, value: dict[str, object], name: str) -> str:
    hint = f"task `{task.name}` needs the fields {', '.join(task.fields)}, each text"
    if name not in value:
        raise DataError(f"{place}: the field `{name}` of task `{task.name}` is missing", hint)
    text = value[name]
    if not isinstance(text, str):
        raise DataError(f"{place}: expected text in `{name}`, found {type(text).__name__}", hint)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: `{name}` holds half a surrogate pair, which is not text", hint) from error
    return text


def _divided(task: Task, parts: dict[str, ItemSet]) -> dict[str, ItemSet]:
    """Return the sets by split: a single file is divided 20/30/50 %, other sources are unchanged."""
    return _portions(task, parts["file"], SPLITS) if "file" in parts else parts


def _parts(task: Task, data: DataSource, wanted: Sequence[str], hidden: list[str] | None) -> dict[str, ItemSet]:
    """Return the wanted splits. Splits that the set lacks are shares of one that it has.

    Only wanted splits are read and checked.
    hidden: as in `_read_parts`.
    """
    if hidden is not None:
        hidden += [name for name in data.readers if _hides_answers(task, data.rows(name))]
    present = [name for name in SPLITS if name in data.readers and name not in (hidden or ())] or list(data.readers)
    base = present[0]
    shared = [name for name in SPLITS if name not in present]
    shared = [name for name in SPLITS if name in (base, *shared)] if shared else []
    parts = {name: check_items(task, data.rows(name)) for name in wanted if name not in shared}
    if not set(wanted) & set(shared):
        return parts
    portions = _portions(task, check_items(task, data.rows(base)), shared)
    return {name: parts[name] if name in parts else portions[name] for name in wanted}


def _hides_answers(task: Task, rows: Rows) -> bool:
    """Return whether the first row of a split shows that its answers are not public."""
    if task.read is None:
        return False
    try:
        task.read(rows.first()[1])
    except HiddenAnswer:
        return True
    except (ValueError, KeyError):
        pass  # reported with its place if the split is used
    return False


def _portions(task: Task, whole: ItemSet, names: Sequence[str]) -> dict[str, ItemSet]:
    homes = [_share_of(task, item, names) for item in whole.items]
    return {
        name: replace(
            whole,
            source=f"{whole.source} ({name} share)",
            items=tuple(item for item, home in zip(whole.items, homes, strict=True) if home == name),
        )
        for name in names
    }


def _share_of(task: Task, item: Item, names: Sequence[str]) -> str:
    """Choose one of `names`, in proportion to SHARES, by the first 8 bytes of the digest of the normalised item."""
    total = sum(SHARES[name] for name in names)
    bucket = int(_digest(item_key(task, item))[:16], 16) * total >> 64
    for name in names:
        if bucket < SHARES[name]:
            return name
        bucket -= SHARES[name]
    raise AssertionError("the bucket is under the sum of all shares")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

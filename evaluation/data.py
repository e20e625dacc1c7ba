"""Read items from a JSONL file, a folder or a hub name, check them, and divide them into disjoint splits.

The reader for local files names file and line in errors, and keeps every text unchanged. The JSON loader of `datasets`
5.2 turns a column of texts such as "2020-01-01" into timestamps, even if text is requested.
`datasets` loads hub sets, and `ItemSet.to_dataset` converts any set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moec.manifests.errors import DataError, OptionError

from .jsonl import Rows, read_jsonl
from .optional import load
from .tasks import TASKS, HiddenAnswer, Item, Task, find_task, infer_task

SPLITS = ("train", "validation", "test")
SHARES = {"train": 20, "validation": 30, "test": 50}
"""Shares of a divided set, in %: calibration, search, certification."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


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
        ranks = sorted((_digest(f"limit {seed} {item_key(self.task, item)}"), at) for at, item in enumerate(self.items))
        chosen = sorted(at for _, at in ranks[:count])
        return replace(self, items=tuple(self.items[at] for at in chosen))

    def to_dataset(self) -> Any:
        """Return the items as a `datasets.Dataset` in memory with text fields. Raises MissingDependency."""
        datasets = load("datasets", "a data set object")
        features = datasets.Features({name: datasets.Value("string") for name in self.task.fields})
        return datasets.Dataset.from_list([dict(item) for item in self.items], features=features)


@dataclass(frozen=True, slots=True)
class SplitData:
    """Three disjoint sets.

    repeated: number of dropped items, whose input occurs twice or in a set that is held out longer.
    hidden: splits of a hub set without public answers. Their items are shares of another split.
    """

    task: Task
    train: ItemSet
    validation: ItemSet
    test: ItemSet
    repeated: int
    hidden: tuple[str, ...] = ()


def item_key(task: Task, item: Item) -> str:
    """Return the normalised item: its input in lower case, with runs of white space as one space."""
    return " ".join(item[task.input_field].lower().split())


def items_sha256(task: Task, items: Iterable[Item]) -> str:
    """Return a digest of the task's name and the exact texts of all fields, in order."""
    digest = hashlib.sha256(task.name.encode())
    for item in items:
        for name in task.fields:
            digest.update(hashlib.sha256(item[name].encode()).digest())
    return digest.hexdigest()


def split_of(task: Task, item: Item) -> str:
    """Return the split of an item if there are no files for splits: by SHA-256 of the normalised item, 20/30/50 %."""
    return _share_of(task, item, SPLITS)


def load_splits(source: str | Path, task: str | None = None) -> SplitData:
    """Load train, validation and test items, disjoint in their normalised inputs.

    source: a folder, a file or a hub name, see below.
    task: name of the task; None: inferred from the fields.

    A folder has train.jsonl, validation.jsonl and test.jsonl, or a folder with these files named after the task.
    One JSONL file is divided by `split_of`.
    A hub name is `owner/set` or `owner/set:configuration`. Its own splits are used. Splits that it lacks, or whose
    answers it hides, are shares of its train split. Without a train split they are shares of its validation split. An
    input that occurs in several splits stays in the split that is held out longest.
    Raises DataError (with file and line if there is one), OptionError, MissingDependency.
    """
    hidden = list[str]()
    chosen, parts = _read_parts(source, task, SPLITS, hidden)
    sets = _divided(chosen, parts)
    seen: set[str] = set()
    kept: dict[str, ItemSet] = {}
    repeated = 0
    for name in reversed(SPLITS):
        unique = _unseen(sets[name], seen)
        repeated += len(sets[name]) - len(unique)
        if not len(unique):
            raise DataError(
                f"`{source}`: the split `{name}` has no items of its own", "give more items, or one file per split"
            )
        kept[name] = unique
    return SplitData(chosen, kept["train"], kept["validation"], kept["test"], repeated, tuple(hidden))


def load_items(
    source: str | Path, task: str | None = None, split: str | None = None, shots: int = 0, seed: int = 0
) -> tuple[ItemSet, tuple[Item, ...]]:
    """Return the items to evaluate, and `shots` solved examples from the train split, which are not among the items.

    split: None means the test split of a folder or hub set. A single file is then used as a whole, and its train share
        gives the examples.
    Unused splits are not checked. A split that hides its answers is refused.
    Raises the errors of `load_splits`. Raises OptionError for an unknown split or too many shots.
    """
    if split not in (None, *SPLITS):
        raise OptionError(f"`{split}` is not a split", f"choose one of {', '.join(SPLITS)}")
    if shots < 0:
        raise OptionError(f"`--shots` must not be negative, found {shots}", "leave it out for none")
    wanted = tuple(name for name in SPLITS if name == (split or "test") or (shots and name == "train"))
    chosen, parts = _read_parts(source, task, wanted)
    if shots and chosen.answer_field is None:
        raise OptionError(f"task `{chosen.name}` scores plain text and takes no solved examples", "drop `--shots`")
    sets = _divided(chosen, parts)
    whole = "file" in parts and split is None
    items = parts["file"] if whole else sets[split or "test"]
    examples = sets["train"].limit(shots, seed).items if shots else ()
    if len(examples) < shots:
        raise OptionError(f"`{source}` has {len(examples)} train items for {shots} shots", "lower `--shots`")
    items = _without(items, {item_key(chosen, item) for item in examples})
    if not len(items):
        raise DataError(f"`{source}`: no items are left to evaluate", "give more items")
    return items, examples


def _read_parts(
    source: str | Path, task: str | None, wanted: Sequence[str], hidden: list[str] | None = None
) -> tuple[Task, dict[str, ItemSet]]:
    """Return the task and the wanted sets by split name. A single file has the name `file`.

    hidden: receives the names of splits of a hub set that hide their answers and are replaced; None: none are replaced.
    """
    path = Path(source)
    chosen = None if task is None else find_task(task)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long
        raise DataError(f"cannot open `{str(source)[:80]}`: {error.strerror or error}", "check the path") from error
    if is_folder:
        rows = {name: read_jsonl(file) for name, file in _split_files(path, chosen, wanted).items()}
    elif exists:
        rows = {"file": read_jsonl(path)}
    elif _HUB_NAME.fullmatch(str(source)) and path.suffix not in (".json", ".jsonl"):
        rows = _hub_rows(str(source))
    else:
        raise DataError(f"`{source}` does not exist", "give a JSONL file or a folder of JSONL files")
    if chosen is None:
        first = next(iter(rows.values()))
        number, value = first.numbered[0]
        chosen = infer_task(value, first.place(number))
    if not exists:
        return chosen, _hub_parts(chosen, rows, wanted, hidden)
    return chosen, {name: check_items(chosen, part) for name, part in rows.items()}


def _split_files(folder: Path, task: Task | None, wanted: Sequence[str]) -> dict[str, Path]:
    """Return the files of the wanted splits, in the folder or in its sub-folder with the task's name."""
    names = [f"{name}.jsonl" for name in wanted]
    if not any((folder / f"{name}.jsonl").exists() for name in SPLITS):
        inner = [name for name in ([task.name] if task else TASKS) if (folder / name).is_dir()]
        if len(inner) > 1:
            raise DataError(f"`{folder}` holds the tasks {' and '.join(inner)}", "choose one with `--task`")
        folder = folder / inner[0] if inner else folder
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"`{folder}`: expected the files {', '.join(names)}, {' and '.join(missing)} is missing",
            "add it, or give one JSONL file to divide",
        )
    return {name: folder / f"{name}.jsonl" for name in wanted}


def check_items(task: Task, rows: Rows) -> ItemSet:
    """Return the task's fields of every row. Items with a blank field are skipped and counted.

    Raises DataError with the place if a field is missing, is not text, or has an answer that cannot be scored.
    """
    kept: list[Item] = []
    for number, value in rows.numbered:
        row = value if task.read is None else _read_row(task, rows, number, value)
        item = {name: _text(task, rows, number, row, name) for name in task.fields}
        if not all(text.strip() for text in item.values()):
            continue
        fault = task.answer_fault(task.reference(item))
        if fault:
            raise DataError(
                f"{rows.place(number)}: the field `{task.answer_field}` {fault}",
                f"correct the item, or choose another task than `{task.name}`",
            )
        kept.append(item)
    if not kept:
        raise DataError(
            f"{rows.place(rows.numbered[0][0])}: expected text, found a blank field in every item",
            f"fill in the fields {', '.join(task.fields)}",
        )
    return ItemSet(task, rows.source, tuple(kept), len(rows.numbered) - len(kept))


def _read_row(task: Task, rows: Rows, number: int, value: dict[str, object]) -> dict[str, object]:
    """Convert a row of the data set's form to the task's own fields. A row with these fields is unchanged.

    Raises DataError.
    """
    if isinstance(value.get("choices"), str):
        return value
    hint = f"task `{task.name}` needs rows of the fields {', '.join(task.row_fields)}, as on the hub"
    missing = [name for name in task.row_fields if name not in value]
    if missing or task.read is None:
        raise DataError(f"{rows.place(number)}: the field `{missing[0]}` of task `{task.name}` is missing", hint)
    try:
        return dict(task.read(value))
    except HiddenAnswer as error:
        raise DataError(
            f"{rows.place(number)}: the row {error}", "choose another `--split`, such as `validation`"
        ) from error
    except ValueError as error:
        raise DataError(f"{rows.place(number)}: the row {error}", hint) from error


def _text(task: Task, rows: Rows, number: int, value: dict[str, object], name: str) -> str:
    hint = f"task `{task.name}` needs the fields {', '.join(task.fields)}, each text"
    if name not in value:
        raise DataError(f"{rows.place(number)}: the field `{name}` of task `{task.name}` is missing", hint)
    text = value[name]
    if not isinstance(text, str):
        raise DataError(f"{rows.place(number)}: expected text in `{name}`, found {type(text).__name__}", hint)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{rows.place(number)}: `{name}` holds half a surrogate pair, which is not text", hint
        ) from error
    return text


def _divided(task: Task, parts: dict[str, ItemSet]) -> dict[str, ItemSet]:
    """Return the sets by split: a single file is divided 20/30/50 %, other sources are unchanged."""
    return _portions(task, parts["file"], SPLITS) if "file" in parts else parts


def _hub_parts(
    task: Task, rows: dict[str, Rows], wanted: Sequence[str], hidden: list[str] | None
) -> dict[str, ItemSet]:
    """Return the wanted splits of a hub set. Splits that it lacks are shares of one that it has.

    Only wanted splits are checked.
    hidden: as in `_read_parts`.
    """
    if hidden is not None:
        hidden += [name for name, part in rows.items() if _hides_answers(task, part)]
    own = {name: part for name, part in rows.items() if name not in (hidden or ())} or rows
    base = next(name for name in SPLITS if name in own)
    shared = [name for name in SPLITS if name not in own]
    shared = [name for name in SPLITS if name in (base, *shared)] if shared else []
    parts = {name: check_items(task, own[name]) for name in wanted if name not in shared}
    if not set(wanted) & set(shared):
        return parts
    portions = _portions(task, check_items(task, own[base]), shared)
    return {name: parts[name] if name in parts else portions[name] for name in wanted}


def _hides_answers(task: Task, rows: Rows) -> bool:
    """Return whether the first row of a split shows that its answers are not public."""
    if task.read is None:
        return False
    try:
        task.read(rows.numbered[0][1])
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


def _unseen(part: ItemSet, seen: set[str]) -> ItemSet:
    """Return the items whose normalised input is new, and add them to `seen`."""
    kept = []
    for item in part.items:
        key = item_key(part.task, item)
        if key not in seen:
            seen.add(key)
            kept.append(item)
    return replace(part, items=tuple(kept))


def _without(part: ItemSet, keys: set[str]) -> ItemSet:
    return replace(part, items=tuple(item for item in part.items if item_key(part.task, item) not in keys))


def _hub_rows(name: str) -> dict[str, Rows]:
    """Load the known splits of a hub set; rows count from 1. Needs a network or a filled cache."""
    datasets = load("datasets", f"the hub set `{name}`")
    repository, _, configuration = name.partition(":")
    options = datasets.DownloadConfig(max_retries=1)
    try:
        loaded = datasets.load_dataset(repository, configuration or None, download_config=options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"`{name}` is not a file here and could not be loaded from the hub: {reason}",
            "give a local JSONL file or folder, or name the configuration as `owner/set:configuration`",
        ) from error
    rows = {
        split: Rows(f"hub:{name}/{split}", tuple(enumerate((dict(row) for row in loaded[split]), start=1)))
        for split in SPLITS
        if split in loaded and len(loaded[split])
    }
    if not rows:
        raise DataError(
            f"`{name}`: expected the splits {', '.join(SPLITS)}, found {', '.join(loaded)}", "give local files"
        )
    return rows


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

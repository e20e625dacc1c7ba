"""Find the rows of a data set, by split: a file, a folder, a folder that `datasets` saved, or a hub name.

JSON and CSV files are read by `text_files.py`, and every error names file and line. `datasets` reads Parquet and Arrow
files, saved folders and hub sets. Its JSON loader turns a column of texts such as "2020-01-01" into timestamps, so it
reads no JSON.
Nothing is written to the home folder, except what the hub's client downloads.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from moec.manifests.errors import DataError

from .optional import load
from .text_files import Rows, read_csv, read_json, read_jsonl

SPLITS = ("train", "validation", "test")
_OTHER_NAMES = {"validation": ("valid", "val", "dev")}
"""Names of splits in files and folders, in the order of choice. `dev` of a set with a validation split is not used."""
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv}
_SUFFIXES = (*_READERS, *_TABLES)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_FORMS = "JSON Lines, a JSON list, CSV, Parquet or Arrow"
_HINT = f"name them train, validation and test, each with {', '.join(_SUFFIXES)}"


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set.

    readers: by split, or by `file` for one file or one split, which is to be divided. Each reads its rows once.
    only: name of the only split, or `file`; empty for several splits.
    """

    readers: Mapping[str, Callable[[], Rows]]
    only: str

    @property
    def is_file(self) -> bool:
        """True if the set is one file, or has one split alone."""
        return "file" in self.readers

    def rows(self, name: str) -> Rows:
        """Return the rows of a split. Raises DataError, MissingDependency."""
        return self.readers[name]()


def open_source(source: str | Path, folders: Sequence[str] = ()) -> DataSource:
    """Return the splits of a data set. Rows are read on demand.

    source: a file, a folder or a hub name, see `evaluation/data.py: load_splits`.
    folders: names of folders in `source` that may hold its splits, such as the names of tasks.
    Raises DataError, MissingDependency.
    """
    path = Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long
        raise DataError(f"cannot open `{str(source)[:80]}`: {error.strerror or error}", "check the path") from error
    if is_folder:
        readers = _saved(path) if _is_saved(path) else _folder(path, folders)
    elif exists:
        readers = {"file": partial(_read, (path,))}
    elif _HUB_NAME.fullmatch(str(source)) and path.suffix not in _SUFFIXES:
        readers = _hub(str(source))
    else:
        raise DataError(f"`{source}` does not exist", f"give a file or a folder of files: {_FORMS}")
    only = next(iter(readers)) if len(readers) == 1 else ""
    return DataSource({"file" if only else name: cache(reader) for name, reader in readers.items()}, only)


def _folder(folder: Path, names: Sequence[str]) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a folder of files, of its folder `data`, or of the only folder in it that has splits."""
    for place in (folder, folder / "data"):
        found = _split_files(place)
        if found:
            return {split: partial(_read, files) for split, files in found.items()}
    inner = [
        child for child in sorted(folder.iterdir()) if child.is_dir() and (_is_saved(child) or _split_files(child))
    ]
    named = [child for child in inner if child.name in names]
    chosen = named or inner
    if len(chosen) > 1:
        kind = "tasks" if named else "configurations"
        listed = " and ".join(child.name for child in chosen)
        remedy = "choose one with `--task`" if named else f"give one of them, such as `{chosen[0]}`"
        raise DataError(f"`{folder}` holds the {kind} {listed}", remedy)
    if not chosen:
        present = ", ".join(sorted(child.name for child in folder.iterdir())[:6]) or "nothing"
        raise DataError(f"`{folder}`: expected files of splits, found {present}", _HINT)
    return _saved(chosen[0]) if _is_saved(chosen[0]) else _folder(chosen[0], ())


def _split_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split, by names such as `train.jsonl`, `val.json` and `test-00000-of-00002.parquet`.

    A folder with the name of a split holds files of any name.
    Raises DataError if a split has files of several forms.
    """
    if not folder.is_dir():
        return {}
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
    found: dict[str, tuple[Path, ...]] = {}
    for split in SPLITS:
        for name in (split, *_OTHER_NAMES.get(split, ())):
            pattern = re.compile(rf"{name}([-_.]?\d+(-of-\d+)?)?")
            own = [path for path in files if pattern.fullmatch(path.stem)]
            if (folder / name).is_dir():
                own += [path for path in sorted((folder / name).iterdir()) if path.suffix in _SUFFIXES]
            forms = sorted({path.suffix for path in own})
            if len(forms) > 1:
                raise DataError(
                    f"`{folder}`: expected one form of the split `{name}`, found files with {' and '.join(forms)}",
                    "keep the files of one form",
                )
            if own:
                found[split] = tuple(own)
                break
    return found


def _read(files: tuple[Path, ...]) -> Rows:
    """Return the rows of a split, from one file or several of one form."""
    first = files[0]
    if first.suffix in _TABLES:
        return _table_rows(files, _TABLES[first.suffix])
    read = _READERS.get(first.suffix, read_jsonl)
    if len(files) == 1:
        return read(first)
    return Rows.joined(f"{first} and {len(files) - 1} more", [read(file) for file in files])


def _table_rows(files: tuple[Path, ...], form: str) -> Rows:
    """Return the rows of Parquet or Arrow files, which count from 1."""
    source = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    datasets = _quiet_datasets(f"the {form.capitalize()} file `{files[0]}`")

    def loaded(cache_folder: str) -> Any:
        names = [str(file) for file in files]
        return datasets.load_dataset(form, data_files=names, split="train", cache_dir=cache_folder)

    return _in_memory(datasets, source, loaded, f"`{source}` is not a whole {form.capitalize()} file")


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _saved(folder: Path) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a folder that `save_to_disk` wrote. A single data set is one file to divide."""
    datasets = _quiet_datasets(f"the saved data set `{folder}`")
    fault = f"`{folder}` is not a folder that `save_to_disk` wrote"
    try:
        found = datasets.load_from_disk(str(folder))
    except _faults(datasets) as error:
        raise DataError(f"{fault}: {_reason(error)}", "save the data set again") from error
    if not isinstance(found, datasets.DatasetDict):
        return {"file": lambda: _in_memory(datasets, str(folder), lambda _: found, fault)}
    return _known_splits(
        str(folder), found, lambda name: f"{folder}/{name}", partial(_in_memory, datasets, fault=fault)
    )


def _hub(name: str) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a hub set. Needs a network or a filled cache of the hub's client."""
    datasets = _quiet_datasets(f"the hub set `{name}`")
    repository, _, configuration = name.partition(":")
    options = datasets.DownloadConfig(max_retries=1)
    try:
        with tempfile.TemporaryDirectory(prefix="moec-data-") as folder:
            found = datasets.load_dataset(
                repository, configuration or None, download_config=options, cache_dir=folder, keep_in_memory=True
            )
    except _faults(datasets) as error:
        raise DataError(
            f"`{name}` is not a file here and could not be loaded from the hub: {_reason(error)}",
            "give local files, or name the configuration as `owner/set:configuration`",
        ) from error
    return _known_splits(
        name, found, lambda split: f"hub:{name}/{split}", lambda source, part: _rows_of(source, part(""))
    )


def _known_splits(
    name: str,
    found: Mapping[str, Any],
    place: Callable[[str], str],
    read: Callable[[str, Callable[[str], Any]], Rows],
) -> dict[str, Callable[[], Rows]]:
    """Return readers of the splits of a dictionary of data sets. place: name of a split in messages."""
    readers: dict[str, Callable[[], Rows]] = {}
    for split in SPLITS:
        own = next((own for own in (split, *_OTHER_NAMES.get(split, ())) if own in found and len(found[own])), None)
        if own is not None:
            readers[split] = partial(read, place(own), partial(_item, found, own))
    if not readers:
        listed = ", ".join(found) or "none"
        raise DataError(f"`{name}`: expected the splits {', '.join(SPLITS)}, found {listed}", "give local files")
    return readers


def _item(found: Mapping[str, Any], name: str, _folder: str) -> Any:
    return found[name]


def _in_memory(datasets: Any, source: str, loaded: Callable[[str], Any], fault: str) -> Rows:
    """Return the rows of a data set whose files are in a temporary folder. loaded: loads it into that folder."""
    try:
        with tempfile.TemporaryDirectory(prefix="moec-data-") as folder:
            return _rows_of(source, loaded(folder))
    except _faults(datasets) as error:
        raise DataError(f"{fault}: {_reason(error)}", f"give {_FORMS}") from error


def _rows_of(source: str, rows: Iterable[Mapping[str, object]]) -> Rows:
    found = Rows(source, tuple(enumerate((dict(row) for row in rows), start=1)))
    if not found.numbered:
        raise DataError(f"`{source}`: expected rows, found none", "give more items")
    return found


def _quiet_datasets(purpose: str) -> Any:
    """Return the package `datasets`, without its progress bars."""
    datasets = load("datasets", purpose)
    datasets.disable_progress_bars()
    return datasets


def _faults(datasets: Any) -> tuple[type[Exception], ...]:
    return (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

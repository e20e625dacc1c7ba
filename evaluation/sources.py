"""Find the rows of a data set, by split: a file, a folder, a folder that `datasets` saved, or a hub name.

JSON and CSV files are read by `text_files.py`, Parquet and Arrow files by `table_files.py`. `datasets` reads hub sets.
Nothing is written to the home folder, except what the hub's client downloads.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moec.manifests.errors import DataError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_CONFIG_BYTES, JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from .metrics import load
from .table_files import read_tables
from .text_files import Row, Rows, counted, read_csv, read_json, read_jsonl

SPLITS = ("train", "validation", "test")
_OTHER_NAMES = {"validation": ("valid", "val", "dev")}
"""Names of splits in files and folders, in the order of choice. `dev` of a set with a validation split is not used."""
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv}
_SUFFIXES = (*_READERS, *_TABLES)
_SAVED_SPLITS, _SAVED_STATE = "dataset_dict.json", "state.json"
_SAVED_JSON = JsonLimits(MAX_CONFIG_BYTES, containers=1 << 16, values=1 << 18, texts=1 << 18)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_FORMS = "JSON Lines, a JSON list, CSV, Parquet or Arrow"
_HINT = f"name them train, validation and test, each with {', '.join(_SUFFIXES)}"


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set.

    readers: by split, or by `file` for one file or one split, which is to be divided.
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
    check_source(source)
    if path.is_dir():
        readers = _saved(path) if _is_saved(path) else _folder(path, folders)
    elif path.exists():
        readers = {"file": partial(_read, (path,))}
    else:
        readers = _hub(str(source))
    only = next(iter(readers)) if len(readers) == 1 else ""
    return DataSource({"file" if only else name: reader for name, reader in readers.items()}, only)


def check_source(source: str | Path) -> None:
    """Raise DataError if a source neither exists nor can be the name of a hub set. Nothing is opened."""
    path = Path(source)
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long
        raise DataError(f"cannot open `{str(source)[:80]}`: {error.strerror or error}", "check the path") from error
    if not exists and (not _HUB_NAME.fullmatch(str(source)) or path.suffix in _SUFFIXES):
        raise DataError(f"`{source}` does not exist", f"give a file or a folder of files: {_FORMS}")


def _folder(folder: Path, names: Sequence[str]) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a folder of files, of its folder `data`, or of the only folder in it that has splits."""
    for place in (folder, folder / "data"):
        split_files = _split_files(place)
        if split_files:
            return {split: partial(_read, files) for split, files in split_files.items()}
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
    files_by_split: dict[str, tuple[Path, ...]] = {}
    for split in SPLITS:
        for name in (split, *_OTHER_NAMES.get(split, ())):
            pattern = re.compile(rf"{name}([-_.]?\d+(-of-\d+)?)?")
            matching = [path for path in files if pattern.fullmatch(path.stem)]
            if (folder / name).is_dir():
                matching += [path for path in sorted((folder / name).iterdir()) if path.suffix in _SUFFIXES]
            forms = sorted({path.suffix for path in matching})
            if len(forms) > 1:
                raise DataError(
                    f"`{folder}`: expected one form of the split `{name}`, found files with {' and '.join(forms)}",
                    "keep the files of one form",
                )
            if matching:
                files_by_split[split] = tuple(matching)
                break
    return files_by_split


def _read(files: tuple[Path, ...]) -> Rows:
    """Return the rows of a split, from one file or several of one form."""
    first = files[0]
    if first.suffix in _TABLES:
        return read_tables(files, _TABLES[first.suffix])
    read = _READERS.get(first.suffix, read_jsonl)
    return Rows.joined([read(file) for file in files])


def _is_saved(folder: Path) -> bool:
    return (folder / _SAVED_SPLITS).is_file() or (folder / _SAVED_STATE).is_file()


def _saved(folder: Path) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a folder that `save_to_disk` wrote. A single data set is one file to divide."""
    if (folder / _SAVED_SPLITS).is_file():
        names = _saved_names(folder, _SAVED_SPLITS, "splits")
        return _known_splits(str(folder), names, lambda name: partial(_saved_rows, folder / name))
    return {"file": partial(_saved_rows, folder)}


def _saved_rows(folder: Path) -> Rows:
    """Return the rows of one data set that `save_to_disk` wrote."""
    files = tuple(folder / name for name in _saved_names(folder, _SAVED_STATE, "_data_files"))
    if not files:
        raise DataError(f"`{folder}`: expected rows, found none", "give more items")
    return read_tables(files, "arrow")


def _saved_names(folder: Path, file: str, key: str) -> list[str]:
    """Return the names of files or folders in `folder` that one of its JSON files lists. Raises DataError."""
    try:
        plain = load_strict_json(read_input(folder / file, MAX_CONFIG_BYTES, follow_links=True), _SAVED_JSON)
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in plain[key]]
        if any(Path(name).name != name or name in ("", "..") for name in names):
            raise ValueError(f"`{key}` names other folders")
    except (UnreadableFile, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"`{folder}` is not a folder that `save_to_disk` wrote: `{file}`: {_reason(error)}",
            "save the data set again",
        ) from error
    return names


def _hub(name: str) -> dict[str, Callable[[], Rows]]:
    """Return the splits of a hub set. Needs a network or a filled cache of the hub's client."""
    datasets = load("datasets", f"the hub set `{name}`")
    datasets.disable_progress_bars()
    repository, _, configuration = name.partition(":")
    options = datasets.DownloadConfig(max_retries=1)
    try:
        with tempfile.TemporaryDirectory(prefix="moec-data-") as folder:
            loaded = datasets.load_dataset(
                repository, configuration or None, download_config=options, cache_dir=folder, keep_in_memory=True
            )
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"`{name}` is not a file here and could not be loaded from the hub: {_reason(error)}",
            "give local files, or name the configuration as `owner/set:configuration`",
        ) from error

    def rows_of(split: str) -> Rows:
        source = f"hub:{name}/{split}"

        def read(_fields: Collection[str]) -> Iterator[Row]:
            return counted(((f"`{source}:{at}`", dict(row)) for at, row in enumerate(loaded[split], start=1)), source)

        return Rows(source, read)

    return _known_splits(name, [split for split in loaded if len(loaded[split])], lambda split: partial(rows_of, split))


def _known_splits(
    name: str, present: Sequence[str], reader: Callable[[str], Callable[[], Rows]]
) -> dict[str, Callable[[], Rows]]:
    """Return readers of the splits that a data set has.

    present: names of its splits.
    """
    readers: dict[str, Callable[[], Rows]] = {}
    for split in SPLITS:
        names = (split, *_OTHER_NAMES.get(split, ()))
        present_name = next((name_of_split for name_of_split in names if name_of_split in present), None)
        if present_name is not None:
            readers[split] = reader(present_name)
    if not readers:
        listed = ", ".join(present) or "none"
        raise DataError(f"`{name}`: expected the splits {', '.join(SPLITS)}, found {listed}", "give local files")
    return readers


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Tables that a bundle keeps from calibration, checked against its model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import ManifestInvalid
from moec.manifests.files.limits import MAX_PATH_KEYS, MAX_PATH_SUCCESSORS
from moec.manifests.path_tables import PAIR_COLUMNS, set_columns
from moec.manifests.safetensors_header import TensorEntry

TABLE_NAMES = {
    "popularity", "transitions", "path.keys", "path.offsets", "path.experts", "path.counts", "router_score_quantiles",
}  # fmt: skip
_COMPILE_AGAIN = "compile the bundle again"
_DTYPES = {"U16": np.uint16, "U32": np.uint32, "I32": np.int32, "I64": np.int64}


@dataclass(frozen=True, slots=True)
class PathTables:
    """The dictionary of activation paths.

    transitions: uint32 [L-1, E, E].
    keys: increasing, in one of two forms.
        Pairs: (layer x E + expert two layers back) x E + expert one layer back, int64 [N].
        Exact sets: layer, experts two layers back, experts one layer back, uint16 [N, 1 + 2K]. Each set ascends.
    offsets: offsets into experts and counts, int64 [N+1].
    experts: uint16 [P].
    counts: uint32 [P].
    """

    transitions: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    experts: np.ndarray
    counts: np.ndarray

    def rows(self, layer: int, before: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Return the existing rows of a token, ordered by chosen expert.

        Pairs: those with keys (layer, one of `before`, one of `chosen`). Exact sets: the one of both sets.
        """
        if self.has_sets:
            wanted = [layer, *sorted(before), *sorted(chosen)]
            if len(before) != len(chosen) or len(wanted) != self.keys.shape[1]:  # fewer experts than in the calibration
                return []
            row = bisect_left(range(len(self.keys)), wanted, key=lambda at: self.keys[at].tolist())
            return [row] if row < len(self.keys) and self.keys[row].tolist() == wanted else []
        experts, known_keys = self.transitions.shape[1], self.keys.data
        first = layer * experts * experts
        wanted_keys = [first + one * experts + last for last in chosen for one in before]
        # One search for all keys takes 1.8 us for 4 keys and 11.5 us for 64. A dict takes 0.4 us and 4.7 us, and 250
        # bytes per key.
        rows = self.keys.searchsorted(np.array(wanted_keys, np.int64)).tolist()
        return [
            row for row, key in zip(rows, wanted_keys, strict=True) if row < len(known_keys) and known_keys[row] == key
        ]

    @property
    def has_sets(self) -> bool:
        """True if keys are exact sets."""
        return self.keys.ndim == 2


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables from calibration.

    popularity: uint32 [L, E].
    paths: the path dictionary, None if it was not requested.
    """

    popularity: np.ndarray
    paths: PathTables | None = None


def read_tables(
    place: str,
    header: Mapping[str, TensorEntry],
    manifest: BundleManifest,
    read_bytes: Callable[[TensorEntry], np.ndarray],
    has_paths: bool,
) -> Tables:
    """Return the calibration tables, with or without the path dictionary.

    place: name of the file, for messages.
    header: its tensors by name.
    manifest: the manifest of the bundle, with the model and the form of the path dictionary.
    read_bytes: returns the bytes of one of them, uint8 [size].
    Raises ManifestInvalid if shapes or indices contradict the model.
    """
    _check_tables(place, header, manifest)

    def read(name: str) -> np.ndarray:
        entry = header[name]
        return read_bytes(entry).view(_DTYPES[entry.dtype]).reshape(entry.shape)

    popularity = read("popularity")
    if not has_paths:
        return Tables(popularity)
    experts = popularity.shape[1]
    keys = _packed_keys(read("path.keys"), len(manifest.model.layers), experts, manifest.path_sets)
    if keys is not None:
        paths = PathTables(
            transitions=read("transitions"),
            keys=keys,
            offsets=read("path.offsets"),
            experts=read("path.experts"),
            counts=read("path.counts"),
        )
        if _is_consistent(paths, experts):
            return Tables(popularity, paths)
    raise ManifestInvalid(f"{place}: the path dictionary contradicts itself or the model", _COMPILE_AGAIN)


def _check_tables(place: str, header: Mapping[str, TensorEntry], manifest: BundleManifest) -> None:
    """Compare names, types, shapes and numbers of rows with the manifest. Raises ManifestInvalid."""
    model = manifest.model
    layers, key_columns = len(model.layers), set_columns(model) if manifest.path_sets else PAIR_COLUMNS
    experts = max(layer.experts.count for layer in model.layers)
    extra = sorted(set(header) - TABLE_NAMES)
    if extra:
        raise ManifestInvalid(f"{place}: unknown tensor `{extra[0][:80]}`", _COMPILE_AGAIN)
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {  # None: any extent
        "popularity": ("U32", (layers, experts)),
        "transitions": ("U32", (layers - 1, experts, experts)),
        "path.keys": ("I32", (None, key_columns)),
        "path.offsets": ("I64", (None,)),
        "path.experts": ("U16", (None,)),
        "path.counts": ("U32", (None,)),
    }
    for name, (dtype, shape) in expected.items():
        entry = header.get(name)
        fits = entry is not None and entry.dtype == dtype and len(entry.shape) == len(shape)
        if entry is None or not fits or any(w not in (None, n) for w, n in zip(shape, entry.shape, strict=True)):
            raise ManifestInvalid(f"{place}: no tensor `{name}` of type and shape {dtype} {shape}", _COMPILE_AGAIN)
    most_keys = MAX_PATH_KEYS * PAIR_COLUMNS // key_columns
    for name, most in (("path.keys", most_keys), ("path.experts", MAX_PATH_SUCCESSORS)):
        rows = header[name].shape[0]
        if rows > most:
            raise ManifestInvalid(f"{place}: `{name}` has {rows} rows, more than the limit of {most}", _COMPILE_AGAIN)


def _packed_keys(rows: np.ndarray, layers: int, experts: int, has_sets: bool) -> np.ndarray | None:
    """Pack rows of a layer and experts, int32 [N, n]. Returns None if one is out of range or a set does not ascend.

    Pairs, [N, 3], become keys, int64 [N]. Exact sets, [N, 1 + 2K], become uint16.
    """
    if len(rows) and (rows.min() < 0 or rows[:, 0].max() >= layers or rows[:, 1:].max() >= experts):
        return None
    if has_sets:
        middle, last = (rows.shape[1] + 1) // 2, rows.shape[1] - 1
        within_sets = [at for at in range(1, last) if at + 1 != middle]
        ascend = all(bool(np.all(rows[:, at] < rows[:, at + 1])) for at in within_sets)
        return rows.astype(np.uint16) if ascend else None
    keys = rows[:, 0].astype(np.int64)
    for column in (1, 2):
        keys *= experts
        keys += rows[:, column]
    return keys


def _increase(keys: np.ndarray) -> bool:
    """Return whether keys [N] or rows of keys [N, n] increase strictly. Rows are compared from the first column on."""
    columns = keys[:, None] if keys.ndim == 1 else keys
    are_equal = np.ones(max(0, len(keys) - 1), bool)
    for column in columns.T:
        if np.any(are_equal & (column[1:] < column[:-1])):
            return False
        are_equal &= column[1:] == column[:-1]
    return not are_equal.any()


def _is_consistent(paths: PathTables, experts: int) -> bool:
    """Return whether keys increase strictly, offsets match them, and successors are experts."""
    offsets = paths.offsets
    return (
        len(offsets) == len(paths.keys) + 1
        and offsets[0] == 0
        and bool(np.all(offsets[1:] >= offsets[:-1]))
        and offsets[-1] == len(paths.experts) == len(paths.counts)
        and (len(paths.experts) == 0 or int(paths.experts.max()) < experts)
        and _increase(paths.keys)
    )

"""A Hugging Face model folder as a mapping of tensors on disk. This module depends on no model family.

Every file is untrusted:
* headers are bounded and checked before any weight is read;
* shard names must stay in the folder;
* pickled weights are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from moec.manifests.bundle import TOKENIZER_NAME, FileEntry
from moec.manifests.errors import CheckpointError
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.limits import COMPANION_JSON, MAX_COMPANION_BYTES, MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.safetensors_header import ITEM_BYTES, HeaderError, TensorEntry, read_header

from .mxfp4 import BLOCKS_SUFFIX, SCALES_SUFFIX
from .url import PLAIN_NAME, fetch, is_url, url_name

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
COMPANION_PATTERNS = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)
_PATTERNS = ("*.safetensors", INDEX_NAME, *COMPANION_PATTERNS)
"""Files of a model that are copied from a URL or a hub."""
_READ_BYTES = 8 << 20
DIGESTS_AT_ONCE = 2  # one hashes while another reads
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_PACKED_DTYPES = {"U8": torch.uint8}  # MXFP4 blocks and scales
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor on disk.

    file: its file in the folder.
    dtype: the name of its type in the file.
    shape: its shape.
    offset_bytes, size_bytes: its place in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model folder.

    name: the name of the folder or the hub model, without a path.
    """

    root: Path
    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]
    _digests: dict[str, FileEntry] = field(default_factory=dict, repr=False)

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor in its own dtype. Only the bytes that are returned are read.

        index: the matrix of a stacked tensor, or None for the whole tensor.
        rows: start and stop of the rows to read, or None for all.
        Raises CheckpointError if the file ends early or cannot be read.
        """
        ref = self.tensors[name]
        shape, start = ref.shape, ref.offset_bytes
        item = ITEM_BYTES[ref.dtype]
        for at, stop in (() if index is None else ((index, None),)) + (() if rows is None else (rows,)):
            row_bytes = _elements(shape[1:]) * item
            start += at * row_bytes
            shape = shape[1:] if stop is None else (stop - at, *shape[1:])
        raw = bytearray(_elements(shape) * item)
        if not raw:
            return torch.empty(shape, dtype=(_DTYPES | _PACKED_DTYPES)[ref.dtype])
        try:
            with (self.root / ref.file).open("rb", buffering=0) as file:
                file.seek(start)
                view, done = memoryview(raw), 0
                while done < len(raw):
                    count = file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(
                            f"`{self.root / ref.file}` ends inside tensor `{name}`, expected {len(raw)} bytes "
                            f"at {start}",
                            "copy the file again",
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"cannot read `{self.root / ref.file}`: {error.strerror or error}") from error
        return torch.frombuffer(raw, dtype=(_DTYPES | _PACKED_DTYPES)[ref.dtype]).reshape(shape)

    def companion_files(self) -> tuple[str, ...]:
        """Return the sorted names of the config, tokenizer and template files. A bundle copies them.

        Pipes, devices and broken links are included, so that reading them is refused. Folders are not.
        """
        found = {path.name for pattern in COMPANION_PATTERNS for path in self.root.glob(pattern) if not path.is_dir()}
        return tuple(sorted(name for name in found if PLAIN_NAME.fullmatch(name)))

    def file_bytes(self, name: str) -> bytes:
        """Return the content of one companion file. Raises CheckpointError."""
        return read_file(self.root / name, MAX_COMPANION_BYTES, "copy it again, or remove it from the folder")

    @property
    def tokenizer_file_bytes(self) -> int:
        """Size of `tokenizer.json` in bytes, 0 if it is missing."""
        path = self.root / TOKENIZER_NAME
        return path.stat().st_size if path.is_file() else 0

    def weight_files(self) -> tuple[str, ...]:
        """Return the sorted names of the files that hold tensors."""
        return tuple(sorted({ref.file for ref in self.tensors.values()}))

    def source_files(self) -> tuple[FileEntry, ...]:
        """Return size and SHA-256 of every file of the model, by name. Each file is read once per opened folder."""
        index = (INDEX_NAME,) if (self.root / INDEX_NAME).is_file() and WEIGHTS_NAME not in self.weight_files() else ()
        missing = [n for n in (*self.companion_files(), *self.weight_files(), *index) if n not in self._digests]
        with ThreadPoolExecutor(DIGESTS_AT_ONCE) as pool:
            found = list(pool.map(lambda name: _digest(self.root / name), missing))
        self._digests.update(zip(missing, found, strict=True))
        return tuple(self._digests[name] for name in sorted(self._digests))


def open_checkpoint(path: str) -> Checkpoint:
    """Open a local model folder, a folder at an fsspec URL, or a hub id if there is a network.

    Raises CheckpointError, which names the file, if
    * the path is not a folder;
    * config.json is missing or damaged;
    * there are no safetensors weights, or they are damaged or truncated;
    * the index does not match its shards;
    * a dtype is not bfloat16, float16 or float32.
    """
    root, name = _locate(path)
    config = _read_json(root / CONFIG_NAME, MAX_CONFIG_BYTES, "a Hugging Face model folder has one; is this one?")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"`{root / CONFIG_NAME}` has no `model_type`, expected the name of a model family",
            "use the config.json that came with the weights",
        )
    generation = root / GENERATION_CONFIG_NAME
    generation_config = dict[str, Any]()
    if os.path.lexists(generation):
        generation_config = _read_json(generation, MAX_CONFIG_BYTES, "remove or repair it")
    tensors = _read_tensors(root)
    wrong = sorted(n for n, ref in tensors.items() if ref.dtype not in _DTYPES and not _is_packed(n, ref))
    if wrong:
        raise CheckpointError(
            f"`{root}`: {len(wrong)} tensors are neither bfloat16, float16 nor float32, first `{wrong[0]}` with "
            f"{tensors[wrong[0]].dtype}",
            "start from the checkpoint before it was quantized",
        )
    return Checkpoint(root, name, config, generation_config, tensors)


def is_companion(name: str) -> bool:
    """Return whether a file of a bundle came from the checkpoint: config, tokenizer or template."""
    return any(fnmatch(name, pattern) for pattern in COMPANION_PATTERNS)


def _is_packed(name: str, ref: TensorRef) -> bool:
    return ref.dtype in _PACKED_DTYPES and name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _digest(path: Path) -> FileEntry:
    """Hash one file in bounded pieces. Raises CheckpointError."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_READ_BYTES)
    try:
        with open(open_input(path, follow_links=True), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
    except UnreadableFile as error:
        raise CheckpointError(f"`{path}` {error}", "copy it again, or remove it from the folder") from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
    return FileEntry(path.name, size, digest.hexdigest())


def _locate(path: str) -> tuple[Path, str]:
    """Return the folder and the model's name. Raises CheckpointError."""
    if is_url(path):
        return fetch(path, _PATTERNS), url_name(path)
    root = Path(path).expanduser()
    try:
        is_folder, exists = root.is_dir(), root.exists()
    except OSError as error:  # a name that is too long
        raise CheckpointError(f"cannot open `{path[:80]}`: {error.strerror or error}", "check the path") from error
    if is_folder:
        return root, root.resolve().name or "model"
    if exists:
        raise CheckpointError(f"`{path}` is a file, expected a model folder", "name the folder that holds config.json")
    if _HUB_ID.fullmatch(path) and not root.parent.is_dir():
        return _download(path), path.rpartition("/")[2]
    raise CheckpointError(f"no folder `{path}`, expected a Hugging Face model folder", "check the path")


def _download(hub_id: str) -> Path:
    """Fetch a hub snapshot. Raises CheckpointError if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The hub client has changed its HTTP library twice. The library's base error is a base of the hub's own error.
    transport_errors: Any = HfHubHTTPError.__bases__
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_PATTERNS)))
    except (OSError, HFValidationError, *transport_errors) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder `{hub_id}` here, and the hub gave no model of that name: {reason}",
            "check the path, or download the model and name its folder",
        ) from error


def read_file(path: Path, limit_bytes: int, remedy: str) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Links are followed, because hub caches consist of them. Raises CheckpointError.
    """
    try:
        return read_input(path, limit_bytes, follow_links=True)
    except UnreadableFile as error:
        if not os.path.lexists(path):
            raise CheckpointError(f"no `{path.name}` in `{path.parent}`", remedy) from error
        raise CheckpointError(f"`{path}` {error}", remedy) from error


def _read_json(path: Path, limit_bytes: int, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a small file. Raises CheckpointError."""
    try:
        plain = load_strict_json(read_file(path, limit_bytes, remedy), COMPANION_JSON)
    except ValueError as error:
        raise CheckpointError(f"`{path}` is not JSON: {error}", remedy) from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"`{path}`: expected a JSON object, found {type(plain).__name__}", remedy)
    return plain


def _read_tensors(root: Path) -> dict[str, TensorRef]:
    """Return all tensors of the folder. Only headers are read. Raises CheckpointError."""
    if (root / WEIGHTS_NAME).is_file():
        return _refs(WEIGHTS_NAME, _header(root / WEIGHTS_NAME))
    if (root / INDEX_NAME).is_file():
        return _read_sharded(root, _read_json(root / INDEX_NAME, MAX_INDEX_BYTES, "copy the index again"))
    pickles = sorted(path.name for path in root.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"`{root}` holds pickled weights only (`{pickles[0]}`), expected `{WEIGHTS_NAME}`",
            "load and save the model with transformers, which writes safetensors",
        )
    raise CheckpointError(
        f"`{root}` has neither `{WEIGHTS_NAME}` nor `{INDEX_NAME}`", "name a folder that holds safetensors weights"
    )


def _read_sharded(root: Path, index: dict[str, Any]) -> dict[str, TensorRef]:
    """Return the tensors of all shards. Index and shards must name the same tensors. Raises CheckpointError."""
    place = root / INDEX_NAME
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{place}` has no `weight_map`, expected tensor names and files", "copy the index again")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if not PLAIN_NAME.fullmatch(file):
            raise CheckpointError(f"`{place}` names `{file[:80]}`, expected a plain file name", "copy the index again")
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        raise CheckpointError(
            f"`{root}` lacks {len(missing)} of {len(files)} weight files that its index names, first `{missing[0]}`",
            "copy the missing files",
        )
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in _refs(file, _header(root / file)).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor `{name}` lies in both `{root / tensors[name].file}` and `{file}`", "keep one of them"
                )
            tensors[name] = ref
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"`{place}` names tensor `{name}` in `{file}`, which does not hold it", "copy index and weights again"
            )
    return tensors


def _refs(file: str, header: Mapping[str, TensorEntry]) -> dict[str, TensorRef]:
    return {
        name: TensorRef(file, entry.dtype, entry.shape, entry.offset_bytes, entry.size_bytes)
        for name, entry in header.items()
    }


def _header(path: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(path)
    except HeaderError as error:
        raise CheckpointError(
            f"`{path}` is damaged or truncated: {error}", "copy the file again and compare its size with the source"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error

"""A Hugging Face model folder as a mapping of tensors on disk. This module depends on no model family.

Every file is untrusted:
* headers are bounded and checked before any weight is read;
* shard names must stay in the folder;
* pickled weights are refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from moec.manifests.bundle import TOKENIZER_NAME, FileEntry
from moec.manifests.errors import CheckpointError
from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.limits import MAX_COMPANION_BYTES
from moec.manifests.safetensors_header import ITEM_BYTES

from .integer_codes import CodeNeed, IntegerCodes
from .model_files import CONFIG_NAME, GENERATION_CONFIG_NAME
from .packed_weights import LayoutError, PackedWeight
from .tokenizer import tokenizer_bytes
from .url import PLAIN_NAME
from .weight_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    TensorRef,
    read_file,
)

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
_READ_BYTES = 8 << 20
DIGESTS_AT_ONCE = 2  # one hashes while another reads
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PACKED_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "U32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types of the parts of quantized weights. Words of codes are read with a sign, which their bits ignore."""
_EXPONENTS, _E8M0_BIAS = "F8_E8M0", 127


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model folder.

    name: the name of the folder or the hub model, without a path.
    tensors: weights by name. A weight that is stored quantized has the type and shape of its decoded form.
    packed: the weights that are stored quantized, except MXFP4.
    parts: the tensors on disk that hold them.
    precision: the stored precision of quantized weights, for people; empty if there are none.
    notes: remarks for the user.
    stored_in: a file that holds settings and weights in place of the folder, or None.
    """

    root: Path
    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    parts: Mapping[str, TensorRef] = field(default_factory=dict)
    precision: str = ""
    notes: tuple[str, ...] = ()
    stored_in: Path | None = None
    _digests: dict[str, FileEntry] = field(default_factory=dict, repr=False)
    _code_needs: dict[str, CodeNeed] = field(default_factory=dict, repr=False)

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor in its own dtype. Only the bytes that are returned are read, of a quantized weight all.

        index: the matrix of a stacked tensor, or None for the whole tensor.
        rows: start and stop of the rows to read, or None for all.
        Raises CheckpointError if the file ends early or cannot be read.
        """
        if name in self.packed and self.packed[name].by_rows:
            return self._decoded(name, rows)
        if name in self.packed:
            return self._decoded(name)[() if rows is None else slice(*rows)]
        return self._read(self.tensors[name], name, index, rows)

    @property
    def place(self) -> Path:
        """The folder that the user named, or the file that holds everything."""
        return self.stored_in or self.root

    @property
    def settings_file(self) -> Path:
        """The file with the settings, for people."""
        return self.stored_in or self.root / CONFIG_NAME

    @property
    def has_numbers(self) -> bool:
        """True: the weights are there."""
        return True

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return the numbers of a tensor, exactly as on disk. Raises CheckpointError if there are not `count`."""
        if name not in self.tensors:
            raise CheckpointError(f"`{self.place}` has no tensor `{name}`", "copy the checkpoint again")
        values = self.tensor(name).float().flatten().tolist()
        if len(values) != count or not all(map(math.isfinite, values)):
            raise CheckpointError(
                f"tensor `{name}` in `{self.place}`: expected {count} finite numbers", "copy the checkpoint again"
            )
        return tuple(values)

    def differ(self, name: str, other: str) -> bool:
        """Return whether both tensors exist and differ. Raises CheckpointError."""
        if name not in self.tensors or other not in self.tensors:
            return False
        return not torch.equal(self.tensor(name), self.tensor(other))

    def stored_parts(
        self, name: str, without: str = "", rows: tuple[int, int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that hold a quantized weight, by part.

        without: a part that is not read.
        rows: start and stop of the rows of each part, or None for all. Raises CheckpointError.
        """
        names = self.packed[name].names
        return {
            suffix: self._read(self.parts[stored], stored, rows=rows)
            for suffix, stored in names.items()
            if suffix != without
        }

    def integer_codes(self, name: str, rows: tuple[int, int] | None = None) -> IntegerCodes | None:
        """Return the codes of a weight that is stored as integers, None for others.

        rows: start and stop, of a weight whose rows can be decoded alone; None: all. Raises CheckpointError.
        """
        layout = self.packed[name].integers if name in self.packed else None
        if layout is None:
            return None
        parts = self.stored_parts(name, rows=rows)
        with self._layout_errors(name):
            return IntegerCodes(layout.codes(parts), layout.grid(parts))

    def code_need(self, name: str) -> CodeNeed | None:
        """Return what a format needs to hold a weight that is stored as integers, None for others. Reads no codes.

        Scales and zeros of a weight are read for this once per opened folder. Raises CheckpointError.
        """
        layout = self.packed[name].integers if name in self.packed else None
        if layout is None or layout.need is not None:
            return None if layout is None else layout.need
        if name not in self._code_needs:
            with self._layout_errors(name):
                self._code_needs[name] = layout.grid(self.stored_parts(name, without=layout.part)).need()
        return self._code_needs[name]

    def _decoded(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Return a weight that is stored quantized, or some of its rows. Raises CheckpointError."""
        parts = self.stored_parts(name, rows=rows)
        with self._layout_errors(name):
            return self.packed[name].decode(parts).to(FLOAT_DTYPES[self.tensors[name].dtype]).contiguous()

    @contextmanager
    def _layout_errors(self, name: str) -> Iterator[None]:
        """Let a LayoutError become a CheckpointError that names the weight."""
        try:
            yield
        except LayoutError as error:
            raise CheckpointError(f"`{self.place}`, `{name}`: {error}", "copy the checkpoint again") from error

    def _read(
        self, ref: TensorRef, name: str, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Read a tensor on disk."""
        shape, start = ref.shape, ref.offset_bytes
        item = ITEM_BYTES[ref.dtype]
        if ref.dtype not in (*FLOAT_DTYPES, *PACKED_DTYPES, _EXPONENTS):
            raise CheckpointError(
                f"tensor `{name}` in `{self.root / ref.file}` has the type {ref.dtype}, which no known layout uses",
                "start from the checkpoint before it was quantized",
            )
        for at, stop in (() if index is None else ((index, None),)) + (() if rows is None else (rows,)):
            row_bytes = math.prod(shape[1:]) * item
            start += at * row_bytes
            shape = shape[1:] if stop is None else (stop - at, *shape[1:])
        raw = bytearray(math.prod(shape) * item)
        if not raw:
            return torch.empty(shape, dtype=(FLOAT_DTYPES | PACKED_DTYPES)[ref.dtype])
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
        if ref.dtype == _EXPONENTS:  # powers of two, without a sign
            exponents = torch.frombuffer(raw, dtype=torch.uint8).int() - _E8M0_BIAS
            return torch.ldexp(torch.ones(len(exponents)), exponents).reshape(shape)
        return torch.frombuffer(raw, dtype=(FLOAT_DTYPES | PACKED_DTYPES)[ref.dtype]).reshape(shape)

    def companion_files(self) -> tuple[str, ...]:
        """Return the sorted names of the config, tokenizer and template files. A bundle copies them.

        Pipes, devices and broken links are included, so that reading them is refused. Folders are not.
        """
        names = {path.name for pattern in COMPANION_PATTERNS for path in self.root.glob(pattern) if not path.is_dir()}
        return tuple(sorted(name for name in names if PLAIN_NAME.fullmatch(name)))

    def file_bytes(self, name: str) -> bytes:
        """Return the content of one companion file for a bundle. Raises CheckpointError."""
        if name == TOKENIZER_NAME:
            return tokenizer_bytes(self.root)
        return read_file(self.root / name, MAX_COMPANION_BYTES, "copy it again, or remove it from the folder")

    @property
    def tokenizer_is_completed(self) -> bool:
        """True if a bundle's `tokenizer.json` adds a token that the folder's does not."""
        return (self.root / TOKENIZER_NAME).stat().st_size != self.tokenizer_file_bytes

    @property
    def tokenizer_file_bytes(self) -> int:
        """Size of a bundle's `tokenizer.json` in bytes, 0 if it is missing."""
        return len(self.file_bytes(TOKENIZER_NAME)) if (self.root / TOKENIZER_NAME).is_file() else 0

    def weight_files(self) -> tuple[str, ...]:
        """Return the sorted names of the files that hold tensors."""
        return tuple(sorted({ref.file for ref in (*self.tensors.values(), *self.parts.values())}))

    def source_files(self) -> tuple[FileEntry, ...]:
        """Return size and SHA-256 of every file of the model, by name. Each file is read once per opened folder."""
        index = (INDEX_NAME,) if (self.root / INDEX_NAME).is_file() and WEIGHTS_NAME not in self.weight_files() else ()
        missing = [n for n in (*self.companion_files(), *self.weight_files(), *index) if n not in self._digests]
        with ThreadPoolExecutor(DIGESTS_AT_ONCE) as pool:
            entries = list(pool.map(lambda name: _digest(self.root / name), missing))
        self._digests.update(zip(missing, entries, strict=True))
        return tuple(self._digests[name] for name in sorted(self._digests))


def is_companion(name: str) -> bool:
    """Return whether a file of a bundle came from the checkpoint: config, tokenizer or template."""
    return any(fnmatch(name, pattern) for pattern in COMPANION_PATTERNS)


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

"""A Hugging Face model folder as a mapping of tensors on disk. This module depends on no model family.

Every file is untrusted:
* headers are bounded and checked before any weight is read;
* shard names must stay in the folder;
* pickled weights are refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from moec.manifests.bundle import TOKENIZER_NAME, FileEntry
from moec.manifests.errors import CheckpointError
from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.limits import MAX_COMPANION_BYTES, MAX_CONFIG_BYTES
from moec.manifests.safetensors_header import ITEM_BYTES

from .integer_codes import CodeNeed, IntegerCodes
from .model_files import CONFIG_NAME, GENERATION_CONFIG_NAME
from .packed_tensors import METHODS, find_packed
from .packed_weights import LayoutError, PackedWeight
from .text_part import has_text_part, text_part
from .tokenizer import tokenizer_bytes
from .url import PLAIN_NAME, fetch, is_url, url_name
from .weight_files import (
    BLOCKS_SUFFIX,
    INDEX_NAME,
    SCALES_SUFFIX,
    WEIGHTS_NAME,
    TensorRef,
    read_file,
    read_json,
    read_tensors,
)

EARLY_LABEL_NAME = "quantize_config.json"
"""Label of GPTQ's early tools."""
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
_PATTERNS = ("*.safetensors", INDEX_NAME, EARLY_LABEL_NAME, *COMPANION_PATTERNS)
"""Files of a model that are copied from a URL or a hub."""
_READ_BYTES = 8 << 20
_NO_CONFIG = "a Hugging Face model folder has one; is this one?"
DIGESTS_AT_ONCE = 2  # one hashes while another reads
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_PACKED_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types of the parts of quantized weights."""
_EXPONENTS, _E8M0_BIAS = "F8_E8M0", 127
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model folder.

    name: the name of the folder or the hub model, without a path.
    tensors: weights by name. A weight that is stored quantized has the type and shape of its decoded form.
    packed: the weights that are stored quantized, except MXFP4.
    parts: the tensors on disk that hold them.
    precision: the stored precision of quantized weights, for people; empty if there are none.
    notes: remarks for the user.
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
    _digests: dict[str, FileEntry] = field(default_factory=dict, repr=False)
    _code_needs: dict[str, CodeNeed] = field(default_factory=dict, repr=False)

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor in its own dtype. Only the bytes that are returned are read, of a quantized weight all.

        index: the matrix of a stacked tensor, or None for the whole tensor.
        rows: start and stop of the rows to read, or None for all.
        Raises CheckpointError if the file ends early or cannot be read.
        """
        if name in self.packed:
            return self._decoded(name)[() if rows is None else slice(*rows)]
        return self._read(self.tensors[name], name, index, rows)

    @property
    def has_numbers(self) -> bool:
        """True: the weights are there."""
        return True

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return the numbers of a tensor, exactly as on disk. Raises CheckpointError if there are not `count`."""
        if name not in self.tensors:
            raise CheckpointError(f"`{self.root}` has no tensor `{name}`", "copy the checkpoint again")
        values = self.tensor(name).float().flatten().tolist()
        if len(values) != count or not all(map(math.isfinite, values)):
            raise CheckpointError(
                f"tensor `{name}` in `{self.root}`: expected {count} finite numbers", "copy the checkpoint again"
            )
        return tuple(values)

    def differ(self, name: str, other: str) -> bool:
        """Return whether both tensors exist and differ. Raises CheckpointError."""
        if name not in self.tensors or other not in self.tensors:
            return False
        return not torch.equal(self.tensor(name), self.tensor(other))

    def stored_parts(self, name: str, without: str = "") -> dict[str, torch.Tensor]:
        """Return the tensors that hold a quantized weight, by part.

        without: a part that is not read. Raises CheckpointError.
        """
        names = self.packed[name].names
        return {suffix: self._read(self.parts[stored], stored) for suffix, stored in names.items() if suffix != without}

    def integer_codes(self, name: str) -> IntegerCodes | None:
        """Return the codes of a weight that is stored as integers, None for others. Raises CheckpointError."""
        layout = self.packed[name].integers if name in self.packed else None
        if layout is None:
            return None
        parts = self.stored_parts(name)
        with self._layout_errors(name):
            return IntegerCodes(layout.codes(parts), layout.grid(parts))

    def code_need(self, name: str) -> CodeNeed | None:
        """Return what a format needs to hold a weight that is stored as integers, None for others. Reads no codes.

        Scales and zeros of a weight are read for this once per opened folder. Raises CheckpointError.
        """
        layout = self.packed[name].integers if name in self.packed else None
        if layout is None:
            return None
        if name not in self._code_needs:
            with self._layout_errors(name):
                self._code_needs[name] = layout.grid(self.stored_parts(name, without=layout.part)).need()
        return self._code_needs[name]

    def _decoded(self, name: str) -> torch.Tensor:
        """Return a weight that is stored quantized. Raises CheckpointError."""
        parts = self.stored_parts(name)
        with self._layout_errors(name):
            return self.packed[name].decode(parts).to(_DTYPES[self.tensors[name].dtype]).contiguous()

    @contextmanager
    def _layout_errors(self, name: str) -> Iterator[None]:
        """Let a LayoutError become a CheckpointError that names the weight."""
        try:
            yield
        except LayoutError as error:
            raise CheckpointError(f"`{self.root}`, `{name}`: {error}", "copy the checkpoint again") from error

    def _read(
        self, ref: TensorRef, name: str, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Read a tensor on disk."""
        shape, start = ref.shape, ref.offset_bytes
        item = ITEM_BYTES[ref.dtype]
        if ref.dtype not in (*_DTYPES, *_PACKED_DTYPES, _EXPONENTS):
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
        if ref.dtype == _EXPONENTS:  # powers of two, without a sign
            exponents = torch.frombuffer(raw, dtype=torch.uint8).int() - _E8M0_BIAS
            return torch.ldexp(torch.ones(len(exponents)), exponents).reshape(shape)
        return torch.frombuffer(raw, dtype=(_DTYPES | _PACKED_DTYPES)[ref.dtype]).reshape(shape)

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
    inner = sorted([*root.glob(f"*/{CONFIG_NAME}"), *root.glob(f"snapshots/*/{CONFIG_NAME}")])
    remedy = f"name the model folder, like `{inner[0].parent}`" if inner else _NO_CONFIG
    config = read_json(root / CONFIG_NAME, MAX_CONFIG_BYTES, remedy)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"`{root / CONFIG_NAME}` has no `model_type`, expected the name of a model family",
            "use the config.json that came with the weights",
        )
    generation = root / GENERATION_CONFIG_NAME
    generation_config = dict[str, Any]()
    if os.path.lexists(generation):
        generation_config = read_json(generation, MAX_CONFIG_BYTES, "remove or repair it")
    # transformers ties the output matrix to the embedding, and passes over a stale entry for it.
    is_tied = config.get("tie_word_embeddings") is not False

    def may_lack(tensor: str) -> bool:
        return is_tied and tensor == "lm_head.weight"

    tensors: Mapping[str, TensorRef] = read_tensors(root, may_lack)
    notes: tuple[str, ...] = ()
    if has_text_part(config):
        config, tensors, notes = text_part(config, tensors)
    opened = _with_decoded(Checkpoint(root, name, config, generation_config, tensors, notes=notes))
    tensors = opened.tensors
    wrong = sorted(n for n, ref in tensors.items() if ref.dtype not in _DTYPES and not _is_packed(n, ref))
    if wrong:
        raise CheckpointError(
            f"`{root}`: {len(wrong)} tensors are neither bfloat16, float16 nor float32, first `{wrong[0]}` with "
            f"{tensors[wrong[0]].dtype}",
            "start from the checkpoint before it was quantized",
        )
    if any(_is_packed(name, ref) for name, ref in tensors.items()):
        return replace(opened, precision=", ".join(filter(None, (opened.precision, "MXFP4"))))
    return opened


def _with_decoded(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its quantized weights as if they were not.

    Tensors decide which weights are quantized. A label tells details of a layout at most. Raises CheckpointError.
    """
    label, place = checkpoint.config.get("quantization_config"), checkpoint.root / CONFIG_NAME
    if label is None and os.path.lexists(checkpoint.root / EARLY_LABEL_NAME):
        place = checkpoint.root / EARLY_LABEL_NAME
        label = read_json(place, MAX_CONFIG_BYTES, "remove or repair it")
    method = label.get("quant_method") if isinstance(label, dict) else label
    has_blocks = any(_is_packed(name, ref) for name, ref in checkpoint.tensors.items())
    if method == "mxfp4" and has_blocks:
        return checkpoint
    try:
        packed = find_packed(checkpoint.tensors, label if isinstance(label, dict) else {}, checkpoint.tensor)
    except LayoutError as error:
        raise CheckpointError(
            f"`{checkpoint.root}`, {error}", "start from the checkpoint before it was quantized"
        ) from error
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    if not packed.weights:
        if label is None:
            return checkpoint
        if any(ref.dtype not in _DTYPES and not _is_packed(n, ref) for n, ref in checkpoint.tensors.items()):
            raise CheckpointError(
                f"`{place}` has the quantization method `{str(method)[:80]}`, expected tensors in the layout of "
                f"{', '.join(METHODS)} or mxfp4",
                "start from the checkpoint before it was quantized",
            )
        if has_blocks:
            return replace(checkpoint, config=config)
        note = (
            f"`{place}` names the quantization method `{str(method)[:80]}`, but no tensor is quantized: it is ignored"
        )
        return replace(checkpoint, config=config, notes=(*checkpoint.notes, note))
    plain = {name: ref for name, ref in checkpoint.tensors.items() if name not in packed.parts}
    parts = {name: checkpoint.tensors[name] for name in packed.parts}
    float_types = Counter(ref.dtype for ref in plain.values() if ref.dtype in ("BF16", "F16"))
    dtype = float_types.most_common(1)[0][0] if float_types else "BF16"
    decoded = {
        name: TensorRef(parts[next(iter(weight.names.values()))].file, dtype, weight.shape, 0, 0)
        for name, weight in packed.weights.items()
    }
    return replace(
        checkpoint,
        config=config,
        tensors={**plain, **decoded},
        packed=packed.weights,
        parts=parts,
        precision=packed.precision(),
    )


def is_companion(name: str) -> bool:
    """Return whether a file of a bundle came from the checkpoint: config, tokenizer or template."""
    return any(fnmatch(name, pattern) for pattern in COMPANION_PATTERNS)


def _is_packed(name: str, ref: TensorRef) -> bool:
    return ref.dtype in _PACKED_DTYPES and name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))


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
        # A name that is not UTF-8 has no place in a manifest.
        return root, os.fsencode(root.resolve().name).decode("utf-8", "replace") or "model"
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

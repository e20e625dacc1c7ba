"""The possessions of a worker: the checkpoint that it opens itself, loaded layers, runtimes on unpublished bundles."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moec.evaluation.engine import TextEngine, no_progress
from moec.manifests.codec import canonical_json
from moec.manifests.errors import CheckpointError
from moec.manifests.model import UnitKey

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.opening import open_checkpoint
from ..families import Lowering, lower
from ..quantization.quantized import QuantizedMatrix
from ..request.ports import OpenRuntime
from ..workspace.durable import disk_errors

if TYPE_CHECKING:
    from torch import Tensor

    from ..sensitivity.answer_walk import AnswerWalk
    from ..walker.loaded_layer import LoadedLayer, Replaced

_SAMPLE_BYTES = 1 << 16
Handle = Any
"""Names an object that the cluster holds; `Site.fetch` gives it. Equal handles name the same object."""
PlainMatrix = tuple[Any, ...]
"""A QuantizedMatrix on its way: its fields in order, arrays for tensors."""


def to_plain(matrix: QuantizedMatrix) -> PlainMatrix:
    """Fields of a matrix, each array with its own memory: a pickled view of a batch would carry all of the batch."""
    values = (getattr(matrix, item.name) for item in fields(matrix))
    return tuple(value.contiguous().numpy().copy() if isinstance(value, torch.Tensor) else value for value in values)


def from_plain(values: PlainMatrix) -> QuantizedMatrix:
    """The inverse of `to_plain`."""
    fields_again: list[Any] = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in values]
    return QuantizedMatrix(*fields_again)


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """An unpublished bundle on its way to workers.

    digest: name of the bundle.
    files: file name -> handles of its pieces, in order.
    share: share of a node's memory for the runtime on it. The runtime then stays open until it is closed. 0: the free
        memory, until another bundle is needed.
    """

    digest: str
    files: Mapping[str, Sequence[Handle]]
    share: float = 0.0


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Digest that two copies of a checkpoint share: headers, small files, sizes, start and end of every weight file.

    Workers compare it with the driver's; to hash all weights on every node would take longer than to compile them.
    """
    digest = hashlib.sha256()
    for name in checkpoint.companion_files():
        digest.update(name.encode() + hashlib.sha256(checkpoint.file_bytes(name)).digest())
    for name, ref in sorted(checkpoint.tensors.items()):
        digest.update(canonical_json([name, ref.file, ref.dtype, list(ref.shape), ref.offset_bytes, ref.size_bytes]))
    for name in checkpoint.weight_files():
        path = checkpoint.root / name
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{name} {size}".encode())
                for start in (0, max(0, size - _SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
    return digest.hexdigest()


class Site:
    """One worker. Everything is opened when a job first needs it.

    source: the checkpoint.
    identity: its `checkpoint_identity` on the driver.
    threads: number of passes at once.
    open_runtime: opens a bundle.
    fetch: returns the objects of some handles.
    memory_bytes: memory of the node. Runtimes get shares of it.
    """

    def __init__(
        self,
        source: str,
        identity: str,
        threads: int,
        open_runtime: OpenRuntime,
        fetch: Callable[[Sequence[Handle]], list[Any]],
        memory_bytes: int = 0,
    ) -> None:
        self.threads, self.fetch = threads, fetch
        self._source, self._identity, self._open_runtime = source, identity, open_runtime
        self._lowering: Lowering | None = None
        self._walks: dict[Handle, AnswerWalk] = {}
        self._slot: LoadedLayer | None = None
        self._loaded: int | None = None
        self._memory_bytes = memory_bytes
        self._engines: dict[str, tuple[TextEngine, contextlib.ExitStack]] = {}

    @property
    def lowering(self) -> Lowering:
        """The checkpoint. Raises CheckpointError where it is not the one that the driver has."""
        if self._lowering is None:
            checkpoint = open_checkpoint(self._source)
            if checkpoint_identity(checkpoint) != self._identity:
                raise CheckpointError(
                    f"`{checkpoint.place}` holds another checkpoint than on the machine that compiles",
                    "put the same files on every node, or name a path that all share",
                )
            self._lowering = lower(checkpoint)
        return self._lowering

    def slot(self) -> LoadedLayer:
        """Return the slot of the layers."""
        if self._slot is None:
            from ..walker.loaded_layer import LoadedLayer  # loads transformers, which quantizing does not need

            self._slot = LoadedLayer(self.lowering)
        return self._slot

    def answer_walk(self, answers: Handle) -> AnswerWalk:
        """Return what measures some answers. It keeps the states of the unquantized model."""
        from ..sensitivity.answer_walk import AnswerWalk

        if answers not in self._walks:
            (texts,) = self.fetch([answers])
            self._walks[answers] = AnswerWalk(self.slot, texts, self.threads, no_progress, keeps_slot=False)
        self._loaded = None  # the passes load other layers
        for walk in self._walks.values():
            walk.release()  # all of them use one slot
        return self._walks[answers]

    def weights(self, handle: Handle) -> Replaced:
        """Return the weights of a plan. The matrices of a layer are fetched when the first of them is needed."""
        (handles,) = self.fetch([handle])
        fetched: dict[UnitKey | str, Any] = {}

        def weight(name: UnitKey | str) -> Tensor | None:
            if name not in handles:
                return None
            if name not in fetched:
                fetched.clear()
                names = [other for other in handles if _layer_of(other) == _layer_of(name)]
                fetched.update(zip(names, self.fetch([handles[other] for other in names]), strict=True))
            return from_plain(fetched[name]).dequantize()

        return weight

    def layer(self, layer: int) -> LoadedLayer:
        """Return the slot with the checkpoint's own weights of a layer."""
        slot = self.slot()
        if self._loaded != layer:
            self._loaded = None  # until it is loaded
            slot.load(layer)
            self._loaded = layer
        return slot

    def forget_layer(self) -> None:
        """Give the memory of the loaded layer back."""
        self._slot = self._loaded = None
        for walk in self._walks.values():
            walk.release()

    def engine(self, bundle: BundleFiles) -> TextEngine:
        """The runtime on a bundle that is sent to this machine and lies there only until it is opened."""
        if bundle.digest in self._engines:
            return self._engines[bundle.digest][0]
        if not bundle.share:  # it will take what is free
            for digest in list(self._engines):
                self.close_engine(digest)
        with disk_errors(Path(tempfile.gettempdir())):
            folder = Path(tempfile.mkdtemp(prefix="moec-certify-"))
        opened = contextlib.ExitStack()
        try:
            with disk_errors(folder):
                for name, pieces in bundle.files.items():
                    with (folder / name).open("wb") as file:
                        for piece in pieces:
                            file.write(self.fetch([piece])[0])
            room_bytes = int(self._memory_bytes * bundle.share)
            engine = opened.enter_context(self._open_runtime(folder, room_bytes))
        finally:
            # What is open stays readable, and a worker that is killed leaves no file.
            shutil.rmtree(folder, ignore_errors=True)
        self._engines[bundle.digest] = engine, opened
        return engine

    def close_engine(self, digest: str) -> None:
        """Give up the runtime on a bundle, if it is open."""
        if digest in self._engines:
            self._engines.pop(digest)[1].close()


def _layer_of(name: UnitKey | str) -> int | str:
    """Return the layer of a weight, or its name outside the layers."""
    if isinstance(name, UnitKey):
        return name.layer
    return int(name.split(".")[1]) if name.startswith("layers.") else name

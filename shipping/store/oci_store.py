"""A store in an OCI registry. A bundle is a manifest whose layers are its files; equal files are one blob.

* A bundle has the tag of its digest. Its layers have the media types and the annotation of ModelPack.
* A signature has the tag `<digest>.sig`, a channel `channel-NAME`. Each is a manifest with one layer.
* An expert is no layer, because registries take manifests of 4 MiB. Experts are read as ranges of a layer.

Sources: OCI image specification 1.1 (github.com/opencontainers/image-spec), manifest.md; ModelPack
(github.com/modelpack/model-spec), docs/spec.md, config.md and annotations.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.manifests.bundle import MAX_FILE_BYTES
from moec.manifests.codec import canonical_json
from moec.manifests.errors import StoreFailed
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from .interface import Sent, SourceFile
from .oci_registry import MANIFEST_TYPE, MAX_MANIFEST_BYTES, Registry

_BUNDLE_TYPE = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
_WEIGHTS, _SETTINGS, _TEXT = (
    f"application/vnd.cncf.model.{kind}.v1.raw" for kind in ("weight", "weight.config", "doc")
)
_PATH = "org.cncf.model.filepath"
_FILE_TYPE = "application/vnd.moec.file.v1"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_MANIFEST_JSON = JsonLimits(MAX_MANIFEST_BYTES, containers=1 << 16, values=1 << 18, texts=1 << 19, depth=8)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHECK = "push the bundle again"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A file as a manifest has it. digest: with its algorithm."""

    digest: str
    size_bytes: int


class OciStore:
    """Files of one model in a repository."""

    def __init__(self, address: str, registry: Registry) -> None:
        self.address, self._registry = address, registry
        self._read: dict[str, dict[str, _Layer]] = {}
        self._put: dict[str, dict[str, _Layer]] = {}

    def size_bytes(self, path: str) -> int | None:
        layer = self._find(path)
        return None if layer is None else layer.size_bytes

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        layer = self._find(path)
        if layer is None:
            raise StoreFailed(f"`{self.address}` has no `{path}`", _CHECK)
        return self._registry.read_blob(layer.digest, start, end)

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        layer = self._find(path)
        if layer is None:
            return None
        data = self._registry.read_small_blob(layer.digest, limit_bytes)
        if data is None:
            raise StoreFailed(f"`{self.address}` has lost the content of `{path}`", _CHECK)
        return data

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        """Do nothing. The registry finds equal files by their digest."""

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Add the blob of a file, if the registry does not have its digest. Raises StoreFailed, InputError."""
        folder, _, name = path.rpartition("/")
        layer = _Layer(f"sha256:{sha256}", size_bytes)
        is_there = not again and self._registry.blob_bytes(layer.digest) == size_bytes
        if not is_there:
            with SourceFile(source, size_bytes, sha256, sent) as content:
                self._registry.put_blob(layer.digest, content)
        self._put.setdefault(folder, {})[name] = layer
        return not is_there

    def commit(self, folder: str) -> None:
        """Write the manifest of a bundle, with all files that were put. Raises StoreFailed."""
        layers = self._put.pop(folder, {})
        if not layers:
            return
        digests = [layer.digest for layer in layers.values()]
        config = {"descriptor": {}, "config": {}, "modelfs": {"type": "layers", "diffIds": digests}}
        described = [_describe(_kind(name), layer, name) for name, layer in layers.items()]
        self._put_manifest(folder, _BUNDLE_TYPE, _CONFIG_TYPE, canonical_json(config), described)
        self._read.pop(folder, None)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file: its blob, then the manifest that its tag names. Raises StoreFailed."""
        layer = self._put_data(data)
        name = path.rpartition("/")[2]
        self._put_manifest(_tag(path), _FILE_TYPE, _EMPTY_TYPE, b"{}", [_describe(_SETTINGS, layer, name)])

    def close(self) -> None:
        self._registry.close()

    def _put_manifest(self, tag: str, kind: str, config_type: str, config: bytes, layers: list[Any]) -> None:
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "config": _describe(config_type, self._put_data(config)),
            "layers": layers,
        }
        self._registry.put_manifest(tag, canonical_json(manifest))

    def _put_data(self, data: bytes) -> _Layer:
        layer = _Layer(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        self._registry.put_small_blob(layer.digest, data)
        return layer

    def _find(self, path: str) -> _Layer | None:
        """Return the layer of a file, or None. Manifests of bundles are kept, because they never change."""
        folder, _, name = path.rpartition("/")
        if not re.fullmatch("[0-9a-f]{64}", folder):
            return next(iter(self._layers(_tag(path)).values()), None)
        if folder not in self._read:
            layers = self._layers(folder)
            if not layers:
                return None
            self._read[folder] = layers
        return self._read[folder].get(name)

    def _layers(self, tag: str) -> dict[str, _Layer]:
        """Return the files of a manifest by name, none if there is no such tag. Raises StoreFailed."""
        data = self._registry.manifest(tag)
        if data is None:
            return {}
        try:
            plain = load_strict_json(data, _MANIFEST_JSON)
            return {layer["annotations"][_PATH]: _decode_layer(layer) for layer in plain["layers"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreFailed(f"`{self.address}`: the tag `{tag}` has no manifest of files", _CHECK) from error


def _decode_layer(plain: Any) -> _Layer:
    """Return a layer of a manifest. Raises ValueError, TypeError, KeyError."""
    digest, size = plain["digest"], plain["size"]
    if not _DIGEST.fullmatch(digest) or type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError("no digest or no size")
    return _Layer(digest, size)


def _describe(kind: str, layer: _Layer, name: str | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {"mediaType": kind, "digest": layer.digest, "size": layer.size_bytes}
    return described if name is None else {**described, "annotations": {_PATH: name}}


def _kind(name: str) -> str:
    if name.endswith(".safetensors"):
        return _WEIGHTS
    return _TEXT if name.endswith(".md") else _SETTINGS


def _tag(path: str) -> str:
    """Return the tag of a file outside a bundle."""
    return path.removesuffix(".json").replace("/", "-")

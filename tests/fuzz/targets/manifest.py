"""`moec.json`: what is accepted is written again byte for byte. Each input is tried with a digest that fits, too."""

from __future__ import annotations

import hashlib
from typing import Any

from moec.manifests.codec import DIGEST_FIELD, canonical_json, decode_manifest, encode_manifest
from moec.manifests.errors import BundleError
from moec.manifests.files.limits import MANIFEST_JSON
from moec.manifests.files.strict_json import load_strict_json
from tests.runtime.tiny_bundle import files_and_experts, manifest_of


def sealed(data: bytes) -> bytes:
    """Return an object in canonical form, with its correct digest."""
    try:
        plain: Any = load_strict_json(data, MANIFEST_JSON)
        if not isinstance(plain, dict):
            return data
        plain.pop(DIGEST_FIELD, None)
        return canonical_json({**plain, DIGEST_FIELD: hashlib.sha256(canonical_json(plain)).hexdigest()})
    except (ValueError, RecursionError):
        return data


def target(data: bytes) -> None:
    for given in (data, sealed(data)):
        try:
            manifest = decode_manifest(given, "moec.json")
        except BundleError:
            continue
        if encode_manifest(manifest) != given:
            raise AssertionError("an accepted manifest is written in another way")


def seeds() -> list[bytes]:
    return [encode_manifest(manifest_of(*files_and_experts()))]

"""Signatures of bundles, in the OpenSSF model-signing format that `model_signing` reads and writes.

A signature is a Sigstore bundle v0.3. Its DSSE envelope holds an in-toto statement with the SHA-256 of every file.

* `signature_file(folder)` -> path of a bundle's signature, `NAME.sig`
* `sign_bundle(manifest_bytes, manifest, private_key)` -> content of `NAME.sig`
* `read_signature_file(path)` -> its bytes, bounded
* `verify_signature(data, manifest_bytes, manifest, keys, place)` -> key that signed; all of steps 1 to 3
* `read_signature(data, keys, place)` -> key that signed, and the digests of all files (step 1)

The steps are those of docs/design/shipping.md, Signatures. Step 4, every file against its digest, is
`runtime/bundle/open_bundle.py`, `verify_bundle`.
Sources: model_signing 1.1.1 (github.com/sigstore/model-transparency), docs/model_signing_format.md; Sigstore bundle
v0.3 (github.com/sigstore/protobuf-specs), sigstore_bundle.proto; in-toto Statement v1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.bundle import MANIFEST_NAME, BundleManifest
from moec.manifests.codec import canonical_json
from moec.manifests.errors import DoesNotFit, SignatureInvalid
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import JsonLimits

from .dsse import (
    Envelope,
    compact_json,
    decode_envelope,
    encode_envelope,
    fields,
    load_json,
    make_envelope,
    malformed,
    verify_signatures,
)
from .keys import PrivateKey, PublicKey

MAX_SIGNATURE_BYTES = 8 << 20
"""Size of a bundle's signature, bytes: 10,000 files."""
SIGNATURE_SUFFIX = ".sig"
"""The signature of the bundle `NAME` is `NAME.sig` next to the folder."""
SIGNATURE_MARK = re.compile(rb'\A\{\s*"mediaType"\s*:\s*"application/vnd\.dev\.sigstore\.bundle')
"""Beginning of a signature, also of one by `model_signing`."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
"""Identifiers of the format. They are compared, never opened."""
METHOD = "files"
ALGORITHM = "sha256"
SIGNATURE_JSON = JsonLimits(MAX_SIGNATURE_BYTES, containers=1 << 4, values=1 << 5, texts=1 << 5, depth=8)
"""A signature."""
STATEMENT_JSON = JsonLimits(MAX_SIGNATURE_BYTES, containers=1 << 15, values=1 << 17, texts=1 << 18, depth=8)
"""The statement in it: three fields for each file."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def signature_file(folder: Path) -> Path:
    """Return the path of a bundle's signature. Links to the folder are followed."""
    resolved = folder.resolve()
    return resolved.parent / (resolved.name + SIGNATURE_SUFFIX)


def read_signature_file(path: Path) -> bytes:
    """Return the content of a signature. Raises SignatureInvalid if it is missing, too large or no regular file."""
    try:
        return read_input(path, MAX_SIGNATURE_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise SignatureInvalid(
            f"the signature `{path}` {error}", "get it from the one who signed the bundle"
        ) from error


def sign_bundle(manifest_bytes: bytes, manifest: BundleManifest, private_key: PrivateKey) -> bytes:
    """Return the signature of a bundle. Needs `cryptography`.

    The digests of the files are those of the manifest, so the caller decides how to know that the files have them.
    Equal manifests and keys give equal signatures.
    manifest_bytes: content of `moec.json`.
    manifest: the manifest that was decoded from it.
    Raises DoesNotFit if the bundle has more files than a signature may have.
    """
    digests = {entry.name: entry.sha256 for entry in manifest.files}
    digests[MANIFEST_NAME] = hashlib.sha256(manifest_bytes).hexdigest()
    envelope = make_envelope(encode_statement(manifest.name, digests), PAYLOAD_TYPE, private_key)
    material = {"publicKey": {"hint": private_key.public.key_id}, "tlogEntries": []}
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": material,
        "dsseEnvelope": encode_envelope(envelope),
    }
    data = compact_json(bundle)
    if len(data) > MAX_SIGNATURE_BYTES:
        raise DoesNotFit(
            f"the signature of {len(digests)} files takes {len(data)} bytes, at most {MAX_SIGNATURE_BYTES}"
        )
    return data


def verify_signature(
    data: bytes, manifest_bytes: bytes, manifest: BundleManifest, keys: Sequence[PublicKey], place: str
) -> PublicKey:
    """Check that one of the keys signed a bundle with this manifest, and return that key.

    The files themselves are not read: their digests are compared with those of the manifest.
    data: the signature.
    manifest_bytes: content of `moec.json`.
    manifest: the manifest that was decoded from it.
    keys: accepted keys.
    place: the signature, for messages.
    Raises SignatureInvalid.
    """
    key, signed = read_signature(data, keys, place)
    if signed.pop(MANIFEST_NAME, None) != hashlib.sha256(manifest_bytes).hexdigest():
        raise SignatureInvalid(
            f"`{place}` is not the signature of this bundle: it has another digest of `{MANIFEST_NAME}`",
            "get bundle and signature again",
        )
    expected = {entry.name: entry.sha256 for entry in manifest.files}
    for name in (*expected, *signed):
        if name not in signed:
            difference = f"file `{name}` of the bundle is not signed"
        elif name not in expected:
            difference = f"file `{name[:80]}` is signed, and the bundle does not have it"
        elif expected[name] != signed[name]:
            difference = f"file `{name}` has another digest than the signed one"
        else:
            continue
        raise SignatureInvalid(f"`{place}`: {difference}", "get bundle and signature again")
    return key


def read_signature(data: bytes, keys: Sequence[PublicKey], place: str) -> tuple[PublicKey, dict[str, str]]:
    """Return the accepted key that signed, and the SHA-256 of each signed file in hex, by name.

    data: the signature, at most MAX_SIGNATURE_BYTES.
    keys: accepted keys.
    place: the signature, for messages.
    Raises SignatureInvalid.
    """
    plain = load_json(data, SIGNATURE_JSON, place)
    media_type, material, plain_envelope = fields(plain, ("mediaType", "verificationMaterial", "dsseEnvelope"), place)
    if media_type != MEDIA_TYPE:
        raise malformed(place, "mediaType", f"`{MEDIA_TYPE}`")
    envelope = _with_key_id(decode_envelope(plain_envelope, place), _key_id(material, place), place)
    key = verify_signatures(envelope, PAYLOAD_TYPE, keys, place)
    statement = load_json(envelope.payload, STATEMENT_JSON, place)
    return key, _decode_statement(statement, place)


def encode_statement(name: str, digests: Mapping[str, str]) -> bytes:
    """Return the in-toto statement about the files of a model.

    name: name of the model.
    digests: SHA-256 of each file in hex, by name.
    """
    resources = [{"name": file, "algorithm": ALGORITHM, "digest": digests[file]} for file in sorted(digests)]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {ALGORITHM: _root_digest(resources)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": METHOD,
                "hash_type": ALGORITHM,
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": resources,
        },
    }
    return canonical_json(statement)


def _root_digest(resources: Sequence[Mapping[str, str]]) -> str:
    """Return the SHA-256 over the digests of all files, in the order of the statement."""
    digest = hashlib.sha256()
    for resource in resources:
        digest.update(bytes.fromhex(resource["digest"]))
    return digest.hexdigest()


def _key_id(material: Any, place: str) -> str:
    """Return the id of the key that the signature names. Raises SignatureInvalid.

    A certificate or an entry of a transparency log is refused: nothing here could check it.
    """
    if isinstance(material, dict) and "tlogEntries" not in material:
        material = {**material, "tlogEntries": []}
    public_key, entries = fields(material, ("publicKey", "tlogEntries"), place)
    if entries != []:
        raise malformed(place, "tlogEntries", "no entry")
    [hint] = fields(public_key, ("hint",), place)
    if not isinstance(hint, str) or not _DIGEST.fullmatch(hint):
        raise malformed(place, "hint", "64 hex digits")
    return hint


def _with_key_id(envelope: Envelope, key_id: str, place: str) -> Envelope:
    """Return the envelope with the id of its key. `model_signing` leaves it empty. Raises SignatureInvalid."""
    if len(envelope.signatures) != 1:
        raise malformed(place, "signatures", "one signature")
    [signature] = envelope.signatures
    if signature.key_id not in ("", key_id):
        raise malformed(place, "keyid", "the digest in `hint`")
    return replace(envelope, signatures=(replace(signature, key_id=key_id),))


def _decode_statement(plain: Any, place: str) -> dict[str, str]:
    """Return the digests of a statement by file. Raises SignatureInvalid.

    The format lets the predicate have more fields. Paths that the signer ignored need no rule: a file that the
    statement lacks is noticed by `verify_signature`.
    """
    kind, subjects, predicate_type, predicate = fields(plain, ("_type", "subject", "predicateType", "predicate"), place)
    if (kind, predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise malformed(place, "predicateType", f"`{PREDICATE_TYPE}` in a `{STATEMENT_TYPE}`")
    if not isinstance(predicate, dict):
        raise malformed(place, "predicate", "an object")
    serialization, resources = predicate.get("serialization"), predicate.get("resources")
    if not isinstance(serialization, dict) or serialization.get("method") != METHOD:
        raise malformed(place, "serialization.method", f"`{METHOD}`")
    if serialization.get("hash_type") != ALGORITHM:
        raise malformed(place, "serialization.hash_type", f"`{ALGORITHM}`")
    if not isinstance(resources, list):
        raise malformed(place, "resources", "a list")
    digests: dict[str, str] = {}
    for resource in resources:
        name, algorithm, digest = fields(resource, ("name", "algorithm", "digest"), place)
        if algorithm != ALGORITHM or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise malformed(place, "resources", f"a digest of the algorithm `{ALGORITHM}`")
        if not isinstance(name, str) or name in digests:
            raise malformed(place, "resources", "each file once")
        digests[name] = digest
    _check_subject(subjects, _root_digest(resources), place)
    return digests


def _check_subject(subjects: Any, root_digest: str, place: str) -> None:
    """Check that the statement is about its own files. The name of the model may be any. Raises SignatureInvalid."""
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise malformed(place, "subject", "one subject")
    name, digest = fields(subjects[0], ("name", "digest"), place)
    if not isinstance(name, str) or digest != {ALGORITHM: root_digest}:
        raise malformed(place, "subject", "a name, and the digest of all resources")

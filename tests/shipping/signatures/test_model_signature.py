"""Signatures of bundles: they cover every file, and nothing else is accepted.

`model_signing` 1.1.1 accepts them, and we accept those that it makes with a key on P-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.bundle import BundleManifest, FileEntry
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import BundleError, DoesNotFit, SignatureInvalid
from moec.shipping.signatures import model_signature
from moec.shipping.signatures.dsse import compact_json, signed_bytes
from moec.shipping.signatures.keys import make_key_pair, read_private_key, read_public_key
from moec.shipping.signatures.model_signature import (
    PAYLOAD_TYPE,
    encode_statement,
    read_signature,
    read_signature_file,
    sign_bundle,
    verify_signature,
)
from tests.runtime.tiny_bundle import files_and_experts, manifest_of, write_bundle
from tests.shipping.signing_keys import signing_key

TOOLS = Path(__file__).parents[3] / "build" / "shipping-tools"
FLIPS = 200 if os.environ.get("MOEC_FULL_GATES") != "1" else 2000


@dataclass(frozen=True)
class Signed:
    """A manifest, its bytes, and its signature."""

    manifest: BundleManifest
    manifest_bytes: bytes
    signature: bytes

    def verify(self, signature: bytes | None = None, *names: str) -> None:
        keys = [signing_key(name).public for name in names or ("fleet",)]
        given = self.signature if signature is None else signature
        verify_signature(given, self.manifest_bytes, self.manifest, keys, "tiny.sig")


@pytest.fixture(scope="module")
def signed() -> Signed:
    manifest = manifest_of(*files_and_experts())
    data = encode_manifest(manifest)
    return Signed(manifest, data, sign_bundle(data, manifest, signing_key()))


def statement_of(signature: bytes) -> Any:
    return json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))


def signed_again(signature: bytes, change: Callable[[Any], None], name: str = "fleet") -> bytes:
    """Return the signature with another statement, signed by a key."""
    plain, statement = json.loads(signature), statement_of(signature)
    change(statement)
    payload = json.dumps(statement).encode()
    plain["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    made = signing_key(name).sign(signed_bytes(PAYLOAD_TYPE, payload))
    plain["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(made).decode()
    return compact_json(plain)


def changed(signature: bytes, change: Callable[[Any], None]) -> bytes:
    plain = json.loads(signature)
    change(plain)
    return compact_json(plain)


def test_a_signature_covers_every_file(signed: Signed) -> None:
    signed.verify()
    statement = statement_of(signed.signature)
    resources = statement["predicate"]["resources"]
    assert [entry["name"] for entry in resources] == sorted(
        ["moec.json", *(entry.name for entry in signed.manifest.files)]
    )
    digests = b"".join(bytes.fromhex(entry["digest"]) for entry in resources)
    assert statement["subject"] == [{"name": "tiny", "digest": {"sha256": hashlib.sha256(digests).hexdigest()}}]
    _, signed_digests = read_signature(signed.signature, [signing_key().public], "tiny.sig")
    assert signed_digests == {entry["name"]: entry["digest"] for entry in resources}


def test_equal_bundles_give_equal_signatures(signed: Signed) -> None:
    assert sign_bundle(signed.manifest_bytes, signed.manifest, signing_key()) == signed.signature


@pytest.mark.gate("G14")
def test_every_changed_byte_of_the_manifest_is_refused(signed: Signed) -> None:
    """The signed digest shows it, whether or not the manifest decodes."""
    source, key = random.Random(3), signing_key().public
    for _ in range(FLIPS):
        flipped = bytearray(signed.manifest_bytes)
        flipped[source.randrange(len(flipped))] ^= source.randrange(1, 256)
        with pytest.raises(BundleError) as caught:
            verify_signature(
                signed.signature, bytes(flipped), decode_manifest(bytes(flipped), "moec.json"), [key], "tiny.sig"
            )
        assert caught.value.exit_code == 3
        with pytest.raises(SignatureInvalid, match="another digest of `moec"):
            verify_signature(signed.signature, bytes(flipped), signed.manifest, [key], "tiny.sig")


def drop(statement: Any) -> None:
    """Leave a file out, with a root digest that fits."""
    rebuild(statement, lambda digests: digests.pop("config.json"))


def add(statement: Any) -> None:
    rebuild(statement, lambda digests: digests.update(more="0" * 64))


def alter(statement: Any) -> None:
    rebuild(statement, lambda digests: digests.update({"config.json": "0" * 64}))


def rebuild(statement: Any, change: Callable[[dict[str, str]], object]) -> None:
    digests = {entry["name"]: entry["digest"] for entry in statement["predicate"]["resources"]}
    change(digests)
    statement.update(json.loads(encode_statement("tiny", digests)))


def in_predicate(key: str, **values: object) -> Callable[[Any], None]:
    return lambda statement: statement["predicate"][key].update(values)


@pytest.mark.gate("G14")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "file `config.json` of the bundle is not signed"),
        (add, "file `more` is signed, and the bundle does not have it"),
        (alter, "file `config.json` has another digest"),
        (lambda statement: rebuild(statement, lambda digests: digests.pop("moec.json")), "digest of `moec.json`"),
        (lambda statement: statement.update(_type="https://in-toto.io/Statement/v0.1"), "predicateType"),
        (lambda statement: statement.update(predicateType="https://model_signing/Digests/v0.1"), "predicateType"),
        (lambda statement: statement.update(more=1), "expected an object with"),
        (lambda statement: statement.update(predicate=[]), "predicate"),
        (lambda statement: statement["subject"].append(statement["subject"][0]), "one subject"),
        (lambda statement: statement["subject"][0]["digest"].update(sha256="0" * 64), "digest of all resources"),
        (lambda statement: statement["subject"][0]["digest"].update(sha512="0" * 128), "digest of all resources"),
        (in_predicate("serialization", method="shards"), "serialization.method"),
        (in_predicate("serialization", hash_type="blake3"), "serialization.hash_type"),
        (lambda statement: statement["predicate"].pop("serialization"), "serialization.method"),
        (lambda statement: statement["predicate"].update(resources={}), "a list"),
        (lambda statement: statement["predicate"]["resources"][0].update(algorithm="sha512"), "algorithm `sha256`"),
        (lambda statement: statement["predicate"]["resources"][0].update(digest="A" * 64), "algorithm `sha256`"),
        (lambda statement: statement["predicate"]["resources"][0].update(digest=7), "algorithm `sha256`"),
        (lambda statement: statement["predicate"]["resources"][0].update(name=7), "each file once"),
        (
            lambda statement: statement["predicate"]["resources"].append(statement["predicate"]["resources"][0]),
            "each file once",
        ),
    ],
)
def test_other_statements_are_refused(signed: Signed, change: Callable[[Any], None], message: str) -> None:
    """Each is signed by the accepted key."""
    with pytest.raises(SignatureInvalid, match=message):
        signed.verify(signed_again(signed.signature, change))


def test_a_statement_may_say_more_about_how_it_was_made(signed: Signed) -> None:
    """The format lets the predicate have further fields."""

    def more(statement: Any) -> None:
        statement["predicate"]["later"] = 1
        statement["predicate"]["serialization"]["ignore_paths"] = [".git"]
        statement["subject"][0]["name"] = "another folder"

    signed.verify(signed_again(signed.signature, more))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(mediaType="application/vnd.dev.sigstore.bundle.v0.1+json"), "mediaType"),
        (lambda plain: plain.update(messageSignature={}), "expected an object with"),
        (lambda plain: plain["verificationMaterial"].update(tlogEntries=[{}]), "tlogEntries"),
        (lambda plain: plain["verificationMaterial"].update(certificate={}), "publicKey"),
        (lambda plain: plain["verificationMaterial"].update(publicKey={"rawBytes": ""}), "hint"),
        (lambda plain: plain["verificationMaterial"]["publicKey"].update(hint="0" * 64), "keyid"),
        (lambda plain: plain["verificationMaterial"]["publicKey"].update(hint=""), "hint"),
        (lambda plain: plain["verificationMaterial"]["publicKey"].update(hint=None), "hint"),
        (lambda plain: plain["dsseEnvelope"]["signatures"].append(plain["dsseEnvelope"]["signatures"][0]), "one sig"),
        (lambda plain: plain["dsseEnvelope"].update(payloadType="text/plain"), "payload type"),
    ],
)
def test_other_signature_files_are_refused(signed: Signed, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(SignatureInvalid, match=message):
        signed.verify(changed(signed.signature, change))


def test_an_empty_key_id_and_no_log_are_what_model_signing_writes(signed: Signed) -> None:
    def change(plain: Any) -> None:
        plain["dsseEnvelope"]["signatures"][0]["keyid"] = ""
        del plain["verificationMaterial"]["tlogEntries"]

    data = changed(signed.signature, change)
    signed.verify(data)
    with pytest.raises(SignatureInvalid, match="signed by none of the accepted keys"):
        signed.verify(data, "stranger")


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[" * 1000, b"\xff", b" " * (9 << 20)])
def test_other_files_are_refused(signed: Signed, data: bytes) -> None:
    with pytest.raises(SignatureInvalid):
        signed.verify(data)


def test_ten_thousand_files_can_be_signed_and_more_are_refused(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuple(FileEntry(f"file-{number:05d}.safetensors", 1, "0" * 64) for number in range(10_000))
    manifest = replace(signed.manifest, files=(*signed.manifest.files, *entries))
    data = sign_bundle(b"{}", manifest, signing_key())
    assert len(read_signature(data, [signing_key().public], "big.sig")[1]) == len(manifest.files) + 1
    monkeypatch.setattr(model_signature, "MAX_SIGNATURE_BYTES", len(data) - 1)
    with pytest.raises(DoesNotFit, match="takes"):
        sign_bundle(b"{}", manifest, signing_key())


def test_the_path_lies_next_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "current").symlink_to("tiny")
    assert model_signature.signature_file(tmp_path / "current") == tmp_path.resolve() / "tiny.sig"
    with pytest.raises(SignatureInvalid, match="is missing"):
        model_signature.read_signature_file(tmp_path / "tiny.sig")
    with pytest.raises(SignatureInvalid, match="is a folder"):
        model_signature.read_signature_file(tmp_path / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle `tiny`, a key pair, and a signature of each side."""
    if not (TOOLS / ".ready").exists():
        if os.environ.get("CI"):
            pytest.fail("`make shipping-tools` has not filled build/shipping-tools")
        pytest.skip("needs `make shipping-tools`")
    folder = tmp_path_factory.mktemp("signed")
    write_bundle(folder / "tiny")
    make_key_pair(folder / "fleet.pem")
    data = (folder / "tiny" / "moec.json").read_bytes()
    ours = sign_bundle(data, decode_manifest(data, "moec.json"), read_private_key(folder / "fleet.pem"))
    (folder / "ours.sig").write_bytes(ours)
    done = model_signing(folder, "sign", "key", "tiny", "--signature", "theirs.sig", "--private_key", "fleet.pem")
    assert done.returncode == 0, done.stderr
    return folder


def model_signing(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / "bin" / "python"), "-m", "model_signing", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def verified_by_model_signing(folder: Path) -> subprocess.CompletedProcess[str]:
    return model_signing(folder, "verify", "key", "tiny", "--signature", "ours.sig", "--public_key", "fleet.pub")


def verify_theirs(folder: Path, key: str = "fleet.pub") -> None:
    data = (folder / "tiny" / "moec.json").read_bytes()
    signature = read_signature_file(folder / "theirs.sig")
    verify_signature(signature, data, decode_manifest(data, "moec.json"), [read_public_key(folder / key)], "theirs.sig")


def test_model_signing_accepts_ours_and_hashes_the_files(folder: Path) -> None:
    done = verified_by_model_signing(folder)
    assert done.returncode == 0 and "Verification succeeded" in done.stdout + done.stderr, done.stderr
    path = folder / "tiny" / "config.json"
    whole = path.read_bytes()
    path.write_bytes(whole + b" ")
    try:
        done = verified_by_model_signing(folder)
    finally:
        path.write_bytes(whole)
    assert done.returncode != 0 and "config.json" in done.stdout + done.stderr


def test_we_accept_theirs(folder: Path) -> None:
    verify_theirs(folder)
    make_key_pair(folder / "stranger.pem")
    with pytest.raises(SignatureInvalid, match="signed by none of the accepted keys"):
        verify_theirs(folder, "stranger.pub")


def test_both_statements_say_the_same(folder: Path) -> None:
    """Ours leaves no path out."""
    ours, theirs = (statement_of((folder / name).read_bytes()) for name in ("ours.sig", "theirs.sig"))
    assert theirs["predicate"]["serialization"].pop("ignore_paths")
    assert ours["predicate"]["serialization"].pop("ignore_paths") == []
    assert ours == theirs

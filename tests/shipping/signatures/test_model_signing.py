"""`model_signing` 1.1.1 accepts our signatures, and we accept those that it makes with a key on P-256."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.codec import decode_manifest
from moec.manifests.errors import SignatureInvalid
from moec.shipping.signatures.keys import make_key_pair, read_private_key, read_public_key
from moec.shipping.signatures.model_signature import read_signature_file, sign_bundle, verify_signature
from tests.runtime.tiny_bundle import write_bundle

TOOLS = Path(__file__).parents[3] / "build" / "shipping-tools"


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


def statement(path: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(path.read_bytes())["dsseEnvelope"]["payload"]))


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
    ours, theirs = statement(folder / "ours.sig"), statement(folder / "theirs.sig")
    assert theirs["predicate"]["serialization"].pop("ignore_paths")
    assert ours["predicate"]["serialization"].pop("ignore_paths") == []
    assert ours == theirs

"""Key files: what is written, what is read, and one sentence for everything that is no key."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.manifests.errors import DoesNotFit, InputError
from moec.shipping.signatures import dsse, p256
from moec.shipping.signatures.keys import (
    MAX_PASSPHRASE_BYTES,
    NewFileSystem,
    decode_public_key,
    encode_public_key,
    make_key_pair,
    read_private_key,
    read_public_key,
    write_key_files,
)
from tests.failing_system import Countdown
from tests.shipping.signing_keys import signing_key

EXAMPLES = 40 if os.environ.get("MOEC_FULL_GATES") != "1" else 5000
P256 = ec.derive_private_key(7, ec.SECP256R1())


def public_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def pem_of(der: bytes) -> bytes:
    text = base64.b64encode(der).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""]).encode()


def der_of(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.split(b"\n")[1:-2]))


def test_a_pair_is_written_and_read(tmp_path: Path) -> None:
    path, key = make_key_pair(tmp_path / "fleet.pem")
    assert path == tmp_path / "fleet.pub"
    assert sorted(os.listdir(tmp_path)) == ["fleet.pem", "fleet.pub"]
    assert stat.S_IMODE((tmp_path / "fleet.pem").stat().st_mode) == 0o600
    assert read_public_key(path) == key == read_private_key(tmp_path / "fleet.pem").public
    assert key.key_id == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / "fleet.pem").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")


def test_each_pair_is_another_one(tmp_path: Path) -> None:
    first, second = (make_key_pair(tmp_path / f"{name}.pem")[1] for name in ("a", "b"))
    assert first.point != second.point and first.key_id != second.key_id


def test_the_private_file_belongs_to_its_owner_under_any_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_key_pair(tmp_path / "fleet.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fleet.pem").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["fleet.pem", "fleet.pub"])
def test_no_key_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(InputError, match=f"{name}` exists, and a key is never replaced"):
        make_key_pair(tmp_path / "fleet.pem")
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == b"mine"


def test_a_key_that_another_process_makes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """The name is taken between the check and the end of the write."""

    class Meanwhile(NewFileSystem):
        def rename(self, source: Path, target: Path) -> None:
            target.write_bytes(b"theirs")
            super().rename(source, target)

    system = Meanwhile()
    with pytest.raises(InputError, match=r"fleet.pem` exists"):
        write_key_files(tmp_path / "fleet.pem", b"a", tmp_path / "fleet.pub", b"b", system)
    assert os.listdir(tmp_path) == ["fleet.pem"] and (tmp_path / "fleet.pem").read_bytes() == b"theirs"


@pytest.mark.parametrize("number", range(1, 11))
def test_a_failing_call_leaves_no_file(tmp_path: Path, number: int) -> None:
    """The disk is full at one of the calls that write."""

    system = NewFileSystem()
    Countdown(system, number)
    with pytest.raises(DoesNotFit, match="disk of"):
        write_key_files(tmp_path / "fleet.pem", b"a", tmp_path / "fleet.pub", b"b", system)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    _, key = make_key_pair(tmp_path / "fleet.pem")
    assert sorted(os.listdir(tmp_path)) == ["fleet.pem", "fleet.pub"]
    assert read_private_key(tmp_path / "fleet.pem").public == key


def test_a_suffix_that_the_public_key_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is for the public key"):
        make_key_pair(tmp_path / "fleet.pub")


@pytest.mark.parametrize("name", [".", "..", "-", "/"])
def test_what_is_no_name_of_a_file(name: str) -> None:
    with pytest.raises(InputError, match="names no file of its own"):
        make_key_pair(Path(name))


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        make_key_pair(tmp_path / "nowhere" / "fleet.pem")


def test_a_passphrase_encrypts_the_private_key(tmp_path: Path) -> None:
    _, key = make_key_pair(tmp_path / "fleet.pem", b"correct horse")
    assert (tmp_path / "fleet.pem").read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    assert read_private_key(tmp_path / "fleet.pem", lambda: b"correct horse").public == key
    with pytest.raises(InputError, match=r"cannot be read with this passphrase .*the right passphrase"):
        read_private_key(tmp_path / "fleet.pem", lambda: b"wrong horse")
    with pytest.raises(InputError, match="no passphrase was given"):
        read_private_key(tmp_path / "fleet.pem")


@pytest.mark.parametrize("passphrase", [b"", bytes(MAX_PASSPHRASE_BYTES + 1)])
def test_passphrases_that_cannot_be_used(tmp_path: Path, passphrase: bytes) -> None:
    with pytest.raises(InputError, match="the passphrase has"):
        make_key_pair(tmp_path / "fleet.pem", passphrase)
    assert os.listdir(tmp_path) == []
    make_key_pair(tmp_path / "fleet.pem", b"x" * MAX_PASSPHRASE_BYTES)
    with pytest.raises(InputError, match="the passphrase has"):
        read_private_key(tmp_path / "fleet.pem", lambda: passphrase)


def test_a_passphrase_is_not_asked_for_without_need(tmp_path: Path) -> None:
    make_key_pair(tmp_path / "fleet.pem")

    def passphrase() -> bytes:
        raise AssertionError("the key is not encrypted")

    assert read_private_key(tmp_path / "fleet.pem", passphrase)


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_private_keys_in_the_forms_of_openssl(tmp_path: Path, form: PrivateFormat) -> None:
    (tmp_path / "a.pem").write_bytes(private_pem(P256, form))
    key = read_private_key(tmp_path / "a.pem")
    assert encode_public_key(key.public.point) == public_pem(P256)
    assert key.public.verify(b"message", key.sign(b"message"))
    assert key.sign(b"message") == key.sign(b"message")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no private key in PEM"),
        (b"a text", "is no private key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is no private key in PEM"),
        (public_pem(P256), "is a public key, expected a private key"),
        (private_pem(ec.derive_private_key(7, ec.SECP384R1()), PrivateFormat.PKCS8), "is a key on secp384r1"),
        (private_pem(ec.derive_private_key(7, ec.SECP256K1()), PrivateFormat.PKCS8), "is a key on secp256k1"),
        (private_pem(ed25519.Ed25519PrivateKey.generate(), PrivateFormat.PKCS8), "is a key of another kind"),
        (bytes(20_000), "has 20000 bytes, more than the limit"),
    ],
)
def test_what_is_no_private_key(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.pem").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_private_key(tmp_path / "a.pem")


def test_missing_keys(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        read_public_key(tmp_path / "a.pub")
    with pytest.raises(InputError, match="is a folder"):
        read_private_key(tmp_path)


POINT = der_of(public_pem(P256))[-64:]
PREFIX = der_of(public_pem(P256))[:-64]
LAST = public_pem(P256).index(b"==\n") - 1
SPARE_BITS = public_pem(P256)[:LAST] + bytes([public_pem(P256)[LAST] + 1]) + public_pem(P256)[LAST + 1 :]
"""The last character of the base64 has four bits that stand for nothing. Here one of them is set."""
COMPRESSED = P256.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
ALGORITHM = bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no public key in PEM"),
        (b"a text", "is no public key in PEM"),
        (b"\xff\xfe", "is no public key in PEM"),
        (private_pem(P256, PrivateFormat.PKCS8), "is a private key, expected a public key"),
        (private_pem(P256, PrivateFormat.TraditionalOpenSSL), "is a private key, expected a public key"),
        (public_pem(P256) + private_pem(P256, PrivateFormat.PKCS8), "is a private key, expected a public key"),
        (public_pem(P256) + public_pem(P256), "its base64 is not valid"),
        (b"comment\n" + public_pem(P256), "is no public key in PEM"),
        (public_pem(P256).replace(b"PUBLIC", b"CERTIFICATE"), "is no public key in PEM"),
        (public_pem(P256).replace(b"A", b"*"), "its base64 is not valid"),
        (public_pem(P256).replace(b"==\n", b"=\n"), "its base64 is not valid"),
        (SPARE_BITS, "its base64 is not valid"),
        (b"-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----\n", "its base64 is not valid"),
        (public_pem(ec.derive_private_key(7, ec.SECP384R1())), "is a key on another curve"),
        (public_pem(ec.derive_private_key(7, ec.SECP256K1())), "is a key on another curve"),
        (public_pem(ed25519.Ed25519PrivateKey.generate()), "is a key of another kind"),
        (public_pem(rsa.generate_private_key(65537, 1024)), "is a key of another kind"),
        (pem_of(b"\x30\x39" + ALGORITHM + b"\x03\x22\0" + COMPRESSED), "has a compressed point"),
        (pem_of(PREFIX + POINT + b"\0"), "is malformed"),
        (pem_of(PREFIX + POINT[:-1]), "is malformed"),
        (pem_of(PREFIX[:-1] + b"\x05" + POINT), "is malformed"),
        (pem_of(PREFIX[:-1] + b"\x06" + POINT), "is malformed"),
        (pem_of(b"\x30\x81\x59" + PREFIX[2:] + POINT), "is malformed"),
        (pem_of(b"\x30\x18" + ALGORITHM + b"\x03\x01\0"), "is malformed"),
        (pem_of(PREFIX + bytes(64)), "point that is not on P-256"),
        (pem_of(PREFIX + POINT[:-1] + bytes([POINT[-1] ^ 1])), "point that is not on P-256"),
        (pem_of(PREFIX + b"\xff" * 64), "point that is not on P-256"),
        (bytes(20_000), "has 20000 bytes, more than the limit"),
    ],
)
def test_what_is_no_public_key(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.pub").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_public_key(tmp_path / "a.pub")
    assert caught.value.hint is not None


def test_a_public_key_of_openssl_and_of_windows() -> None:
    numbers = P256.public_key().public_numbers()
    key = decode_public_key(public_pem(P256), "a.pub")
    assert key.point == (numbers.x, numbers.y)
    assert decode_public_key(public_pem(P256).replace(b"\n", b"\r\n"), "a.pub") == key
    assert decode_public_key(public_pem(P256).rstrip(b"\n"), "a.pub") == key


@settings(max_examples=EXAMPLES)
@given(st.integers(1, p256.N - 1))
def test_public_keys_are_written_as_cryptography_writes_them(secret: int) -> None:
    key = ec.derive_private_key(secret, ec.SECP256R1())
    numbers = key.public_key().public_numbers()
    assert encode_public_key((numbers.x, numbers.y)) == public_pem(key)
    assert decode_public_key(public_pem(key), "a.pub").point == (numbers.x, numbers.y)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_a_changed_key_is_another_key_or_none(data: st.DataObject) -> None:
    pem = bytearray(public_pem(P256))
    pem[data.draw(st.integers(0, len(pem) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        key = decode_public_key(bytes(pem), "a.pub")
    except InputError:
        return
    assert p256.is_on_curve(key.point)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="NOT RUN: openssl is not installed")
def test_openssl_verifies_an_envelope(tmp_path: Path) -> None:
    """A person can check a signature by hand, as docs/design/shipping.md shows."""
    key, payload, kind = signing_key(), b"payload", "text/plain"
    envelope = dsse.make_envelope(payload, kind, key)
    (tmp_path / "a.pub").write_bytes(encode_public_key(key.public.point))
    (tmp_path / "a.der").write_bytes(envelope.signatures[0].signature)
    (tmp_path / "signed").write_bytes(dsse.signed_bytes(kind, payload))
    command = ["openssl", "dgst", "-sha256", "-verify", "a.pub", "-signature", "a.der", "signed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Verified OK\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="NOT RUN: openssl is not installed")
def test_keys_and_signatures_of_openssl(tmp_path: Path) -> None:
    make = "openssl ecparam -name prime256v1 -genkey -noout -out a.pem && openssl ec -in a.pem -pubout -out a.pub"
    sign = "printf message > m && openssl dgst -sha256 -sign a.pem -out m.der m"
    subprocess.run(["sh", "-c", f"{make} && {sign}"], cwd=tmp_path, capture_output=True, check=True)
    key = read_private_key(tmp_path / "a.pem")
    assert key.public == read_public_key(tmp_path / "a.pub")
    assert key.public.verify(b"message", (tmp_path / "m.der").read_bytes())


def test_the_private_key_is_readable_by_cryptography_alone(tmp_path: Path) -> None:
    make_key_pair(tmp_path / "fleet.pem", b"secret")
    assert load_pem_private_key((tmp_path / "fleet.pem").read_bytes(), b"secret")

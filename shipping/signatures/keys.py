"""Keys on NIST P-256 in PEM files: read, made, and used to sign.

A public key is read with the standard library. A private key is read, made and used with `cryptography`, which is
loaded by the functions that need it.

* `read_public_key(path)`, `decode_public_key(data, place)` -> PublicKey
* `read_private_key(path, passphrase)` -> PrivateKey, whose `sign` and `public` are used
* `make_key_pair(path, passphrase)` writes a new pair
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from moec.manifests.errors import InputError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.output_file import (
    STDOUT,
    AtomicFile,
    FileSystem,
    check_folder,
    temporary_path,
    write_errors,
)

from . import p256

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PRIVATE_MODE, PUBLIC_MODE = 0o600, 0o644
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
MAX_KEY_BYTES = 16 << 10
"""Size of a key file, bytes. An encrypted private key has about 400."""
PUBLIC_SUFFIX = ".pub"
MAX_PASSPHRASE_BYTES = 1023
"""Size of a passphrase, bytes. OpenSSL's limit."""
_LABEL = "PUBLIC KEY"
_LINE_CHARACTERS = 64
_EC_OID = bytes.fromhex("06072a8648ce3d0201")
_P256_OID = bytes.fromhex("06082a8648ce3d030107")
_P256_PREFIX = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
"""DER of a SubjectPublicKeyInfo of P-256 up to the coordinates: everything before them has one encoding."""
_MAKE_KEY = "make a key pair: moec keygen FILE.pem"
_NAME_PUBLIC = "name the file that ends in .pub"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key.

    point: coordinates, on the curve.
    key_id: SHA-256 of the key as PEM, in hex. The OpenSSF format has it as `hint`.
    """

    point: p256.Affine
    key_id: str

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Return whether this key's private half made a signature, in DER, over the message."""
        return p256.is_signature(self.point, message, signature)


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private key.

    public: its public half.
    """

    public: PublicKey
    _key: EllipticCurvePrivateKey

    def sign(self, message: bytes) -> bytes:
        """Return the signature over a message, in DER. Equal messages give equal signatures (RFC 6979)."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
        except UnsupportedAlgorithm:  # OpenSSL before 3.2 draws a random number
            algorithm = ec.ECDSA(hashes.SHA256())
        return self._key.sign(message, algorithm)


def encode_public_key(point: p256.Affine) -> bytes:
    """Return a public key as PEM, as `cryptography` and OpenSSL write it."""
    der = _P256_PREFIX + b"".join(number.to_bytes(p256.BYTES, "big") for number in point)
    text = base64.b64encode(der).decode()
    lines = [text[start : start + _LINE_CHARACTERS] for start in range(0, len(text), _LINE_CHARACTERS)]
    return "\n".join([f"-----BEGIN {_LABEL}-----", *lines, f"-----END {_LABEL}-----", ""]).encode()


def read_public_key(path: Path) -> PublicKey:
    return decode_public_key(_read_key_file(path), str(path))


def decode_public_key(data: bytes, place: str) -> PublicKey:
    """Return the public key of a PEM text.

    The text holds nothing but the key. Its point is not compressed. Both have one encoding, which is required.
    place: the file, for messages.
    Raises InputError.
    """
    der = _public_der(data, place)
    if not der.startswith(_P256_PREFIX) or len(der) != len(_P256_PREFIX) + 2 * p256.BYTES:
        raise InputError(f"`{place}` {_fault_of(der)}, expected an uncompressed public key on P-256", _MAKE_KEY)
    numbers = der[len(_P256_PREFIX) :]
    point = (int.from_bytes(numbers[: p256.BYTES], "big"), int.from_bytes(numbers[p256.BYTES :], "big"))
    if not p256.is_on_curve(point):
        raise InputError(f"`{place}` has a point that is not on P-256", _MAKE_KEY)
    return _public_key(point)


def read_private_key(path: Path, passphrase: Callable[[], bytes] | None = None) -> PrivateKey:
    """Read a private key from a PEM file. Needs `cryptography`.

    passphrase: called if the key is encrypted; None: such a key is refused.
    Raises InputError.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_key_file(path)
    if f"-----BEGIN {_LABEL}-----".encode() in data:
        raise InputError(f"`{path}` is a public key, expected a private key", "name the file that ends in .pem")
    try:
        try:
            key = load_pem_private_key(data, None)
        except TypeError:  # it is encrypted
            if passphrase is None:
                raise InputError(f"`{path}` is encrypted, and no passphrase was given", "give the passphrase") from None
            given = passphrase()
            check_passphrase(given)
            key = load_pem_private_key(data, given)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if b"ENCRYPTED" in data:
            raise InputError(f"`{path}` cannot be read with this passphrase", "give the right passphrase") from error
        raise InputError(f"`{path}` is no private key in PEM", _MAKE_KEY) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        kind = f"a key on {key.curve.name}" if isinstance(key, ec.EllipticCurvePrivateKey) else "a key of another kind"
        raise InputError(f"`{path}` is {kind}, expected one on P-256", _MAKE_KEY)
    return _private_key(key)


def make_key_pair(path: Path, passphrase: bytes | None = None) -> tuple[Path, PublicKey]:
    """Write a new private key to a file with mode 0600, and its public key next to it. Needs `cryptography`.

    path: the private key, a new file. The public key gets the same name with the suffix `.pub`.
    passphrase: encrypts the private key; None: it is not encrypted.
    Returns the file of the public key, and the key.
    Raises InputError, also if one of the files exists. Raises DoesNotFit. Neither leaves a file.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
    )

    if path.name in ("", "..", STDOUT.name):
        raise InputError(f"`{path}` names no file of its own", "name a new file, for example fleet.pem")
    if path.suffix == PUBLIC_SUFFIX:
        raise InputError(f"`{path}`: the suffix {PUBLIC_SUFFIX} is for the public key", "name a file that ends in .pem")
    encryption: KeySerializationEncryption = NoEncryption()
    if passphrase is not None:
        check_passphrase(passphrase)
        encryption = BestAvailableEncryption(passphrase)
    key = ec.generate_private_key(ec.SECP256R1())
    public = _private_key(key).public
    public_path = path.with_suffix(PUBLIC_SUFFIX)
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    write_key_files(path, private_pem, public_path, encode_public_key(public.point))
    return public_path, public


def check_passphrase(passphrase: bytes) -> None:
    if not 1 <= len(passphrase) <= MAX_PASSPHRASE_BYTES:
        limits = f"expected 1 to {MAX_PASSPHRASE_BYTES}"
        raise InputError(f"the passphrase has {len(passphrase)} bytes, {limits}", "give another passphrase")


def _public_key(point: p256.Affine) -> PublicKey:
    return PublicKey(point, hashlib.sha256(encode_public_key(point)).hexdigest())


def _private_key(key: EllipticCurvePrivateKey) -> PrivateKey:
    numbers = key.public_key().public_numbers()
    return PrivateKey(_public_key((numbers.x, numbers.y)), key)


def _read_key_file(path: Path) -> bytes:
    try:
        return read_input(path, MAX_KEY_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise InputError(f"`{path}` {error}", _MAKE_KEY) from error


def _public_der(data: bytes, place: str) -> bytes:
    """Return the DER of a PEM text with one public key. Raises InputError."""
    lines = data.replace(b"\r\n", b"\n").strip(b"\n").split(b"\n")
    if any(line.startswith(b"-----BEGIN ") and line.endswith(b"PRIVATE KEY-----") for line in lines):
        raise InputError(f"`{place}` is a private key, expected a public key", _NAME_PUBLIC)
    if lines[0] != f"-----BEGIN {_LABEL}-----".encode() or lines[-1] != f"-----END {_LABEL}-----".encode():
        raise InputError(f"`{place}` is no public key in PEM", _NAME_PUBLIC)
    text = b"".join(lines[1:-1])
    try:
        der = base64.b64decode(text, validate=True)
    except binascii.Error:
        der = b""
    if not der or base64.b64encode(der) != text:
        raise InputError(f"`{place}` is damaged: its base64 is not valid", "copy the key again")
    return der


def _fault_of(der: bytes) -> str:
    """Return what is wrong with a public key, for a message."""
    if _EC_OID not in der[:32]:
        return "is a key of another kind"
    if _P256_OID not in der[:32]:
        return "is a key on another curve"
    if der[len(_P256_PREFIX) - 1 :][:1] in (b"\2", b"\3"):
        return "has a compressed point"
    return "is malformed"


class NewFileSystem(FileSystem):
    """A file system whose files are new: they get a mode from their first byte on, and replace nothing.

    mode: permissions of the next file.
    placed: files that have their name.
    """

    def __init__(self) -> None:
        self.mode = PRIVATE_MODE
        self.placed = list[Path]()

    def open(self, path: Path) -> BinaryIO:
        """Open a new file with the mode. Raises OSError."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode), "wb")

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`. Raises FileExistsError if `target` exists, and OSError."""
        try:
            os.link(source, target)  # a rename would replace a file that another process made meanwhile
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(source, target)
        self.placed.append(target)
        source.unlink(missing_ok=True)


def write_key_files(
    private: Path, private_pem: bytes, public: Path, public_pem: bytes, system: NewFileSystem | None = None
) -> None:
    """Write two new files, the private one first. A run that is killed leaves no half file.

    Raises InputError if one of them exists, or cannot be written. Raises DoesNotFit. No file is left then.
    """
    system = NewFileSystem() if system is None else system
    for path in (private, public):
        if os.path.lexists(path):
            raise _exists(path)
        check_folder(path)
    try:
        _write(private, private_pem, PRIVATE_MODE, system)
        _write(public, public_pem, PUBLIC_MODE, system)
    except BaseException:
        for path in system.placed:
            path.unlink(missing_ok=True)
        raise


def _write(path: Path, data: bytes, mode: int, system: NewFileSystem) -> None:
    system.mode = mode
    try:
        with write_errors(path), AtomicFile(path, temporary_path(path), system) as file:
            file.write(data)
    except InputError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise _exists(path) from error
        raise


def _exists(path: Path) -> InputError:
    return InputError(f"`{path}` exists, and a key is never replaced", "name another file")

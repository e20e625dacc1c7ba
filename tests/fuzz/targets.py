"""Fuzz targets: a parser of untrusted files each, and well-formed inputs to start from.

A target raises nothing but a fault of moec. What a parser accepts is checked, and written again where that is possible.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard

import moec.profiles.device as device_module
from moec.evaluation.text_files import read_jsonl
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import BundleError, DataError, InputError, ProfileError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, encode_use, read_use
from moec.manifests.files.limits import MANIFEST_JSON, header_json
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.safetensors_header import HeaderError, build_header, read_header
from moec.profiles.device_json import decode_device, encode_device
from moec.profiles.loading import load_profile, read_profile, to_toml
from moec.runtime.bundle.archive.layout import (
    COMPRESSED,
    HEADER_BYTES,
    RECORD_BYTES,
    STORED,
    Chunk,
    Member,
    check_file_bytes,
    decode_chunk,
    encode_index,
    places_of,
    read_index,
)
from moec.runtime.trace.trace_file import read_trace
from moec.runtime.tuning.tune_file import SUFFIX, read_tuning
from moec.shipping.channel import PAYLOAD_TYPE, Channel, ChannelBundle, decode_channel, encode_channel
from moec.shipping.signatures import model_signature
from moec.shipping.signatures.dsse import (
    ENVELOPE_JSON,
    compact_json,
    decode_envelope,
    encode_envelope,
    load_json,
    make_envelope,
    sign_envelope,
    verify_envelope,
)
from moec.shipping.signatures.keys import PrivateKey, decode_public_key, encode_public_key, read_private_key
from moec.shipping.signatures.p256 import GENERATOR, decode_signature, is_on_curve, is_signature
from tests.gates.damage import sealed
from tests.runtime.tiny_bundle import files_and_experts, manifest_of

LARGEST_BYTES = 1 << 16
"""Size of an input. Nothing in these parsers depends on more."""
LARGEST_FILE_BYTES = 1 << 40
"""Size of a file whose tensors an input describes. The file is sparse."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="moec-fuzz-", dir=memory if memory.is_dir() else None)


def file_of(name: str, data: bytes) -> Path:
    """Return a file with these bytes. The next one of the same name replaces it."""
    path = Path(_folder().name) / name
    path.write_bytes(data)
    return path


def sealed_manifest(data: bytes) -> bytes:
    """Return an object in canonical form, with its correct digest."""
    try:
        plain: Any = load_strict_json(data, MANIFEST_JSON)
        return sealed(plain) if isinstance(plain, dict) else data
    except (ValueError, RecursionError):
        return data


def manifest(data: bytes) -> None:
    """Read `moec.json`, also with a digest that fits."""
    for given in (data, sealed_manifest(data)):
        try:
            accepted = decode_manifest(given, "moec.json")
        except BundleError:
            continue
        assert encode_manifest(accepted) == given, "an accepted manifest is written in another way"


def fitting_file(data: bytes) -> Path | None:
    """Return a file with this JSON as its header, of the size that the offsets in it ask for."""
    try:
        plain: Any = load_strict_json(data, header_json())
        ends = [value["data_offsets"][1] for name, value in plain.items() if name != "__metadata__"]
        size = 8 + len(data) + max(ends, default=0)
        if type(size) is not int or not 0 < size < LARGEST_FILE_BYTES:
            return None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    path = file_of("fitting.safetensors", struct.pack("<Q", len(data)) + data)
    os.truncate(path, size)
    return path


def header(data: bytes) -> None:
    """Read the start of a safetensors file, and the JSON of one that is as long as its offsets say."""
    for path in (file_of("raw.safetensors", data), fitting_file(data)):
        if path is None:
            continue
        try:
            entries = list(read_header(path).values())
        except HeaderError:
            continue
        size = path.stat().st_size
        start = entries[0].offset_bytes if entries else size
        assert start + sum(entry.size_bytes for entry in entries) == size, "accepted tensors do not fill the file"


def header_seeds() -> list[bytes]:
    two = build_header({"a": ("F32", (2, 3)), "b": ("U8", (5,))}, 8)
    return [two[8:], build_header({}, 8)[8:], build_header({"none": ("BF16", (0, 4))}, 8)]


def sealed_archive(data: bytes) -> bytes:
    """Return an archive with the correct digest of its index."""
    fields = HEADER_BYTES - hashlib.sha256().digest_size
    end = HEADER_BYTES + int.from_bytes(data[16:24], "little") * RECORD_BYTES
    if end > len(data):
        return data
    digest = hashlib.sha256(data[:fields] + data[HEADER_BYTES:end]).digest()
    return data[:fields] + digest + data[HEADER_BYTES:]


def archive(data: bytes) -> None:
    """Read the front of a packed bundle and its first chunks, also with an index digest that fits."""
    for given in (data, sealed_archive(data)):
        try:
            index = read_index(io.BytesIO(given), "an archive", len(given))
            check_file_bytes(index, "an archive", len(given))
            size = min(index.chunk_bytes * index.count, LARGEST_BYTES)
            for place in islice(places_of(index, [Member("some", size, None)]), 4):
                raw = decode_chunk(given[place.offset : place.offset + place.chunk.stored_bytes], place)
                assert len(raw) == place.raw_bytes, f"{place} has {len(raw)} bytes"
        except BundleError:
            continue


def archive_seeds() -> list[bytes]:
    raw = b"moec" * 1024
    packed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(raw)
    digest = hashlib.sha256(raw).digest()
    whole = encode_index(4096, len(raw), [Chunk(len(packed), COMPRESSED, digest)]) + packed
    return [whole, encode_index(4096, 1, [Chunk(1, STORED, hashlib.sha256(b"x").digest())]) + b"x"]


def trace(data: bytes) -> None:
    """Read a routing trace: JSON lines of `moec bench --trace-out`."""
    try:
        read_trace(file_of("a.trace", data))
    except InputError:
        return


def trace_seeds() -> list[bytes]:
    rates = {"memory_bytes_per_s": 1, "storage_bytes_per_s": 1, "storage_latency_ns": 0}
    ahead = {"prefetch_layers": 2, "prefetch_experts": 2, "prefetch_rule": "likely"}
    head: dict[str, object] = {
        "format": "moec-trace", "version": 5, "bundle": "0" * 64, "experts": [4, 4], "top_k": [2, 2],
        "prompt_tokens": 2, "threads": 1, "prefetch": "lookahead", "little_experts": 0, **rates, **ahead,
        "architecture": "ab" * 32, "left_out": [[], []],
    }  # fmt: skip
    times = {name: [1, 1] for name in ("dense_ns", "experts_ns", "shared_ns")}
    rest = {"head_ns": 1, "elapsed_ns": 9, "stall_ns": 0, "scores": None, "prompt_scores": None, **times}
    prompt = {"tokens": 2, "chosen": [[0, 1, 2, 3], [3, 2, 1, 0]], "advice": [[], []], **rest}
    token = {"tokens": 1, "chosen": [[0, 1], [3, 2]], "advice": [[4, 5], []], **rest}
    return [b"".join(json.dumps(plain).encode() + b"\n" for plain in (head, prompt, token))]


def popularity(data: bytes) -> None:
    """Read a popularity file: JSON of `moec merge-traces`."""
    try:
        use, _ = read_use(file_of("a.popularity", data))
    except InputError:
        return
    for layer, (chosen, offered) in enumerate(zip(use.chosen, use.offered, strict=True)):
        assert sum(chosen) == use.top_k[layer] * use.tokens[layer] or not use.experts[layer]
        assert all(few <= many <= use.tokens[layer] for few, many in zip(chosen, offered, strict=True))


def popularity_seeds() -> list[bytes]:
    digest, routes = "ab" * 32, (SampledRoutes(0, bytes([0, 0, 1, 0]), b""),)
    return [encode_use(ExpertUse(digest, (3, 0), (2, 0), 4, (5, 5), ((5, 4, 1), ()), ((5, 5, 2), ()), routes))]


def tuning(data: bytes) -> None:
    """Read `BUNDLE.tune.json`, which stands next to a bundle."""
    path = file_of(f"bundle{SUFFIX}", data)
    try:
        read_tuning(path.with_name("bundle"))
    except ValueError:
        return


def tuning_seeds() -> list[bytes]:
    options = {"policy": "hobbit", "policy_weights": "0.1,0.5,0,0.4", "threads": 2, "readers": 1, "prefetch": "off"}
    trials = [{"option": "threads", "value": 2, "gain": 0.1, "kept": True}]
    digests = dict.fromkeys(("machine", "storage", "bundle"), "0" * 64)
    plain = {"format_version": 1, **digests, "expert_cache_bytes": 1, "options": options, "trials": trials}
    return [json.dumps(plain).encode(), json.dumps({**plain, "options": {}, "trials": []}).encode()]


def profile(data: bytes) -> None:
    """Read a device profile in TOML. It is written in a form that is read as the same profile."""
    try:
        accepted = read_profile(file_of("a.toml", data))
    except ProfileError:
        return
    again = read_profile(file_of("again.toml", to_toml(accepted).encode()))
    assert again == accepted, "an accepted profile changes when it is written"


def profile_seeds() -> list[bytes]:
    folder = Path(device_module.__file__).parent
    return [(folder / f"{name}.toml").read_bytes() for name in ("laptop", "quadro-rtx-6000-host", "xiaomi-14")]


def device(data: bytes) -> None:
    """Read `device.json` of a bundle."""
    try:
        accepted = decode_device(data, "device.json")
    except BundleError:
        return
    assert encode_device(accepted) == data, "an accepted profile is written in another way"


def device_seeds() -> list[bytes]:
    return [encode_device(load_profile(name)) for name in ("laptop", "jetson-tx2-hdd", "xiaomi-14")]


def json_lines(data: bytes) -> None:
    """Read task data: JSON lines."""
    try:
        rows = list(read_jsonl(file_of("rows.jsonl", data)).read(()))
    except DataError:
        return
    assert rows and all(isinstance(row, dict) for _, row in rows), "accepted rows are not objects"


def json_lines_seeds() -> list[bytes]:
    return [b'{"text": "a b"}\n\n{"question": "1?", "answer": "#### 1"}\n', b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}']


DIGESTS = {"moec.json": "0" * 64, "a": "f" * 64}
CHANNEL = Channel(
    version=1,
    model="tiny",
    channel="stable",
    sequence=1,
    created="2026-11-26T12:00:00Z",
    expires="2027-02-24T12:00:00Z",
    minimum_moec="0.2.0",
    bundles=(ChannelBundle("laptop", "", "a" * 64, 1, 2, 3, ()),),
)


@functools.cache
def key() -> PrivateKey:
    """Return the key, always the same one."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = ec.derive_private_key(7, ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return read_private_key(file_of("fuzz.pem", pem))


def signature_of(statement: bytes) -> bytes:
    """Return the signature with a statement, signed by the key."""
    envelope = make_envelope(statement, model_signature.PAYLOAD_TYPE, key())
    return compact_json(
        {
            "mediaType": model_signature.MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key().public.key_id}, "tlogEntries": []},
            "dsseEnvelope": encode_envelope(envelope),
        }
    )


def read_as_signature(data: bytes) -> dict[str, str] | None:
    """Return the digests of a signature that is accepted."""
    try:
        return model_signature.read_signature(data, [key().public], "a.sig")[1]
    except BundleError:
        return None


def read_as_envelope(data: bytes) -> None:
    try:
        envelope = decode_envelope(load_json(data, ENVELOPE_JSON, "a.json"), "a.json")
        again = json.loads(compact_json(encode_envelope(envelope)))
        assert decode_envelope(again, "a.json") == envelope, "an envelope changes when it is written"
        payload = verify_envelope(data, PAYLOAD_TYPE, [key().public], "a.json")
    except BundleError:
        return
    assert payload == encode_channel(CHANNEL), "the key did not sign this channel"


def read_as_channel(data: bytes) -> None:
    try:
        channel = decode_channel(data, "a.json")
    except BundleError:
        return
    assert encode_channel(channel) == data, "an accepted channel is written in another way"


def signature(data: bytes) -> None:
    """Read a signature and a channel, as a whole file and as content that the key signs.

    No input is accepted with another content than the key signed.
    """
    assert read_as_signature(data) in (None, DIGESTS), "the key did not sign these files"
    read_as_envelope(data)
    read_as_channel(data)
    digests = read_as_signature(signature_of(data))
    if digests is not None and all(name.isascii() for name in digests):
        statement = model_signature.encode_statement("a", digests)
        assert read_as_signature(signature_of(statement)) == digests, "accepted digests are refused when signed again"


def signature_seeds() -> list[bytes]:
    statement = model_signature.encode_statement("tiny", DIGESTS)
    channel = encode_channel(CHANNEL)
    return [signature_of(statement), sign_envelope(channel, PAYLOAD_TYPE, key()), statement, channel]


def pem_of(der: bytes) -> bytes:
    return b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(der) + b"\n-----END PUBLIC KEY-----\n"


def der_of(*numbers: int) -> bytes:
    """Return a sequence of integers."""
    content = b""
    for number in numbers:
        size = number.bit_length() // 8 + 1
        content += bytes([2, size]) + number.to_bytes(size, "big")
    return bytes([0x30, len(content)]) + content


def public_key(data: bytes) -> None:
    """Read a public key in PEM, and a signature in DER."""
    for pem in (data, pem_of(data)):
        try:
            accepted = decode_public_key(pem, "a.pub")
        except InputError:
            continue
        assert is_on_curve(accepted.point), "an accepted key is not on the curve"
        again = encode_public_key(accepted.point)
        assert b"".join(again.split()) == b"".join(pem.split()), "an accepted key is written in another way"
    numbers = decode_signature(data)
    assert numbers is None or der_of(*numbers) == data, "an accepted signature is written in another way"
    assert not is_signature(GENERATOR, b"a message that nobody signed", data), "a signature was forged"


def public_key_seeds() -> list[bytes]:
    pem = encode_public_key(GENERATOR)
    return [pem, base64.b64decode(b"".join(pem.split(b"\n")[1:-2])), der_of(GENERATOR[0], 1)]


@dataclass(frozen=True)
class Target:
    """A parser.

    target: parses an input, and checks what was accepted.
    seeds: returns inputs that are accepted.
    """

    target: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


TARGETS = {
    "manifest": Target(manifest, lambda: [encode_manifest(manifest_of(*files_and_experts()))]),
    "header": Target(header, header_seeds),
    "archive": Target(archive, archive_seeds),
    "trace": Target(trace, trace_seeds),
    "popularity": Target(popularity, popularity_seeds),
    "tuning": Target(tuning, tuning_seeds),
    "profile": Target(profile, profile_seeds),
    "device": Target(device, device_seeds),
    "json_lines": Target(json_lines, json_lines_seeds),
    "signature": Target(signature, signature_seeds),
    "public_key": Target(public_key, public_key_seeds),
}
"""Targets by the name of their kept inputs."""

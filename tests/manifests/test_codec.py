"""moec.json: what goes out comes back; everything else is refused with the place; the schema is the published one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moec.manifests
from moec.cli.documents import schema_text
from moec.manifests import codec
from moec.manifests.bundle import BundleManifest
from moec.manifests.codec import DIGEST_FIELD, decode_manifest, encode_manifest, json_schema, manifest_schema
from moec.manifests.errors import BundleError, ChecksumMismatch, ManifestInvalid, UnknownFormatVersion
from moec.manifests.files.limits import MANIFEST_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.quant import QuantSpec
from tests.manifests.examples import example_manifest, manifests, paths, plain_example, put, seal

VALIDATOR = jsonschema.Draft202012Validator(manifest_schema())
ENCODED = encode_manifest(example_manifest())


@given(manifests())
def test_round_trip_and_schema(manifest: BundleManifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data, "moec.json") == manifest
    assert encode_manifest(decode_manifest(data, "moec.json")) == data
    VALIDATOR.validate(json.loads(data))


def test_the_digest_is_the_last_field() -> None:
    assert list(json.loads(ENCODED))[-1] == DIGEST_FIELD
    assert seal(plain_example()) == ENCODED


WRONG_FIELDS = [
    ("surprise", 1, "(root)", "unknown ['surprise']"),
    ("model.surprise", 1, "model", "unknown ['surprise']"),
    ("model.layers[1].attention.rope.kind", "x", "model.layers[1].attention.rope", "unknown ['kind']"),
    ("device", ..., "(root)", "missing ['device']"),
    ("experts[2].xxh3", ..., "experts[2]", "missing ['xxh3']"),
    ("name", 7, "name", "expected str, found int"),
    ("name", None, "name", "expected str, found NoneType"),
    ("certified", 1, "certified", "expected bool, found int"),
    ("model.vocab_size", True, "model.vocab_size", "expected int, found bool"),
    ("model.vocab_size", 50.0, "model.vocab_size", "expected int, found float"),
    ("model.vocab_size", 10**30, "model.vocab_size", "integer out of range"),
    ("model.norm_eps", 10**400, "model.norm_eps", "expected float, found int"),
    ("model.norm_eps", "0", "model.norm_eps", "expected float, found str"),
    ("model.layers", {}, "model.layers", "expected a list, found dict"),
    ("model.layers[0]", [], "model.layers[0]", "expected an object, found list"),
    ("model.layers[0].experts.activation", "tanh", "model.layers[0].experts.activation", "expected one of ['silu'"),
    ("model.layers[0].experts.activation", ["silu"], "model.layers[0].experts.activation", "expected one of"),
    ("model.eos_token_ids[0]", "2", "model.eos_token_ids[0]", "expected int, found str"),
    ("experts[0].gate", "q7", "experts[0].gate", "not a format: `q7`"),
    ("experts[0].gate", 4, "experts[0].gate", ""),
    ("dense[0].shape[1]", -1.5, "dense[0].shape[1]", "expected int, found float"),
    ("options", [], "options", "expected an object, found list"),
    ("options.loss", 2, "options.loss", "expected str, found int"),
    ("calibration", [], "calibration", "expected an object, found list"),
    ("calibration.items", -1, "calibration", "must not be negative"),
    ("experts[1].offset_bytes", -4096, "experts[1]", "offset_bytes"),
    ("files[0].name", "../x", "files[0]", "not a plain file name"),
    ("source.files", [{"name": "/x", "size_bytes": 1, "sha256": "0" * 64}], "source.files[0]", "not a plain file name"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "place", "message"), WRONG_FIELDS)
def test_a_wrong_field_is_named(path: str, value: Any, place: str, message: str) -> None:
    plain = plain_example()
    put(plain, path, value)
    with pytest.raises(ManifestInvalid) as caught:
        decode_manifest(seal(plain), "b/moec.json")
    assert f"`b/moec.json`: field `{place}`: " in caught.value.message and message in caught.value.message
    assert caught.value.exit_code == 3 and len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"name": "tiny"', b'"name": "tiny",\n "name": "tiny"', "a field occurs twice"),
        (b'"norm_eps": 1e-05', b'"norm_eps": NaN', "`NaN` is not a number"),
        (b'"norm_eps": 1e-05', b'"norm_eps": Infinity', "`Infinity` is not a number"),
        (b'"norm_eps": 1e-05', b'"norm_eps": -Infinity', "`-Infinity` is not a number"),
        (b'"norm_eps": 1e-05', b'"norm_eps": 1e999', "`1e999` is too large"),
        (b'"norm_eps": 1e-05', b'"norm_eps": ' + b"9" * 5000, "not strict JSON"),
        (b'"name": "tiny"', b'"name": "\xff"', "utf-8"),
        (b'"name": "tiny"', b'"name": "\\ud800"', "no canonical form"),
        (b'"name": "tiny",', b'"name": "tiny",,', "not strict JSON"),
    ],
)
def test_not_strict_json(before: bytes, after: bytes, message: str) -> None:
    assert ENCODED.count(before) == 1
    with pytest.raises(BundleError) as caught:
        decode_manifest(ENCODED.replace(before, after), "moec.json")
    assert message in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'"x"', b"{}", b'{"format_version": true}', b"\xef\xbb\xbf{}"])
def test_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ManifestInvalid, match=r"`moec\.json`"):
        decode_manifest(data, "moec.json")


def test_the_version_is_looked_at_first() -> None:
    for version in (0, 5, -1, 10**20):
        with pytest.raises(UnknownFormatVersion, match=f"format version {version}, this moec reads 1 to 4"):
            decode_manifest(json.dumps({"format_version": version, "what": "ever"}).encode(), "moec.json")


def test_oversized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MANIFEST_JSON", replace(MANIFEST_JSON, size_bytes=len(ENCODED) - 1))
    with pytest.raises(ManifestInvalid, match=f"{len(ENCODED)} bytes, more than the limit of {len(ENCODED) - 1}"):
        decode_manifest(ENCODED, "moec.json")


def test_a_digest_that_is_wrong_or_missing_or_not_last() -> None:
    plain = load_strict_json(ENCODED, MANIFEST_JSON)
    digest = plain.pop(DIGEST_FIELD)
    for wrong in ({}, {DIGEST_FIELD: None}, {DIGEST_FIELD: "0" * 64}, {DIGEST_FIELD: [digest]}):
        with pytest.raises(ChecksumMismatch, match=DIGEST_FIELD):
            decode_manifest(codec.canonical_json({**plain, **wrong}), "moec.json")
    with pytest.raises(ManifestInvalid, match="canonical form, manifest_sha256 last"):
        decode_manifest(codec.canonical_json({DIGEST_FIELD: digest, **plain}), "moec.json")


@given(st.data())
def test_no_other_bytes_are_accepted(data: st.DataObject) -> None:
    """White space that JSON allows is refused, too."""
    place = data.draw(st.integers(0, len(ENCODED) - 1))
    old = ENCODED[place : place + data.draw(st.integers(0, 3))]
    new = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b" ", b"\t", b"\n", b"\r\n", b"0", b","])))
    changed = ENCODED[:place] + new + ENCODED[place + len(old) :]
    if changed != ENCODED:
        with pytest.raises(BundleError):
            decode_manifest(changed, "moec.json")


HOSTILE_VALUES = [
    None, True, 0, -1, 1, 2**31, 2**48, 2**63 - 1, 2**63, 10**400, 0.5, -0.0, 1e308, "", "x", "../x", "\0", "q4g32",
    "q2g16777216", "bf16", "rows16", "0" * 64, [], {}, [[]], ...,
]  # fmt: skip


@given(path=st.sampled_from(paths(plain_example())), value=st.sampled_from(HOSTILE_VALUES))
def test_any_value_anywhere_is_refused_or_makes_sense(path: str, value: Any) -> None:
    plain = plain_example()
    put(plain, path, value)
    try:
        manifest = decode_manifest(seal(plain), "moec.json")
    except BundleError:
        return
    assert decode_manifest(encode_manifest(manifest), "moec.json") == manifest


def test_schema_refuses_what_the_codec_refuses() -> None:
    for path, value in (("surprise", 1), ("device", ...), ("name", 7), ("experts[0].gate", "q7"), ("certified", 1)):
        plain = load_strict_json(ENCODED, MANIFEST_JSON)
        put(plain, path, value)
        assert not VALIDATOR.is_valid(plain)


def test_a_whole_number_in_a_field_of_numbers_is_written_again_as_it_was() -> None:
    """Another writer may write `10000` for 10000.0. The digest is that of these bytes."""
    plain = plain_example()
    for layer in plain["model"]["layers"]:
        layer["attention"]["rope"]["theta"] = 10_000
    data = seal(plain)
    assert b'"theta": 10000,' in data and encode_manifest(decode_manifest(data, "moec.json")) == data


FORMATS = ("q0", "q1g64", "q1.6g128s", "q2g32b", "q3g128", "q4g32s", "q5g64b", "q6", "q8", "mxfp4", "bf16", "fp16")
SCHEMA = Path(moec.manifests.__file__).parent / "schema.json"


def test_schema_has_not_drifted() -> None:
    assert SCHEMA.read_text() == schema_text(), "run `make schema`"


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


def test_schema_knows_every_short_form() -> None:
    rule = jsonschema.Draft202012Validator(json_schema(QuantSpec))
    assert all(rule.is_valid(text) for text in FORMATS)
    assert not any(rule.is_valid(text) for text in ("", "q7", "q2g", "q4g64x", "float16", "xq4", "q4 "))

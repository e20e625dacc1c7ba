"""Strict JSON <-> dataclasses. Unknown, missing and mistyped fields are errors with the path of the field."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .bundle import FORMAT_VERSIONS, BundleManifest
from .errors import ChecksumMismatch, ManifestInvalid, UnknownFormatVersion
from .files.limits import MANIFEST_JSON
from .files.strict_json import load_strict_json, shown
from .optional_fields import is_left_out, is_optional
from .quant import SHORT_FORM, QuantSpec

DIGEST_FIELD = "manifest_sha256"
_END = b"\n}\n"
_VERSIONS = f"{FORMAT_VERSIONS[0]} to {FORMAT_VERSIONS[-1]}"
_MAX_INTEGER = 1 << 63
_PIECES = 1 << 16
"""Pieces of the canonical form that are compared at once: at most 1 MiB."""
T = TypeVar("T")


class DecodeError(ValueError):
    """A value that does not have the declared type; `path` is the field."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"field `{path or '(root)'}`: {message}")


def to_plain(value: Any) -> Any:
    """Convert dataclasses to values for JSON. QuantSpec becomes its short form, tuples become lists."""
    if isinstance(value, QuantSpec):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: to_plain(item) for f, item in fields if not is_left_out(f, item)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(declared: Any, value: Any, path: str = "") -> Any:
    """Check `value` against the declared type and build it. Raises DecodeError."""
    origin = get_origin(declared)
    if declared is QuantSpec:
        return _quant_spec(value, path)
    if dataclasses.is_dataclass(declared):
        return _dataclass(declared, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise DecodeError(path, f"expected a list, found {type(value).__name__}")
        inner = get_args(declared)[0]
        if inner is int and all(type(item) is int and abs(item) < _MAX_INTEGER for item in value):
            return tuple(value)  # static routing has a number per token; a path for messages is built only for an error
        return tuple(from_plain(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise DecodeError(path, f"expected an object, found {type(value).__name__}")
        return {key: from_plain(get_args(declared)[1], item, f"{path}.{key[:80]}") for key, item in value.items()}
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(declared):
            return None
        return from_plain(next(arg for arg in get_args(declared) if arg is not type(None)), value, path)
    if origin is Literal:
        if value not in get_args(declared) or not isinstance(value, str):
            raise DecodeError(path, f"expected one of {list(get_args(declared))}, found {shown(value)}")
        return value
    return _scalar(declared, value, path)


def _quant_spec(value: Any, path: str) -> QuantSpec:
    try:
        return QuantSpec.parse(value)
    except (ValueError, TypeError) as error:
        raise DecodeError(path, str(error)) from error


def _scalar(declared: Any, value: Any, path: str) -> Any:
    if declared is float and (type(value) is float or (type(value) is int and abs(value) < _MAX_INTEGER)):
        if not math.isfinite(value):
            raise DecodeError(path, "expected a finite number")
        return value  # a whole number stays one, so that it is written again as it was
    if type(value) is not declared:
        raise DecodeError(path, f"expected {declared.__name__}, found {type(value).__name__}")
    if declared is int and abs(value) >= _MAX_INTEGER:
        raise DecodeError(path, "integer out of range")
    return value


def _dataclass(declared: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(path, f"expected an object, found {type(value).__name__}")
    hints, defaults = _declaration(declared)
    unknown = sorted(set(value) - set(hints))
    missing = sorted(set(hints) - set(defaults) - set(value))
    if unknown or missing:
        raise DecodeError(path, f"unknown {[name[:80] for name in unknown[:5]]}, missing {missing[:5]}")
    prefix = f"{path}." if path else ""
    built = {name: from_plain(hint, value[name], f"{prefix}{name}") for name, hint in hints.items() if name in value}
    for name, default in defaults.items():
        if name in built and built[name] == default:
            raise DecodeError(f"{prefix}{name}", "expected no field where it has its default")
    try:
        return declared(**built)
    except ValueError as error:
        raise DecodeError(path, str(error)) from error


@functools.cache
def _declaration(declared: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types of a dataclass by field, and the defaults of its optional fields.

    Cached per class. Without the cache, evaluating annotations takes three quarters of reading a manifest.
    A manifest of 3,072 experts is read in 170 ms with the cache, 780 ms without.
    """
    fields, hints = dataclasses.fields(declared), get_type_hints(declared)
    defaults = {field.name: field.default for field in fields if is_optional(field)}
    return {field.name: hints[field.name] for field in fields}, defaults


def canonical_json(value: Any) -> bytes:
    """Encode as UTF-8, indented by one space, field order as given, one newline at the end.

    Equal values give equal bytes.
    """
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def encode_manifest(manifest: BundleManifest) -> bytes:
    """Return the bytes of `moec.json`. The last field is the digest of the rest."""
    canonical = canonical_json(to_plain(manifest))
    return canonical.removesuffix(_END) + _digest_end(hashlib.sha256(canonical).hexdigest())


def _digest_end(digest: str) -> bytes:
    """Return the text that replaces `_END` to add the digest as last field. Encoding everything again is far slower."""
    return f',\n "{DIGEST_FIELD}": "{digest}"'.encode() + _END


def _canonical_digest(plain: dict[str, Any], data: bytes) -> tuple[str, bool]:
    """Return the digest of the canonical form of `plain`, and whether `data` is that form with its digest at the end.

    The form is made and compared in parts. As a whole it would need another 250 MiB for the largest manifest.
    Raises ValueError if there is no such form.
    """
    encoder = json.JSONEncoder(indent=1, ensure_ascii=False, allow_nan=False)
    pieces = encoder.iterencode(plain)
    digest, done, is_same = hashlib.sha256(), 0, True
    end = b""
    while piece := "".join(itertools.islice(pieces, _PIECES)).encode():
        piece = end + piece
        piece, end = piece[: 1 - len(_END)], piece[1 - len(_END) :]
        digest.update(piece)
        is_same = is_same and data.startswith(piece, done)
        done += len(piece)
    digest.update(end + b"\n")
    hex_digest = digest.hexdigest()
    return hex_digest, is_same and data[done:] == _digest_end(hex_digest)


def decode_manifest(data: bytes, place: str) -> BundleManifest:
    """Decode the bytes of `moec.json` into a checked manifest.

    place: the file, for messages.
    Raises ManifestInvalid, UnknownFormatVersion, ChecksumMismatch.
    """
    try:
        plain = load_strict_json(data, MANIFEST_JSON)
    except ValueError as error:
        raise ManifestInvalid(f"`{place}` is not strict JSON: {error}", "copy the bundle again") from error
    if not isinstance(plain, dict) or type(plain.get("format_version")) is not int:
        raise ManifestInvalid(f"`{place}` has no integer field `format_version`", "is this a moec bundle?")
    if plain["format_version"] not in FORMAT_VERSIONS:
        raise UnknownFormatVersion(
            f"`{place}` has format version {plain['format_version']}, this moec reads {_VERSIONS}",
            "use a matching moec or compile again",
        )
    digest = plain.pop(DIGEST_FIELD, None)
    try:
        computed, is_canonical = _canonical_digest(plain, data)
    except ValueError as error:  # half a surrogate pair
        raise ManifestInvalid(f"`{place}` has no canonical form: {error}", "copy the bundle again") from error
    if digest != computed:
        raise ChecksumMismatch(f"`{place}`: {DIGEST_FIELD} does not match its content", "copy the bundle again")
    if not is_canonical:
        raise ManifestInvalid(f"`{place}` is not in canonical form, {DIGEST_FIELD} last", "copy the bundle again")
    try:
        return from_plain(BundleManifest, plain)  # type: ignore[no-any-return]
    except DecodeError as error:
        raise ManifestInvalid(f"`{place}`: {error}", "compile the bundle again") from error


def json_schema(declared: Any) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a dataclass.

    `schema.json` is that of BundleManifest with the digest field.
    """
    origin = get_origin(declared)
    if declared is QuantSpec:
        return {"type": "string", "pattern": f"^(bf16|fp16|mxfp4|q0|{SHORT_FORM})$"}
    if dataclasses.is_dataclass(declared):
        hints = get_type_hints(declared)
        fields = {f.name: json_schema(hints[f.name]) for f in dataclasses.fields(declared)}
        return {
            "type": "object",
            "properties": fields,
            "required": [f.name for f in dataclasses.fields(declared) if not is_optional(f)],
            "additionalProperties": False,
        }
    if origin is tuple:
        return {"type": "array", "items": json_schema(get_args(declared)[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": json_schema(get_args(declared)[1])}
    if origin in (Union, types.UnionType):
        inner = next(arg for arg in get_args(declared) if arg is not type(None))
        return {"anyOf": [json_schema(inner), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(get_args(declared))}
    return {"type": {int: "integer", float: "number", str: "string", bool: "boolean"}[declared]}


def manifest_schema() -> dict[str, Any]:
    """Return the published schema of `moec.json`."""
    schema = json_schema(BundleManifest)
    schema["properties"][DIGEST_FIELD] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    schema["required"].append(DIGEST_FIELD)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "moec bundle manifest", **schema}

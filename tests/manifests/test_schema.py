"""The published schema is the one that the dataclasses give, and it accepts what the codec writes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

import moec.manifests
from moec.cli.documents import schema_text
from moec.manifests.codec import json_schema
from moec.manifests.quant import QuantSpec

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

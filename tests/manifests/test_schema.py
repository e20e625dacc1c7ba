"""The published schema is the one that the dataclasses give, and it accepts what the codec writes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

import moec.manifests
from moec.cli.documents import schema_text

SCHEMA = Path(moec.manifests.__file__).parent / "schema.json"


def test_schema_has_not_drifted() -> None:
    assert SCHEMA.read_text() == schema_text(), "run `make schema`"


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))

"""Popularity files come back as they were; what contradicts itself is refused with one sentence."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, architecture_digest, decode_use, encode_use, read_use
from tests.manifests.examples import model_spec

MODEL = model_spec()
USE = ExpertUse(
    architecture="ab" * 32,
    experts=(3, 0),
    top_k=(2, 0),
    traces=4,
    tokens=(5, 5),
    chosen=((5, 4, 1), ()),
    offered=((5, 5, 2), ()),
    routes=(SampledRoutes(0, bytes([0, 0, 1, 0]), b""),),
)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encode_use(USE))
    found, digest = read_use(tmp_path / "a")
    assert found == USE and len(digest) == 64 and encode_use(found) == encode_use(USE)
    assert found.decoded_tokens == 5 and found.never_offered() == []
    without = replace(USE, chosen=((5, 5, 0), ()), offered=((5, 5, 0), ()), routes=())
    assert decode_use(encode_use(without)).never_offered() == [(0, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "moec-trace"}, "expected the format `moec-popularity`, found 'moec-trace'"),
        ({"version": 2}, "expected version 1, found 2"),
        ({"version": [1]}, "expected version 1, found a list"),
        ({"extra": 1}, "expected the fields architecture"),
        ({"architecture": "ab"}, "expected a SHA-256 as `architecture`"),
        ({"experts": []}, "expected 1 to 1024 layers"),
        ({"experts": [3, True]}, "expected whole numbers of 0 to 65535 in `experts`, found True"),
        ({"experts": [3, None]}, "expected whole numbers of 0 to 65535 in `experts`, found None"),
        ({"top_k": [2]}, "expected `top_k` as a list of 2"),
        ({"traces": 0}, "expected 1 or more `traces`"),
        ({"chosen": [[5, 4, 1]]}, "expected `chosen` of 2 layers"),
        ({"chosen": [[5, 4], []]}, "expected `chosen[0]` as a list of 3"),
        ({"chosen": [[5, 5, 1], []]}, "expected 10 choices in layer 0, found 11"),
        ({"chosen": [[5, 2, 3], []]}, "expected at most as many choices of an expert in layer 0 as tokens"),
        ({"offered": [[6, 5, 2], []]}, "expected at most as many choices of an expert in layer 0 as tokens"),
        ({"routes": [1]}, "expected `first_layer`, `counted` and `held_out`, found 1"),
        ({"routes": [{"first_layer": 1, "counted": "", "held_out": ""}]}, "expected stacks in order, from layer 0"),
        ({"routes": [{"first_layer": 2, "counted": "", "held_out": ""}]}, "expected a layer from 0 to 1, found 2"),
        ({"routes": [{"first_layer": 0, "counted": "x", "held_out": ""}]}, "expected base64 as routes"),
        ({"routes": [{"first_layer": 0, "counted": "AA==", "held_out": ""}]}, "expected routes of 4 bytes, found 1"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = {**json.loads(encode_use(USE)), **changes}
    (tmp_path / "a").write_text(json.dumps(plain))
    with pytest.raises(InputError) as caught:
        read_use(tmp_path / "a")
    assert message in caught.value.message and caught.value.message.startswith(f"`{tmp_path / 'a'}`")
    assert "\n" not in caught.value.message and "merge-traces" in caught.value.hint


def test_too_many_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.manifests.expert_use.MAX_ROUTE_BYTES", 4)
    plain = {**json.loads(encode_use(USE))}
    plain["routes"][0]["counted"] = b64encode(bytes(8)).decode()
    with pytest.raises(ValueError, match="at most 4 bytes of routes"):
        decode_use(json.dumps(plain).encode())


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff")
    for name, message in (("bad", "is no popularity file"), ("none", "is missing"), ("", "is a folder")):
        with pytest.raises(InputError, match=message):
            read_use(tmp_path / name)


def test_the_architecture_is_that_of_the_experts() -> None:
    digest = architecture_digest(MODEL)
    assert digest == architecture_digest(replace(MODEL, eos_token_ids=(7,))), "other settings do not count"
    (first, *rest) = MODEL.layers
    wider = replace(first, experts=replace(first.experts, width=2 * first.experts.width))
    assert digest != architecture_digest(replace(MODEL, layers=(wider, *rest)))
    assert digest != architecture_digest(replace(MODEL, family="other"))

"""`lookahead.safetensors`: what is read from it, what it changes in a run, and damaged files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.lookahead.linear_maps import encode_maps
from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.manifests.errors import ChecksumMismatch, ManifestInvalid
from moec.runtime import load
from moec.runtime.bundle.lookahead import read_lookahead
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.prefetch.predictors import LookaheadPredictor
from tests.runtime.learned_bundle import random_maps, with_file, with_maps

SMALL: dict[str, Any] = {"expert_cache": "50%", "context": 64}
TOKENS = [1, 5, 9, 3, 7, 2, 8, 4, 6, 1, 3, 9]


@pytest.fixture
def learned(tiny_bundle: Path, tmp_path: Path) -> Path:
    return with_maps(tiny_bundle, tmp_path / "learned")


def test_the_maps_are_read_as_they_were_written(learned: Path) -> None:
    with open_bundle(learned) as bundle:
        found, written = read_lookahead(bundle), random_maps(bundle.manifest.model)
    assert list(found) == [(each.layer, each.ahead) for each in written]
    for each, own in zip(written, found.values(), strict=True):
        assert own.spec == each.spec
        assert np.array_equal(own.data, each.data) and np.array_equal(own.bias, each.bias)


def test_learned_routers_predict_and_change_no_result(tiny_bundle: Path, learned: Path) -> None:
    results, advice = [], []
    for path, options in ((tiny_bundle, {}), (learned, {}), (learned, {"learned_routers": False})):
        with load(path, **SMALL, **options) as engine:
            predictor = engine.model.advisor.predictor
            assert isinstance(predictor, LookaheadPredictor)
            router, norm = predictor.source(0, 1) or (None, None)
            is_learned = router is not engine.model.routers()[1]
            assert is_learned == (path == learned and not options)
            assert norm is engine.model.router_norms()[0 if is_learned else 1]
            assert ("by learned routers" in engine.mode) == is_learned
            results.append(engine.logits(TOKENS))
            advice.append(engine.memory.tables_bytes)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    assert advice[0] == advice[2] == advice[1] - (learned / LOOKAHEAD_NAME).stat().st_size


def test_a_run_has_the_routers_of_the_layers_that_it_looks_at(learned: Path) -> None:
    for options, aheads in (
        ({}, {1, 2}),
        ({"prefetch_rule": "until-routed"}, {1}),
        ({"prefetch_layers": 1}, {1}),
    ):
        with load(learned, **SMALL, **options) as engine:
            predictor = engine.model.advisor.predictor
            assert isinstance(predictor, LookaheadPredictor)
            own = {id(router) for router in engine.model.routers()}
            found = {ahead for ahead in (1, 2) if (of := predictor.source(0, ahead)) and id(of[0]) not in own}
            assert found == aheads


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Return a function that changes the header of a file."""

    def changed(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        plain = json.loads(data[8 : 8 + size])
        change(plain)
        text = json.dumps(plain).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return changed


def _renamed(before: str, after: str) -> Callable[[dict[str, Any]], None]:
    def change(plain: dict[str, Any]) -> None:
        plain[after] = plain.pop(before)

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:40], "does not fit into the file"),
        (lambda data: b"", "too few for a header"),
        (_header(_renamed("layers.0.ahead.1.bias", "layers.0.ahead.4.bias")), "unknown tensor"),
        (_header(_renamed("layers.0.ahead.1.bias", "\u202e")), "unknown tensor"),
        (_header(_renamed("layers.0.ahead.1.bias", "layers.1.ahead.2.bias")), "for no router of the model"),
        (_header(_renamed("layers.0.ahead.1.bias", "layers.99999.ahead.1.bias")), "for no router of the model"),
        (_header(_renamed("layers.0.ahead.1.weight.q8g32", "layers.0.ahead.1.weight.q4g32")), "expected"),
        (_header(_renamed("layers.0.ahead.1.weight.q8g32", "layers.0.ahead.1.weight.q0")), "for no router"),
        (_header(_renamed("layers.0.ahead.1.weight.q8g32", "layers.0.ahead.1.weight.q8g3")), "layers.0.ahead.1.weight"),
        (lambda data: data[:-4], "the file has"),
    ],
)
def test_damaged_files_are_refused(
    tiny_bundle: Path, tmp_path: Path, damage: Callable[[bytes], bytes], told: str
) -> None:
    with open_bundle(tiny_bundle) as bundle:
        data = encode_maps(random_maps(bundle.manifest.model))
    path = with_file(tiny_bundle, tmp_path / "damaged", damage(data))
    with pytest.raises(ManifestInvalid, match=told), load(path, **SMALL):
        pass


def test_a_weight_without_a_bias_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    with open_bundle(tiny_bundle) as bundle:
        (first, *_) = random_maps(bundle.manifest.model)
    whole = encode_maps([first])
    (size,) = struct.unpack("<Q", whole[:8])
    plain = json.loads(whole[8 : 8 + size])
    end = plain.pop("layers.0.ahead.1.bias")["data_offsets"][0]
    text = json.dumps(plain).encode()
    data = struct.pack("<Q", len(text)) + text + whole[8 + size : 8 + size + end]
    path = with_file(tiny_bundle, tmp_path / "damaged", data)
    with pytest.raises(ManifestInvalid, match="a weight and a bias of each layer"), load(path, **SMALL):
        pass


def test_another_file_than_the_manifest_lists_is_refused(learned: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(learned, tmp_path / "changed"))
    file = changed / LOOKAHEAD_NAME
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumMismatch), load(changed, **SMALL):
        pass
    with load(changed, **SMALL, verify=False) as engine:
        engine.logits(TOKENS)

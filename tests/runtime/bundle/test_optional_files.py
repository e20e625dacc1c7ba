"""Tables with exact sets of experts, and learned routers: what is read, what it changes in a run, and damaged files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.linear_maps import encode_maps
from moec.manifests.bundle import LOOKAHEAD_NAME, TABLES_NAME, BundleManifest
from moec.manifests.errors import ChecksumMismatch, ManifestInvalid
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.prefetch.learned_routers import read_lookahead
from moec.runtime.prefetch.predictors import LookaheadPredictor
from tests.gates.bundles import emit_bundle
from tests.gates.damage import check, plain_manifest, run, seal, write_tables
from tests.manifests.examples import BF16, build_manifest, layer_spec, model_spec
from tests.runtime.learned_bundle import random_maps, with_file, with_maps
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

SETS = {
    "path_keys": np.array([[1, 0, 1, 0, 2], [1, 0, 1, 1, 2]], np.int32), "path_offsets": np.array([0, 2, 3], np.int64),
    "path_experts": np.array([0, 1, 2], np.uint16), "path_counts": np.array([9, 4, 8], np.uint32),
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    tiny = TinyMixtral(hidden_size=32, heads=2, kv_heads=1, experts=3, top_k=2, width=32, seed=8)
    return emit_bundle(save_tiny_mixtral(root / "model", tiny), root / "bundle", mixed=False)


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def write(bundle: Path, path_sets: bool = True, version: int = 2, **tables: np.ndarray) -> None:
    """Write tables, and whether the manifest says that they have sets."""
    write_tables(bundle, **{**SETS, **tables})
    plain = {name: value for name, value in plain_manifest(bundle).items() if name != "path_sets"}
    seal(bundle, {**plain, "format_version": version, **({"path_sets": True} if path_sets else {})})


def keys(*rows: list[int]) -> dict[str, np.ndarray]:
    return {"path_keys": np.array(rows, np.int32)}


def test_a_bundle_with_sets_opens_and_runs(bundle: Path) -> None:
    write(bundle)
    check(bundle)
    paths = open_bundle(bundle).tables().paths
    assert paths is not None and paths.has_sets and paths.keys.tolist() == SETS["path_keys"].tolist()
    run(bundle, prefetch="path", expert_cache="80%")


@pytest.mark.parametrize(
    "changes",
    [
        keys([1, 0, 1], [1, 0, 2]),
        keys([1, 0, 1, 0], [1, 0, 1, 1]),
        keys([1, 0, 1, 0, 2, 2], [1, 0, 1, 1, 2, 2]),
        keys([1, 0, 1, 1, 2], [1, 0, 1, 0, 2]),
        keys([1, 0, 1, 0, 2], [1, 0, 1, 0, 2]),
        keys([1, 1, 2, 1, 2], [0, 0, 1, 1, 2]),
        keys([1, 0, 1, 2, 0], [1, 1, 2, 0, 2]),
        keys([1, 1, 0, 0, 2], [1, 1, 2, 0, 2]),
        keys([1, 0, 1, 0, 0], [1, 1, 2, 0, 2]),
        keys([1, 0, 1, 0, 3], [1, 1, 2, 0, 2]),
        keys([1, -1, 1, 0, 2], [1, 1, 2, 0, 2]),
        keys([1, 0, 1, 0, 2], [2, 0, 1, 0, 2]),
        keys([-1, 0, 1, 0, 2], [1, 0, 1, 0, 2]),
        {"path_keys": SETS["path_keys"].astype(np.uint16)},
        {"path_offsets": np.array([0, 3], np.int64)},
        {"path_experts": np.array([0, 1, 3], np.uint16)},
    ],
    ids=str,
)
def test_hostile_sets(bundle: Path, changes: dict[str, Any]) -> None:
    write(bundle, **changes)
    for refused in (lambda: check(bundle), lambda: run(bundle, prefetch="path", expert_cache="80%")):
        with pytest.raises(ManifestInvalid, match=TABLES_NAME):
            refused()


def test_tables_and_manifest_must_agree_on_the_form(bundle: Path) -> None:
    write(bundle, path_sets=False, version=1)
    with pytest.raises(ManifestInvalid, match=r"path\.keys"):
        check(bundle)
    for path_sets, version in ((True, 1), (False, 2)):
        write(bundle, path_sets, version)
        with pytest.raises(ManifestInvalid, match=f"need {3 - version}, found {version}"):
            check(bundle)
    write(bundle)
    seal(bundle, {**plain_manifest(bundle), "format_version": 1, "path_sets": False})  # a default is left out
    with pytest.raises(ManifestInvalid, match="path_sets"):
        check(bundle)


def test_the_limit_counts_the_columns_of_keys(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bundle)
    monkeypatch.setattr("moec.runtime.bundle.tables.MAX_PATH_KEYS", 3)
    with pytest.raises(ManifestInvalid, match=r"`path\.keys` has 2 rows, more than the limit of 1"):
        run(bundle)


def example(*top_ks: int) -> BundleManifest:
    layers = tuple(layer_spec(experts=4, top_k=top_k) for top_k in top_ks)
    return build_manifest(model_spec(layers), [(BF16, BF16, BF16)], [BF16])


def test_sets_need_one_top_k_of_at_least_two() -> None:
    assert replace(example(2, 2), path_sets=True, format_version=2).path_sets
    for top_ks in ((1, 1), (2, 3)):
        with pytest.raises(ValueError, match="path_sets: expected one top-k"):
            replace(example(*top_ks), path_sets=True, format_version=2)


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

"""Path tables with exact sets of experts: what a reader refuses, and a bundle that runs with them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.bundle import TABLES_NAME, BundleManifest
from moec.manifests.errors import ManifestInvalid
from moec.runtime.bundle.open_bundle import open_bundle
from tests.gates.bundles import emit_bundle
from tests.gates.damage import check, plain_manifest, run, seal, write_tables
from tests.manifests.examples import BF16, build_manifest, layer_spec, model_spec
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

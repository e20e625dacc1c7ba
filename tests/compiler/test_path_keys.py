"""A compile keeps the keys of the path tables that predict held-out texts better: pairs, or exact sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("texts") / "data", train=60)


@pytest.mark.parametrize(("experts", "top_k", "kept"), [(3, 2, "sets"), (6, 2, "pairs"), (3, 1, "pairs")])
def test_the_form_that_predicts_better_is_kept(
    experts: int, top_k: int, kept: str, texts: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "tiny", layers=3, experts=experts, top_k=top_k)
    for name, asked in (("best", {}), ("pairs", {"path_keys": "pairs"})):
        compile_tiny(model, tmp_path / name, "uniform", 8, data=str(texts), **asked)
    best, plain = (check_bundle(tmp_path / name)["statistics"]["paths"] for name in ("best", "pairs"))
    assert best == {**plain, "kept": kept} and (best["accuracy_sets"] > best["accuracy_pairs"]) == (kept == "sets")
    opened = open_bundle(tmp_path / "best")
    assert opened.manifest.format_version == (2 if kept == "sets" else 1)
    assert opened.manifest.path_sets == (kept == "sets") and "path_keys" not in opened.manifest.options
    plain_manifest = open_bundle(tmp_path / "pairs").manifest
    assert plain_manifest.format_version == 1 and plain_manifest.options["path_keys"] == "pairs"
    paths = opened.tables().paths
    assert paths is not None and paths.has_sets == (kept == "sets") and len(paths.keys)
    own, other = (contents(tmp_path / name) for name in ("best", "pairs"))
    changed = {name for name in own if own[name] != other[name]}
    assert changed - {"moec.json", "quality.json"} == ({"tables.safetensors"} if kept == "sets" else set())
    said = []
    for prefetch in ("path", "off"):
        with load(tmp_path / "best", prefetch=prefetch, expert_cache="70%", context=32) as engine:
            said.append([step.token_id for step in engine.generate([5, 6, 7], max_new_tokens=6)])
    assert said[0] == said[1]


def test_without_held_out_texts_nothing_decides(tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "tiny", layers=3, experts=3), save_texts(tmp_path / "texts", train=2)
    compile_tiny(model, tmp_path / "out", "uniform", 8, data=str(texts))
    assert "kept" not in check_bundle(tmp_path / "out")["statistics"]["paths"]
    assert open_bundle(tmp_path / "out").manifest.format_version == 1

"""The exact-set form of the path dictionary, compared with a count by hand; and when a compile keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.calibration.activation_paths import (
    LEAST_SEEN,
    PathReport,
    count_path_sets,
    count_paths,
    keeps_sets,
    report_paths,
)
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")

REPORT = PathReport(0.5, 0.6, 0.4, 0.3, 0.2, 0.1, 9)


@given(st.integers(0, 90), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_sets_are_counted_as_by_hand(tokens: int, layers: int, top_k: int, seed: int) -> None:
    routes = np.random.default_rng(seed).random((tokens, layers, 3)).argsort(axis=2)[:, :, :top_k].astype(np.uint16)
    seen: dict[tuple[int, ...], int] = {}
    successors: dict[tuple[int, ...], dict[int, int]] = {}
    for token in routes.tolist():
        for layer in range(2, layers):
            key = (layer, *sorted(token[layer - 2]), *sorted(token[layer - 1]))
            seen[key] = seen.get(key, 0) + 1
            for expert in token[layer]:
                own = successors.setdefault(key, {})
                own[expert] = own.get(expert, 0) + 1
    found = count_path_sets(routes, 3)
    keys = sorted(key for key, count in seen.items() if count >= LEAST_SEEN)
    assert found.keys.shape == (len(keys), 1 + 2 * top_k) and list(map(tuple, found.keys.tolist())) == keys
    assert (found.keys.dtype, found.offsets.dtype, found.experts.dtype, found.counts.dtype) == (
        np.int32, np.int64, np.uint16, np.uint32,
    )  # fmt: skip
    for at, key in enumerate(keys):
        span = slice(found.offsets[at], found.offsets[at + 1])
        own = dict(zip(found.experts[span].tolist(), found.counts[span].tolist(), strict=True))
        assert own == successors[key] and list(own) == sorted(own) and sum(own.values()) == top_k * seen[key]
    assert found.offsets[-1] == len(found.experts) == len(found.counts)


def test_for_one_expert_per_token_sets_are_pairs() -> None:
    routes = np.random.default_rng(1).integers(0, 2, (400, 4, 1)).astype(np.uint16)
    pairs, sets = count_paths(routes, 2), count_path_sets(routes, 2)
    for name in ("keys", "offsets", "experts", "counts"):
        np.testing.assert_array_equal(getattr(sets, name), getattr(pairs, name))


def test_sets_know_what_pairs_confuse() -> None:
    """The next experts depend on which experts came together. Each pair occurs equally often with each outcome."""
    rng = np.random.default_rng(2)
    both = rng.random((2000, 2, 4)).argsort(axis=2)[:, :, :2].astype(np.uint16)
    odd = both.sum(axis=(1, 2)) % 2
    routes = np.concatenate([both, np.stack([2 * odd, 2 * odd + 1], 1)[:, None].astype(np.uint16)], axis=1)
    report = report_paths(routes[:1500], routes[1500:], 4)
    assert report.accuracy_sets == 1.0 > report.accuracy_pairs and keeps_sets(report, [2])


@pytest.mark.parametrize(
    ("report", "top_ks", "is_kept"),
    [
        (REPORT, [2], True),
        (REPORT, [2, 2], True),
        (REPORT, [2, 3], False),
        (REPORT, [1], False),
        (replace(REPORT, accuracy_pairs=0.6), [2], False),
    ],
)
def test_sets_are_kept_where_they_predict_better(report: PathReport, top_ks: list[int], is_kept: bool) -> None:
    assert keeps_sets(report, top_ks) == is_kept


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

"""Compiles of a tiny random model that stop on the way, and what a resumed one takes from them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.families.lowering import Lowering
from moec.compiler.request.options import Talk
from moec.compiler.stages import bundle as bundle_stages
from moec.compiler.stages import measure as measure_stages
from moec.compiler.stages import planning as planning_stages
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.evaluation.engine import Take
from moec.manifests.bundle import MANIFEST_NAME
from tests.tiny_compile import check_bundle, compile_tiny, contents, little_memory, names, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
KL = 0.05


class Halt(Exception):
    """A fault of the machine."""


def halt(*_: object, **__: object) -> Any:
    raise Halt


@pytest.mark.parametrize(
    ("module", "stage"),
    [
        (measure_stages, "Sweep"),
        (measure_stages, "LayerGradients"),
        (planning_stages, "candidates"),
        (bundle_stages, "emit"),
        (bundle_stages, "certify"),
        (bundle_stages, "finish"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_stage_loses_nothing_and_resume_takes_up(
    model: Path, texts: Path, tmp_path: Path, whole: dict[str, bytes], module: ModuleType, stage: str
) -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Halt):
        patched.setattr(module, stage, halt)
        compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts))
    assert names(tmp_path) == {"out.work"}
    done = len(names(tmp_path / "out.work"))
    compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), resume=True)
    assert contents(tmp_path / "out") == whole
    assert names(tmp_path) == {"out"}
    assert (done > 0) == (stage != "Sweep")


@pytest.fixture(scope="module")
def whole(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "out"
    compile_tiny(model, output, "kl", KL, data=str(texts))
    return contents(output)


def test_resume_measures_nothing_twice(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    with pytest.raises(Halt):
        compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), open_runtime=halt)
    monkeypatch.setattr(LoadedLayer, "load", halt)
    notes: list[str] = []
    compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), resume=True, talk=Talk(notes.append))
    assert contents(tmp_path / "out") == whole
    (sentence,) = (note for note in notes if "taking up" in note)
    stages = r"before, gradients, \d+ x kl, layer, states, \d x units"
    assert re.search(rf"taking up \d+ finished stages from `.*out.work`: {stages}", sentence)


def test_resume_of_other_options_starts_anew(model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(Halt):
        compile_tiny(model, tmp_path / "out", "kl", 0.2, data=str(texts), open_runtime=halt)
    notes: list[str] = []
    compile_tiny(model, tmp_path / "out", "bits_per_weight", 3.0, resume=True, talk=Talk(notes.append))
    assert any("no finished stage of these inputs" in note for note in notes)
    assert names(tmp_path) == {"out"}
    assert check_bundle(tmp_path / "out")["trials"] == []


def test_a_work_folder_of_another_version_is_not_read(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    with monkeypatch.context() as patched, pytest.raises(Halt):
        patched.setattr("moec.compiler.preflight.prepared.producer", lambda: "moec 0.0.1")
        compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), open_runtime=halt)
    notes: list[str] = []
    compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), resume=True, talk=Talk(notes.append))
    assert sum("holds no finished stage of these inputs and options, by this version" in note for note in notes) == 1
    assert contents(tmp_path / "out") == whole and names(tmp_path) == {"out"}


@pytest.mark.parametrize("has_memory", [True, False])
def test_every_weight_is_read_layer_by_layer_before_the_search(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    model, read, plain = save_model(tmp_path / "tiny", layers=3, experts=2), list[str](), Lowering.read

    def counting(self: Lowering, source: Any, rows: tuple[int, int] | None = None) -> torch.Tensor:
        read.append(source.name)
        return plain(self, source, rows)

    if not has_memory:
        little_memory(monkeypatch.setattr)
    monkeypatch.setattr(Lowering, "read", counting)
    monkeypatch.setattr(planning_stages, "candidates", halt)
    with pytest.raises(Halt):
        compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts))
    assert set(read) == set(load_file(model / "model.safetensors"))
    units = [name for name in read if ".experts." in name]
    layers = [int(name.split(".")[2]) for name in dict.fromkeys(units)]
    assert layers == sorted(layers) and len(set(layers)) == 3
    # Once where memory holds them; otherwise for the sweep, and forward and backward for the gradients.
    assert set(Counter(units).values()) == {1 if has_memory else 3}


class Halting:
    """Opens bundles. Some answers are computed, then the machine fails. scored: the bundle and the pair of each."""

    def __init__(self, answers: float) -> None:
        self._left, self.scored = answers, list[tuple[bytes, tuple[str, str]]]()

    @contextmanager
    def __call__(self, path: Path, memory_bytes: int) -> Iterator[Any]:
        manifest = (path / MANIFEST_NAME).read_bytes()
        with open_partial(path, memory_bytes) as engine:
            plain = engine.answer_log_probs

            def answer_log_probs(pairs: Sequence[tuple[str, str]], take: Take[Any]) -> None:
                def counted(index: int, result: Any) -> None:
                    if not self._left:
                        raise Halt
                    self._left -= 1
                    take(index, result)
                    self.scored.append((manifest, pairs[index]))

                plain(pairs, counted)

            engine.answer_log_probs = answer_log_probs  # type: ignore[method-assign]
            yield engine


def test_a_failure_loses_no_finished_answer(model: Path, tmp_path: Path) -> None:
    """Of the checkpoint, of plans, and of the bundle on held-out texts. Each answer is computed once in all runs."""
    texts = save_texts(tmp_path / "texts", validation=30)
    options: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",)}
    alone = Halting(math.inf)
    compile_tiny(model, tmp_path / "alone", "loss", 0.05, open_runtime=alone, **options)
    runs = [Halting(count) for count in (17, len(alone.scored) // 2, 40, math.inf)]
    for run in runs[:-1]:
        with pytest.raises(Halt):
            compile_tiny(model, tmp_path / "out", "loss", 0.05, open_runtime=run, resume=True, **options)
    compile_tiny(model, tmp_path / "out", "loss", 0.05, open_runtime=runs[-1], resume=True, **options)
    scored = [answer for run in runs for answer in run.scored]
    assert len(runs[-1].scored) > 10 and len({manifest for manifest, _ in scored}) >= 3
    assert Counter(scored) == Counter(alone.scored)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")

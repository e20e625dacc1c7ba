"""How much of a model stays in memory: all where there is room, else as many layers as fit, else a refusal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moec.compiler.effort import Effort
from moec.compiler.preflight import preparation
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import MemoryNeed, Prepared, choose_kept_layers, measures_tasks, runtime_bytes
from moec.compiler.request import request as request_module
from moec.compiler.request.options import CompileOptions, Sensitivity
from moec.compiler.request.targets import Target, TargetKind
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.memory import (
    LARGE_TEXTS,
    LARGE_WORK,
    NOTHING_KEPT,
    QUICK_TEXTS,
    SMALL_TEXTS,
    KeptLayers,
    TextLimits,
    certificate_bytes,
    fitting_layers,
    resident_bytes,
    usual_texts,
)
from moec.manifests.errors import OptionError
from moec.profiles.weight_counts import active_weights, layer_weights
from tests.compiler.lowered import lowered
from tests.compiler.search.toy_search import SPECS, toy_model
from tests.tiny_compile import make_request
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

MODEL = toy_model(layers=8, experts=64, hidden=256, width=1024)
LARGE_VOCABULARY = replace(MODEL, vocab_size=150_000)


def need(kind: TargetKind = "kl", sensitivity: Sensitivity = "auto", tasks: int = 1) -> MemoryNeed:
    options = CompileOptions(Target(kind, 0.05), data="x", sensitivity=sensitivity)
    return MemoryNeed(MODEL, options, SPECS, 2, tasks)


@pytest.mark.parametrize("kind", ["kl", "loss"])
def test_more_memory_keeps_more_layers(kind: TargetKind) -> None:
    asked, first, layer = need(kind), resident_bytes(MODEL, 1), 2 * layer_weights(MODEL, 0)
    least, whole = asked.bytes_with(SMALL_TEXTS), asked.bytes_with(LARGE_TEXTS) + resident_bytes(MODEL, 8)
    assert resident_bytes(MODEL, 2) - first == layer and least + first < whole
    assert choose_kept_layers(asked, whole) == KeptLayers(8, True, LARGE_TEXTS)
    assert not choose_kept_layers(asked, whole - 1).holds_model
    assert choose_kept_layers(asked, least) == NOTHING_KEPT
    assert choose_kept_layers(asked, least + first - 1) == NOTHING_KEPT
    assert choose_kept_layers(asked, least + first) == KeptLayers(1, holds_model=False)
    kept = [choose_kept_layers(asked, size).count for size in range(least, whole, layer // 3)]
    assert kept == sorted(kept) and set(kept) >= {0, 1, 2}
    assert KeptLayers(8, True, LARGE_TEXTS).has_cheap_plans and not NOTHING_KEPT.has_cheap_plans


def test_a_large_model_takes_few_texts_in_any_memory() -> None:
    """One KL on all answers would take LARGE_WORK multiplications or more."""
    text_tokens = LARGE_TEXTS.answers
    assert usual_texts(MODEL, "default") == LARGE_TEXTS and active_weights(MODEL) * text_tokens < LARGE_WORK
    wide = replace(MODEL, vocab_size=LARGE_WORK // text_tokens // MODEL.hidden_size + 1)
    assert active_weights(wide) * text_tokens > LARGE_WORK and usual_texts(wide, "default") == SMALL_TEXTS
    kept = choose_kept_layers(replace(need(), model=wide), 1 << 50)
    assert kept == KeptLayers(8, True, SMALL_TEXTS) and not kept.has_cheap_plans


@pytest.mark.parametrize(("effort", "texts"), [("quick", QUICK_TEXTS), ("thorough", LARGE_TEXTS)])
def test_an_effort_names_the_texts_of_any_model(effort: Effort, texts: TextLimits) -> None:
    wide = replace(MODEL, vocab_size=LARGE_WORK // LARGE_TEXTS.answers // MODEL.hidden_size + 1)
    for model in (MODEL, wide):
        asked = replace(need(), model=model, options=replace(need().options, effort=effort))
        kept = choose_kept_layers(asked, 1 << 50)
        assert kept.texts == texts and kept.has_cheap_plans == (effort == "thorough")
        least = asked.bytes_with(QUICK_TEXTS if effort == "quick" else SMALL_TEXTS)
        assert choose_kept_layers(asked, least).texts == (QUICK_TEXTS if effort == "quick" else SMALL_TEXTS)


def test_a_layer_that_does_not_fit_is_refused_with_the_memory_that_would_do() -> None:
    least = need().bytes_with(SMALL_TEXTS)
    with pytest.raises(OptionError, match=f"takes {-(-least // 2**20)}MiB of memory, found {least - 1 >> 20}MiB") as e:
        choose_kept_layers(need(), least - 1)
    with pytest.raises(OptionError, match=f"takes {-(-least // 10**6)}MB of memory, found 90MB"):
        choose_kept_layers(need(), 90_000_000)
    told = int(str(e.value.hint).split("--memory ")[1].split("MiB")[0]) << 20
    assert least <= told < least + (1 << 20) and choose_kept_layers(need(), told)


def test_memory_grows_with_what_a_compile_does() -> None:
    """With tasks, with gradients and with formats."""
    plain = need("size", "proxy").bytes_with(SMALL_TEXTS)
    assert need("size", "proxy", tasks=3).bytes_with(SMALL_TEXTS) >= plain
    assert need("size", "fisher").bytes_with(SMALL_TEXTS) >= plain
    assert need("loss", "proxy").bytes_with(SMALL_TEXTS) >= plain
    assert need("size", "proxy", tasks=0).bytes_with(LARGE_TEXTS) < need("size", "proxy").bytes_with(LARGE_TEXTS)
    assert need("loss", "proxy").bytes_with(LARGE_TEXTS) == need("kl", "proxy").bytes_with(LARGE_TEXTS)
    loss, kl = (CompileOptions(Target(kind, 0.05), data="x") for kind in ("loss", "kl"))
    measured = [measures_tasks(asked, holds) for asked in (loss, kl) for holds in (False, True)]
    assert measured == [True, True, False, True]


def test_layers_fit_whole() -> None:
    first, layer = resident_bytes(MODEL, 1), 2 * layer_weights(MODEL, 0)
    sizes = (0, first - 1, first, first + layer - 1, first + 2 * layer + 1)
    assert [fitting_layers(MODEL, size) for size in sizes] == [0, 0, 1, 1, 3]
    assert fitting_layers(MODEL, 100 * layer) == 8


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_all_weights_that_stay_are_counted(tmp_path: Path, kept: int) -> None:
    """The embedding and the norms are read with the first layer. They stay with it, and take memory as it does."""
    lowering = lowered(save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=3)))
    loaded = LoadedLayer(lowering, kept)
    states = loaded.embed(torch.tensor([[1, 2, 3]]))
    for layer in range(3):
        loaded.load(layer)
    loaded.normed(states)
    assert loaded.kept_bytes == resident_bytes(lowering.model, kept)


def test_a_runtime_has_what_a_certificate_leaves() -> None:
    assert runtime_bytes(MODEL, 8 << 30) == (8 << 30) - certificate_bytes(MODEL)


def test_a_compile_says_how_many_layers_stay(model: Path, texts: Path, tmp_path: Path) -> None:
    """Text limits decide results, so a run with other ones is another run. How many layers stay decides nothing."""
    notes: list[str] = []

    def prepared(memory_bytes: int) -> str:
        request = make_request(model, tmp_path / "out", "kl", 0.05, data=str(texts), memory_bytes=memory_bytes)
        request.talk.note = lambda note: notes.append(note) if "memory holds" in note else None
        return prepare(request).identity()

    much = [prepared(size << 30) for size in (8, 16)]
    assert much[0] == much[1] and notes == []
    with pytest.raises(OptionError, match="one layer at a time takes") as caught:
        prepared(1 << 20)
    least = int(str(caught.value.hint).split("--memory ")[1].split("MiB")[0]) << 20
    little = prepared(least)
    assert little != much[0] and len(notes) == 1 and "of 1 layers between passes" in notes[0]


def test_free_memory_decides_no_result(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--memory` a compile says that less is free than it may take, and keeps fewer layers."""
    notes: list[str] = []

    def prepared(free_bytes: int, machine_bytes: int) -> Prepared:
        notes.clear()
        monkeypatch.setattr(preparation, "available_memory_bytes", lambda: free_bytes)
        monkeypatch.setattr(preparation, "resident_set_bytes", lambda: 0)
        monkeypatch.setattr(request_module, "memory_limit_bytes", lambda: machine_bytes)
        request = make_request(model, tmp_path / "out", "kl", 0.05, data=str(texts))
        request.talk.note = lambda note: notes.append(note) if "memory" in note else None
        return prepare(request)

    much = prepared(16 << 30, 16 << 30)
    assert notes == [] and much.kept_layers.holds_model
    little = prepared(1 << 20, 16 << 30)
    assert little.identity() == much.identity() and little.kept_layers == much.kept_layers
    assert len(notes) == 1 and notes[0].startswith("the compile may take") and "--memory" in notes[0]
    asked = MemoryNeed(much.lowering.model, much.request.options, much.stored_specs, torch.get_num_threads(), 1)
    machine_bytes = asked.bytes_with(LARGE_TEXTS) * 8 // 7
    small = prepared(16 << 30, machine_bytes)
    assert not small.kept_layers.holds_model and small.kept_layers.count > 0 and len(notes) == 1
    crowded = prepared(1 << 20, machine_bytes)
    assert crowded.identity() == small.identity() and crowded.kept_layers.count == 0 and len(notes) == 2


SCRIPT = """
import sys
from pathlib import Path
import torch
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.preflight import preparation
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.request import request as request_module
from moec.compiler.preflight.prepared import MemoryNeed
from moec.compiler.walker.memory import LARGE_TEXTS, resident_bytes
from tests.tiny_compile import make_request
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
model, texts, output = map(Path, sys.argv[1:])
torch.set_num_threads(1)
request = make_request(model, output, "kl", 0.05, data=str(texts))
found = prepare(request)
need = MemoryNeed(found.lowering.model, request.options, found.stored_specs, 1, 1)
request.memory_bytes = need.bytes_with(LARGE_TEXTS) + resident_bytes(found.lowering.model, 1)
assert prepare(request).kept_layers.holds_model
print(list(compile_checkpoint(request).quality["tasks"]))
"""


@pytest.mark.slow
def test_the_least_memory_that_holds_a_model_is_enough(model: Path, texts: Path, tmp_path: Path) -> None:
    """To the end: the certificate runs the checkpoint and the bundle next to each other. In a process of its own."""
    command = [sys.executable, "-c", SCRIPT, str(model), str(texts), str(tmp_path / "out")]
    root = Path(__file__).parents[3]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert finished.stdout.strip() == "['perplexity']", finished.stderr

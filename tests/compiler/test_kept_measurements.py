"""Measurements that a compile keeps in a folder, and what compiles of other targets take from it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.devices import check_devices, compile_for_devices
from moec.compiler.request.options import Talk
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.output_lock import hold_output
from moec.manifests.errors import MoecError, OptionError, TargetUnreachable
from tests.compiler.test_pipeline_resume import Halt, halt
from tests.tiny_compile import check_bundle, compile_tiny, contents, make_request, names, pi, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = "measurements"


def stages(folder: Path) -> set[str]:
    """Kinds of results in the folder."""
    return {name.partition("-")[0] for name in names(folder / FOLDER)}


@pytest.mark.parametrize(("kind", "first", "second"), [("kl", 0.2, 0.05), ("loss", 0.3, 0.02)])
def test_another_target_measures_the_model_once_and_gets_the_bytes_of_a_compile_alone(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, first: float, second: float
) -> None:
    common: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",), "prune": False}
    compile_tiny(model, tmp_path / "alone", kind, second, **common)
    common["measurements"] = tmp_path / FOLDER
    compile_tiny(model, tmp_path / "coarse", kind, first, **common)
    kept = {name: (tmp_path / FOLDER / name).stat().st_mtime_ns for name in names(tmp_path / FOLDER)}
    assert stages(tmp_path) >= {"layer", "units", "gradients", "kl", "certified"}
    notes: list[str] = []
    monkeypatch.setattr("moec.compiler.stages.sweep.LayerQuantizer.run", halt)
    compile_tiny(model, tmp_path / "fine", kind, second, **common, talk=Talk(notes.append))
    assert any("taking up" in note and FOLDER in note for note in notes)
    assert contents(tmp_path / "fine") == contents(tmp_path / "alone") != contents(tmp_path / "coarse")
    assert names(tmp_path) == {"alone", "coarse", "fine", FOLDER}
    for name in (name for name in kept if "certified" not in name):
        assert (tmp_path / FOLDER / name).stat().st_mtime_ns == kept[name]


@pytest.mark.usefixtures("few_tokens")
def test_another_search_does_not_change_the_next_one(tmp_path: Path) -> None:
    """Each search takes its own number of spare texts, by the first plan near the target. Losses are those of texts."""
    model, data = save_model(tmp_path / "tiny"), save_texts(tmp_path / "texts", train=40, validation=3, test=6)
    common: dict[str, Any] = {"data": str(data), "tasks": ("perplexity",)}
    fast = replace(pi(), name="fast", memory_budget_bytes=8_000_000_000)
    last: dict[str, Any] = {"profile": fast, "swaps": 0}
    compile_tiny(model, tmp_path / "alone", "loss", 0.01, **common, **last)
    common["measurements"] = tmp_path / FOLDER
    compile_tiny(model, tmp_path / "other-device", "loss", 0.01, **common)
    compile_tiny(model, tmp_path / "sized", "loss", 0.01, objective="size", **common)
    compile_tiny(model, tmp_path / "last", "loss", 0.01, **common, **last)
    spare = [name for name in names(tmp_path / FOLDER) if name.startswith("spare-")]
    assert len(spare) == 3
    assert contents(tmp_path / "last") == contents(tmp_path / "alone")


def test_an_unreachable_target_loses_no_measurement(model: Path, texts: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"data": str(texts), "measurements": tmp_path / FOLDER}
    with pytest.raises(TargetUnreachable):
        compile_tiny(model, tmp_path / "out", "kl", 1e-12, bits=(2, 4), **common)
    assert stages(tmp_path) >= {"layer", "units", "gradients", "kl"}
    assert names(tmp_path) == {FOLDER}


def test_an_interrupted_compile_goes_on_without_an_option(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"data": str(texts), "measurements": tmp_path / FOLDER}
    with pytest.raises(Halt):
        compile_tiny(model, tmp_path / "out", "kl", 0.05, open_runtime=halt, **common)
    assert names(tmp_path) == {FOLDER}
    monkeypatch.setattr(LoadedLayer, "load", halt)
    compile_tiny(model, tmp_path / "out", "kl", 0.05, **common)
    check_bundle(tmp_path / "out")
    # A compile that ended before is known by its bundle, which is not overwritten
    compile_tiny(model, tmp_path / "out", "kl", 0.05, **common)
    with pytest.raises(OptionError, match="exists"):
        compile_tiny(model, tmp_path / "out", "kl", 0.1, **common)
    # `overwrite` makes it anew, also from a bundle that was damaged
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "dense.safetensors").write_bytes(b"damaged")
    compile_tiny(model, tmp_path / "out", "kl", 0.05, overwrite=True, **common)
    assert contents(tmp_path / "out") == whole


def test_a_plan_alone_leaves_its_measurements(model: Path, texts: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"data": str(texts), "measurements": tmp_path / FOLDER}
    compile_tiny(model, tmp_path / "out", "kl", 0.05, plan_only=True, **common)
    assert names(tmp_path) == {FOLDER}
    assert stages(tmp_path) >= {"layer", "units", "gradients", "kl"}


def test_several_devices_keep_them_too(model: Path, texts: Path, tmp_path: Path) -> None:
    asked = [
        make_request(
            model, tmp_path / name, "kl", 0.05, data=str(texts), measurements=tmp_path / FOLDER,
            profile=replace(pi(), name=name),
        )
        for name in ("one", "two")
    ]  # fmt: skip
    assert len(list(compile_for_devices(asked, tmp_path / "out"))) == 2
    assert names(tmp_path) == {"one", "two", FOLDER}
    assert stages(tmp_path) >= {"layer", "search", "certified"}
    # An interrupted command continues, and finds the first bundle in its place
    shutil.rmtree(tmp_path / "two")
    before = (tmp_path / "one" / "moec.json").stat().st_mtime_ns
    assert len(list(compile_for_devices(asked, tmp_path / "out", check_devices(asked)))) == 2
    assert (tmp_path / "one" / "moec.json").stat().st_mtime_ns == before
    assert names(tmp_path) == {"one", "two", FOLDER}


def test_other_data_is_measured_anew(model: Path, texts: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"data": str(texts), "measurements": tmp_path / FOLDER}
    compile_tiny(model, tmp_path / "one", "kl", 0.2, **common)
    notes: list[str] = []
    compile_tiny(model, tmp_path / "other", "kl", 0.2, limit=5, talk=Talk(notes.append), **common)
    assert any("no finished stage of these inputs" in note for note in notes)


def test_two_compiles_at_once_are_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    with (
        hold_output(folder, Disk(), pytest.fail),
        pytest.raises(MoecError, match=f"another compile is writing .*{FOLDER}.*`--measurements`"),
    ):
        compile_tiny(model, tmp_path / "out", "kl", 0.2, data=str(texts), measurements=folder)
    assert names(tmp_path) == set()

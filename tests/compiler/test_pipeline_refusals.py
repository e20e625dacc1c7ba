"""Compiles that are refused: one error with a hint, and an unchanged folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moec.compiler import pipeline
from moec.compiler.stages import measure as measure_stages
from moec.manifests.errors import DoesNotFit, InputError, MoecError, OptionError, TargetUnreachable
from tests.compiler.preflight.test_device_fit import with_budget
from tests.tiny_compile import compile_tiny, contents, make_request, names, save_problems

pytestmark = pytest.mark.usefixtures("one_thread")
KL = 0.05


def refused(kind: type[MoecError], folder: Path, act: Callable[[], Any]) -> MoecError:
    """Return the error of a compile, and check that the folder is unchanged."""
    before = contents(folder), names(folder)
    with pytest.raises(kind) as caught:
        act()
    assert (contents(folder), names(folder)) == before
    assert caught.value.hint
    return caught.value


def test_a_model_that_solves_nothing_takes_another_target(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_stages, "LoadedLayer", lambda *arguments: pytest.fail("refused too late"))
    data = save_problems(tmp_path / "problems")
    error = refused(OptionError, tmp_path, lambda: compile_tiny(model, tmp_path / "out", "loss", 0.02, data=str(data)))
    assert "baseline scores 0" in error.message
    assert all(option in str(error.hint) for option in ("--kl", "--bits-per-weight", "--size"))


def test_an_unreachable_target_leaves_nothing(model: Path, texts: Path, tmp_path: Path) -> None:
    request = make_request(model, tmp_path / "out", "kl", 1e-4, data=str(texts), bits=(2,))
    error = refused(TargetUnreachable, tmp_path, lambda: pipeline.compile_checkpoint(request))
    assert "has KL 0." in error.message and "bits per weight" in error.message


def test_a_device_that_no_plan_fits(model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("work was done for a device that takes no plan")

    monkeypatch.setattr(measure_stages, "LoadedLayer", never)
    request = make_request(model, tmp_path / "out", "kl", KL, data=str(texts), profile=with_budget(1 << 20))
    error = refused(DoesNotFit, tmp_path, lambda: pipeline.compile_checkpoint(request))
    assert f"a memory budget of {1 << 20} bytes" in error.message


def test_shots_where_there_is_no_prompt_or_too_few_items(model: Path, texts: Path, tmp_path: Path) -> None:
    problems = save_problems(tmp_path / "problems")
    for data, shots in ((texts, 1), (problems, 4)):
        request = make_request(model, tmp_path / "out", "kl", KL, data=str(data), shots=shots)
        error = refused(OptionError, tmp_path, lambda request=request: pipeline.compile_checkpoint(request))
        assert "shots" in f"{error.message} {error.hint}"


def test_an_existing_output_is_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4)
    assert (
        "exists" in refused(OptionError, tmp_path, lambda: compile_tiny(model, tmp_path / "out", "uniform", 2)).message
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("mine", "link"):
        request = make_request(model, tmp_path / name, "uniform", 2, overwrite=True)
        error = refused(OptionError, tmp_path, lambda request=request: pipeline.compile_checkpoint(request))
        assert "not a bundle" in error.message


@pytest.mark.gate("G10")
@pytest.mark.parametrize("ending", [".work", ".partial", ".work-trial.partial"])
def test_a_link_beside_the_output_is_not_followed(model: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"out{ending}").symlink_to(tmp_path / "elsewhere")
    error = refused(InputError, tmp_path, lambda: compile_tiny(model, tmp_path / "out", "uniform", 2))
    assert f"out{ending}" in error.message


def test_what_an_unfinished_compile_did_not_leave_is_not_removed(model: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
        compile_tiny(model, tmp_path / "out", "uniform", 4)
    assert (partial / "thesis.txt").read_text() == "mine" and not (tmp_path / "out").exists()
    (partial / "thesis.txt").rename(partial / "dense.safetensors.writing")
    assert compile_tiny(model, tmp_path / "out", "uniform", 4).path == tmp_path / "out"

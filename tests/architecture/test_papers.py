"""Figures of the papers: what is measured, kept and drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.papers import __main__ as command
from bench.papers.drawing import draw
from bench.papers.figure import Figure, Measured, Panel, from_record, judged, of_all, to_record
from bench.papers.inputs import BUNDLES, SHIPPED, Inputs
from bench.papers.making import make, publish
from bench.papers.models import NATURAL, PLANTED, Model
from bench.papers.page import page
from bench.papers.registry import FIGURES

SMALL = Measured(
    [
        Panel("lines", "lines", "x", "y", points={"one": [(0.0, 1 / 3), (1.0, 2.0)]}),
        Panel("bars", "bars", "x", "y", groups=["a", "b"], bars={"one": [1.0, 2.0], "two": [2.0, 3.0]}),
        Panel("map", "map", "expert", "layer", rows=[[0.1, 0.2], [0.3, 0.4]]),
    ],
    ["a sentence"],
    "same",
)


def test_a_figure_drawn_twice_has_the_same_bytes() -> None:
    first, second = (draw("a title", SMALL) for _ in range(2))
    assert first == second and b"metadata" not in first and len(first) < 9000


def test_a_record_keeps_six_digits_and_all_fields() -> None:
    kept = from_record(to_record("a-name", SMALL))
    assert kept.panels[0].points == {"one": [[0.0, 0.333333], [1.0, 2.0]]}
    assert [panel.kind for panel in kept.panels] == ["lines", "bars", "map"]
    assert (kept.found, kept.verdict) == (["a sentence"], "same")


def stub(calls: list[str], name: str, fails: bool = False, models: tuple[Model, ...] = (PLANTED,)) -> Figure:
    """Return a figure that notes each measurement."""

    def measure(inputs: Inputs) -> Measured:
        calls.append(name)
        if fails:
            raise RuntimeError("stopped")
        return SMALL

    return Figure(name, "edgemoe", "Figure 0", "a title", "reported", models, "how", "why", measure)


def test_a_stopped_run_goes_on_after_the_last_complete_figure(tmp_path: Path) -> None:
    calls: list[str] = []
    inputs, output = Inputs(tmp_path / "work"), tmp_path / "pages"
    figures = [stub(calls, "edgemoe-first"), stub(calls, "edgemoe-second", fails=True)]
    with pytest.raises(RuntimeError, match="stopped"):
        make(figures, inputs, output, again=False, say=calls.append)
    assert not list((tmp_path / "work").rglob("*second*")) and not list(tmp_path.rglob("*.partial"))
    calls.clear()
    make([figures[0], stub(calls, "edgemoe-second")], inputs, output, again=False, say=lambda sentence: None)
    assert calls == ["edgemoe-second"]
    assert {path.name for path in (output / "figures").iterdir()} == {"edgemoe-first.svg", "edgemoe-second.svg"}
    assert len((output / "edgemoe.jsonl").read_text().splitlines()) == 2
    make(figures[:1], inputs, output, again=True, say=lambda sentence: None)
    assert calls == ["edgemoe-second", "edgemoe-first"]


ABSENT = replace(PLANTED, folder=Path("no/such/model"), made_by="make the-model")


def test_a_figure_without_its_model_keeps_the_published_result(tmp_path: Path) -> None:
    calls, told, output = list[str](), list[str](), tmp_path / "pages"
    publish(stub(calls, "edgemoe-first"), to_record("edgemoe-first", SMALL), output)
    before = {path: path.read_bytes() for path in (output / "figures").iterdir()}
    figures = [stub(calls, "edgemoe-first", models=(PLANTED, ABSENT)), stub(calls, "edgemoe-second")]
    make(figures, Inputs(tmp_path / "work"), output, again=True, say=told.append)
    assert calls == ["edgemoe-second"]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert [line for line in told if line.startswith("edgemoe-first")] == [
        "edgemoe-first: the published result is kept; `make the-model` makes the model that it needs"
    ]
    make(figures[:1], Inputs(tmp_path / "work"), tmp_path / "empty", again=True, say=told.append)
    assert "not measured yet" in (tmp_path / "empty" / "edgemoe.md").read_text(encoding="utf-8")


def test_a_figure_with_limited_storage_is_measured_only_if_asked(tmp_path: Path) -> None:
    calls, told = list[str](), list[str]()
    figure = replace(stub(calls, "edgemoe-first"), throttles=True)
    make([figure], Inputs(tmp_path / "work"), tmp_path / "pages", again=True, say=told.append)
    assert not calls and "`--with-throttle` measures it" in told[0]
    make([figure], Inputs(tmp_path / "work", throttles=True), tmp_path / "pages", again=True, say=told.append)
    assert calls == ["edgemoe-first"]


def test_a_figure_that_needs_a_counter_is_measured_only_where_one_is(tmp_path: Path) -> None:
    calls, told, figure = list[str](), list[str](), stub([], "edgemoe-first")
    absent = replace(figure, needs=lambda: "a counter is needed")
    make([absent], Inputs(tmp_path / "work"), tmp_path / "pages", again=True, say=told.append)
    assert told == ["edgemoe-first: the published result is kept; a counter is needed"]
    present = replace(stub(calls, "edgemoe-first"), needs=lambda: "")
    make([present], Inputs(tmp_path / "work"), tmp_path / "pages", again=True, say=told.append)
    assert calls == ["edgemoe-first"]


def test_compiles_are_no_time_of_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of a clock that stands still, but during a compile."""
    hours, told, figure = [0.0], list[str](), stub([], "edgemoe-first")
    monkeypatch.setattr("time.monotonic", lambda: 3600 * hours[0])
    monkeypatch.setattr("bench.papers.inputs.moec", lambda *arguments: hours.append(hours.pop() + 1))

    def measure(inputs: Inputs) -> Measured:
        inputs.bundle("planted-2")
        hours[0] += 2
        return SMALL

    make([replace(figure, measure=measure)], Inputs(tmp_path / "work"), tmp_path / "pages", False, told.append)
    assert "edgemoe-first took 7200 s, and 3600 s for bundles" in told


def test_a_model_that_was_made_again_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = replace(NATURAL, folder=tmp_path), list[Path]()

    def compile_empty(*arguments: Any) -> None:
        compiled.append(arguments[-2])
        arguments[-2].mkdir(parents=True)
        (arguments[-2] / "moec.json").touch()

    monkeypatch.setitem(BUNDLES, "natural-16", (model, ()))
    monkeypatch.setattr("bench.papers.inputs.moec", compile_empty)
    for weights in ("first", "first", "second"):
        (tmp_path / "model.safetensors").write_text(weights)
        assert Inputs(tmp_path / "work").bundle("natural-16") == compiled[-1]
    assert len(compiled) == 2


def test_a_run_is_kept_for_its_bundle_and_options(tmp_path: Path) -> None:
    inputs, counts = Inputs(tmp_path), iter(range(9))
    found = [inputs.kept("a run", SHIPPED, options, lambda: {"run": next(counts)}) for options in ((1,), (1,), (2,))]
    assert [each["run"] for each in found] == [0, 0, 1]


def test_a_page_says_what_holds_on_natural_weights() -> None:
    figure = replace(stub([], "edgemoe-first"), on_natural="A sentence on natural weights.")
    plain_page = page("edgemoe", [figure], {figure.name: SMALL}, [])
    assert "atural weights" not in plain_page and "`make example-smollm2`" not in plain_page
    told = page("edgemoe", [figure], {figure.name: replace(SMALL, natural="different")}, [])
    assert "| Figure 0 | [a title](#a-title) | same | different |" in told
    assert "**Natural weights.** A sentence on natural weights." in told
    assert "`make example-smollm2`" in told


@pytest.mark.parametrize(
    ("sentences", "table"),
    [
        (
            ["a: 1 ms, 5 %", "b: 2.5 ms, 5 %", "c: -3e-06 ms, 5 %"],
            "| | … ms, 5 % |\n|---|---|\n| a | 1 |\n| b | 2.5 |\n",
        ),
        (
            ["x, a: 1 s", "x, b: 2 s", "y, a: 3 s", "y, b: 4 s"],
            "| … s | x | y |\n|---|---|---|\n| a | 1 | 3 |\n| b | 2 | 4 |",
        ),
        (["x, a: 1 s", "y, a: 2 s", "z, a: 3 s"], "| | a: … s |\n|---|---|\n| x | 1 |\n| y | 2 |\n| z | 3 |"),
        (["a: 1 ms", "b: 2 ms", "c: 3 s"], "  * a: 1 ms.\n  * b: 2 ms.\n  * c: 3 s.\n"),
    ],
)
def test_sentences_that_differ_in_numbers_alone_are_a_table(sentences: list[str], table: str) -> None:
    assert table in page("edgemoe", [stub([], "edgemoe-first")], {"edgemoe-first": replace(SMALL, found=sentences)}, [])


def test_more_than_three_panels_stand_in_rows() -> None:
    heights = []
    for count in (3, 4):
        drawn = draw("a title", Measured(list(SMALL.panels[:1]) * count, [], "same"))
        heights.append(float(ElementTree.fromstring(drawn).attrib["height"].removesuffix("pt")))
    assert heights[1] == 2 * heights[0]


@pytest.mark.parametrize(("least", "verdict"), [(0.9, "same"), (0.89, "partly"), (0.5, "partly"), (0.49, "different")])
def test_the_least_value_decides_a_verdict(least: float, verdict: str) -> None:
    assert judged([1.0, least], 0.9, 0.5) == verdict


def test_models_that_differ_give_partly() -> None:
    assert (of_all(["same", "same"]), of_all(["same", "different"])) == ("same", "partly")


def test_the_command_lists_all_figures_and_refuses_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--list"])
    listed = capsys.readouterr().out
    assert all(figure.name in listed for figure in FIGURES)
    with pytest.raises(SystemExit) as ended:
        command.main(["edgemoe-nothing"])
    assert ended.value.code == 2
    assert "no figure is called edgemoe-nothing" in capsys.readouterr().err

"""One bundle per device: shared measurements, searches that begin where another ended, hard links, resumed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.devices import check_devices, compile_for_devices, link_identical, predictions
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.preflight import preparation
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.task_data import load_task_data
from moec.compiler.stages import learning
from moec.manifests.errors import DoesNotFit, OptionError
from moec.profiles.device import DeviceProfile
from tests.tiny_compile import check_bundle, contents, make_request, names, pi, save_model

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGETS = {"little": 76_200_000, "middle": 76_250_000, "large": 8_000_000_000}


def device(name: str) -> DeviceProfile:
    """A Raspberry Pi with another memory, and storage so fast that its speed decides nothing for the large one."""
    return replace(pi(), name=name, memory_budget_bytes=BUDGETS[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("devices") / "tiny", layers=2, experts=4)


def requests(model: Path, texts: Path, folder: Path, **values: Any) -> list[CompileRequest]:
    return [
        make_request(model, folder / f"out-{name}", "kl", 0.05, data=str(texts), profile=device(name), **values)
        for name in BUDGETS
    ]


def test_the_first_bundle_is_the_one_that_its_device_gets_alone(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every expert is quantized once, for all devices together. Later searches keep the target with fewer trials."""
    quantized: list[int] = []
    run = ExpertQuantizer.run
    monkeypatch.setattr(
        ExpertQuantizer, "run", lambda self, expert, *rest: quantized.append(expert) or run(self, expert, *rest)
    )
    (tmp_path / "alone").mkdir()
    alone = [compile_checkpoint(request) for request in requests(model, texts, tmp_path / "alone", swaps=None)]
    once = len(quantized) // len(alone)
    quantized.clear()
    together = list(compile_for_devices(requests(model, texts, tmp_path, swaps=None), tmp_path / "out"))
    assert len(quantized) == once > 0
    assert names(tmp_path) == {"alone", *(f"out-{name}" for name in BUDGETS)}
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.path is not None and other.path is not None
        check_bundle(other.path)
        assert contents(one.path).keys() == contents(other.path).keys()
        if number == 2:  # another objective
            assert len(other.quality["trials"]) < len(one.quality["trials"]) / 2
        if number == 0:
            for name, data in contents(one.path).items():
                assert name == "quality.json" or name == "moec.json" or contents(other.path)[name] == data, name
            assert one.plan.digest == other.plan.digest
            assert one.quality["held_out_kl"] == other.quality["held_out_kl"]


def test_identical_files_are_hard_links_and_data_is_read_twice(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of all devices read it once, the first compile once."""
    read = list[object]()
    monkeypatch.setattr(preparation, "load_task_data", lambda *args: read.append(args) or load_task_data(*args))
    asked = requests(model, texts, tmp_path)
    made = compile_for_devices(asked, tmp_path / "out", check_devices(asked))
    first, *rest = (result.path for result in made)
    assert len(read) == 2
    assert first is not None
    for other in rest:
        assert other is not None
        shared = names(first) & names(other)  # routers are learned for a plan, where they predict better
        same = [name for name in shared if (first / name).read_bytes() == (other / name).read_bytes()]
        assert {"tokenizer.json", "tables.safetensors"} <= set(same)
        assert all((first / name).stat().st_ino == (other / name).stat().st_ino for name in same if name != "moec.json")
    assert link_identical(first, []) == 0


def test_a_plan_that_another_device_has_is_learned_from_once(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = list[object]()
    made = learning.lookahead_file
    monkeypatch.setattr(learning, "lookahead_file", lambda *args: learned.append(args) or made(*args))
    results = list(compile_for_devices(requests(model, texts, tmp_path), tmp_path / "out"))
    plans = {result.plan.digest for result in results}
    assert len(learned) == len(plans) < len(results)


def test_the_speed_of_each_bundle_on_each_device(model: Path, texts: Path, tmp_path: Path) -> None:
    asked = requests(model, texts, tmp_path)
    rows = predictions(asked, list(compile_for_devices(asked, tmp_path / "out")))
    assert [row["device"] for row in rows] == list(BUDGETS)
    for row in rows:
        times = [row["token_ns"][name] for name in BUDGETS]
        assert all(time is not None and time > 0 for time in times)
        assert times[0] >= times[-1]  # more memory is never slower


def test_an_interrupted_run_continues_with_the_next_device(model: Path, texts: Path, tmp_path: Path) -> None:
    compiles = compile_for_devices(requests(model, texts, tmp_path), tmp_path / "out")
    first = next(compiles)
    del compiles  # the run ends here
    assert first.path is not None and names(tmp_path) == {"out-little", "out.work"}
    before = contents(first.path)
    resumed = list(compile_for_devices(requests(model, texts, tmp_path, resume=True), tmp_path / "out"))
    assert len(resumed) == len(BUDGETS) and contents(first.path) == before
    assert names(tmp_path) == {f"out-{name}" for name in BUDGETS}


def test_devices_are_checked_before_any_work(model: Path, texts: Path, tmp_path: Path) -> None:
    asked = requests(model, texts, tmp_path)
    with pytest.raises(OptionError, match="two devices of the name `little`"):
        check_devices([asked[0], asked[1], asked[0]])
    asked[-1].profile = replace(device("large"), memory_budget_bytes=1_000_000)
    with pytest.raises(DoesNotFit, match="`large` has a memory budget of 1000000 bytes"):
        check_devices(asked)
    assert names(tmp_path) == set()

"""The certificate of a compile: which bundles are opened, in what memory, on which items, and what is left of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.bundle.plan_bundles import TRIAL, UNQUANTIZED, PlanBundles, clear_trials, trial_folder
from moec.compiler.preflight.prepared import runtime_bytes
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import plain_plan
from moec.compiler.request.uniform import uniform_like
from moec.compiler.stages.learning import SAMPLE_SHARE
from moec.compiler.workspace.durable import Disk
from moec.evaluation.engine import no_progress
from moec.manifests.errors import MoecError, OptionError
from moec.manifests.quant import QuantSpec
from tests.compiler.configured import lowered
from tests.tiny_compile import check_bundle, compile_tiny, little_memory, make_request, names

pytestmark = pytest.mark.usefixtures("one_thread")
MEMORY_BYTES = 8 << 30


@dataclass
class Recorded:
    """Opens bundles, and records each: its folder's name, its memory, and how many were open before it.

    fails_on: name of a folder that cannot be opened.
    """

    fails_on: str = ""
    opened: list[tuple[str, int, int]] = field(default_factory=list)
    count: int = 0

    @contextmanager
    def __call__(self, path: Path, memory_bytes: int) -> Iterator[Any]:
        self.opened.append((path.name, memory_bytes, self.count))
        if path.name == self.fails_on:
            raise MoecError("it cannot be opened")
        self.count += 1
        with cast(AbstractContextManager[Any], open_partial(path, memory_bytes)) as engine:
            yield engine
        self.count -= 1


def compiled(model: Path, texts: Path, output: Path, recorded: Recorded) -> dict[str, Any]:
    """Compile to a KL. Returns quality.json."""
    options: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",), "memory_bytes": MEMORY_BYTES}
    compile_tiny(model, output, "kl", 0.05, open_runtime=recorded, **options)
    return check_bundle(output)


def test_tasks_are_measured_next_to_the_checkpoint_where_memory_holds_the_model(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two runtimes has half of what is left. The metric takes all items, and the KL the first."""
    monkeypatch.setattr("moec.compiler.stages.encode_texts.HELD_OUT_ITEMS", 5)
    recorded, room = Recorded(), runtime_bytes(lowered(model).model, MEMORY_BYTES)
    task = compiled(model, texts, tmp_path / "out", recorded)["tasks"]["perplexity"]
    alone, reference, bundle, self_test = recorded.opened
    assert alone == ("out.partial", room, 0) and bundle == ("out.partial", room, 1)
    assert self_test == ("out.partial", room - room // SAMPLE_SHARE, 0)
    assert reference[0] == trial_folder(tmp_path / "out", UNQUANTIZED).name and reference[2] == 0
    assert room / 2 < reference[1] < room
    rows = [json.loads(line)["text"] for line in (texts / "test.jsonl").read_text().splitlines()]
    assert task["n"] == len(rows) == 40
    tokens = [len(row) for row in rows[:5]]  # one for each byte, one for the end, less the first, which has no prompt
    assert task["kl"]["n"] in range(sum(tokens), sum(tokens) + 6)
    assert names(tmp_path) == {"out"}


def test_with_little_memory_a_kl_target_is_certified_by_its_bundle_alone(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_memory(monkeypatch.setattr)
    recorded = Recorded()
    quality = compiled(model, texts, tmp_path / "out", recorded)
    assert [name for name, *_ in recorded.opened] == ["out.partial"] * 2, "its KL, then the self-test"
    assert quality["tasks"] == {} and quality["held_out_kl"]["perplexity"]["mean"] > 0


@pytest.mark.parametrize("name", ["out.partial", "out.work-unquantized.partial"])
def test_a_certificate_that_fails_leaves_no_bundle(name: str, model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="it cannot be opened"):
        compiled(model, texts, tmp_path / "out", Recorded(name))
    assert names(tmp_path) == {"out.work"}


def bundles_of(model: Path, output: Path, **values: Any) -> PlanBundles:
    request = make_request(model, output, "bits_per_weight", 4.0, **values)
    return PlanBundles(request, lowered(model), MEMORY_BYTES, open_partial)


@pytest.mark.parametrize("plan_only", [False, True])
def test_a_plan_answers_from_a_temporary_bundle(plan_only: bool, model: Path, tmp_path: Path) -> None:
    """With the bits of a bundle that a compile publishes. A plan alone writes nothing near its output."""
    bundles = bundles_of(model, tmp_path / "out", plan_only=plan_only)
    plain = plain_plan(bundles.lowering.model, bundles.lowering.spec_16bit, "rtn")
    plan, pairs = uniform_like(plain, QuantSpec(4, 32), "rtn"), [("a pen", " and a lamp"), ("the box", " near a pen")]
    with bundles.opened(plan, UnitStore(bundles.lowering, "rtn")) as engine:
        scores = engine.answer_log_probs(pairs, no_progress)
        assert names(tmp_path) == (set() if plan_only else {"out.work-trial.partial"})
    assert names(tmp_path) == set()
    compile_tiny(model, tmp_path / "flat", "uniform", 4, symmetric=False, group_sizes=(32,), dense_bits=16)
    with cast(AbstractContextManager[Any], open_partial(tmp_path / "flat")) as engine:
        assert engine.answer_log_probs(pairs, no_progress) == scores


def test_temporary_bundles_take_the_place_of_nothing_and_are_cleared(model: Path, tmp_path: Path) -> None:
    output, bundles = tmp_path / "out", bundles_of(model, tmp_path / "out")
    plain, own = plain_plan(bundles.lowering.model, bundles.lowering.spec_16bit, "rtn"), trial_folder(output, TRIAL)
    own.mkdir()
    (own / "letter.txt").write_text("mine")
    for refused in (lambda: bundles.opened(plain, None).__enter__(), lambda: clear_trials(output, Disk())):
        with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
            refused()
    assert (own / "letter.txt").read_text() == "mine"
    (own / "letter.txt").rename(own / "dense.safetensors")  # as a killed compile leaves it
    with bundles.opened(plain, None):
        pass
    assert names(tmp_path) == set()
    for name in (TRIAL, UNQUANTIZED):
        trial_folder(output, name).mkdir()
    clear_trials(output, Disk())
    assert names(tmp_path) == set()

"""G12: the loss promise. The certificate takes the whole test split, which no other stage uses. It can be repeated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from moec.cli.commands.compile import open_partial
from moec.cli.main import cli
from moec.compiler.bundle.plan_bundles import TRIAL, trial_folder
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.preflight.finished import plan_of
from moec.compiler.preflight.preparation import Prepared
from moec.compiler.stages.texts import CompileTexts, compile_texts
from moec.evaluation.data import item_key, load_splits
from moec.manifests.progress import Progress
from moec.runtime.bundle.opening import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, save_model, save_texts

pytestmark = [pytest.mark.gate("G12"), pytest.mark.usefixtures("one_thread")]
ITEMS = {"train": 60, "validation": 60, "test": 200}
EXAMPLE = Path(__file__).parents[2] / "examples"


class Watched:
    """An engine that records the texts that it scores."""

    def __init__(self, engine: Any, seen: set[str]) -> None:
        self._engine, self._seen = engine, seen

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress) -> Any:
        self._seen.update(prompt + answer for prompt, answer in pairs)
        return self._engine.answer_log_probs(pairs, progress)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """A bundle compiled to a loss of 5 % on plain text, its data, and every text that decides its plan."""
    root = tmp_path_factory.mktemp("promise")
    model, data = save_model(root / "tiny", layers=1, experts=3), save_texts(root / "texts", **ITEMS)
    seen: set[str] = set()

    def watching(prepared: Prepared) -> CompileTexts:
        texts, decode = compile_texts(prepared), load_tokenizer(model).decode
        scored = (prompt + answer for part in (texts.gradients, texts.answers) for prompt, answer in part.pairs)
        seen.update(decode(row) for row in (*texts.calibration.rows, *scored))
        return texts

    @contextmanager
    def opening(path: Path, memory_bytes: int) -> Iterator[Any]:
        with cast(AbstractContextManager[Any], open_partial(path, memory_bytes)) as engine:
            yield Watched(engine, seen) if path == trial_folder(root / "out", TRIAL) else engine

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moec.compiler.stages.measure.compile_texts", watching)
        compile_tiny(model, root / "out", "loss", 0.05, data=str(data), tasks=("perplexity",), open_runtime=opening)
    return root / "out", data, seen


def test_the_certificate_takes_all_test_items_and_nothing_saw_them(compiled: tuple[Path, Path, set[str]]) -> None:
    bundle, data, seen = compiled
    splits = load_splits(data, "perplexity")
    keys = {name: {item_key(splits.task, item) for item in getattr(splits, name).items} for name in ITEMS}
    assert {name: len(found) for name, found in keys.items()} == ITEMS
    assert not keys["test"] & (keys["train"] | keys["validation"]) and not keys["train"] & keys["validation"]
    assert seen == keys["train"] | keys["validation"], (
        "calibration and search see their splits, all of them, and no more"
    )
    task = check_bundle(bundle)["tasks"]["perplexity"]
    assert task["n"] == task["loss"]["n"] == ITEMS["test"]
    manifest = json.loads((bundle / "moec.json").read_bytes())
    assert manifest["calibration"]["items"] == ITEMS["train"]


def test_other_test_items_give_the_same_plan(compiled: tuple[Path, Path, set[str]], tmp_path: Path) -> None:
    """Held-out texts pass the unquantized layers before the search. They decide nothing."""
    bundle, data, _ = compiled
    other = Path(shutil.copytree(data, tmp_path / "other"))
    rows = [json.loads(line)["text"] for line in (other / "test.jsonl").read_text().splitlines()]
    (other / "test.jsonl").write_text("".join(json.dumps({"text": row + " again"}) + "\n" for row in rows))
    options: dict[str, Any] = {"data": str(other), "tasks": ("perplexity",), "plan_only": True}
    found = compile_tiny(bundle.parent / "tiny", tmp_path / "out", "loss", 0.05, **options)
    assert found.plan.digest == plan_of(open_bundle(bundle).manifest).digest


def test_the_verdict_follows_from_the_numbers(compiled: tuple[Path, Path, set[str]]) -> None:
    quality = check_bundle(compiled[0])
    task = quality["tasks"]["perplexity"]
    loss, verdict = task["loss"], task["verdict"]
    assert loss["loss"] == pytest.approx((task["value"] - task["baseline"]) / task["baseline"], rel=1e-12)
    low, high = loss["interval95"]
    assert low <= loss["lower95"] <= loss["loss"] <= loss["upper95"] <= high
    expected = "supported" if loss["upper95"] <= 0.05 else "met" if loss["loss"] <= 0.05 else None
    expected = expected or ("refuted" if loss["lower95"] > 0.05 else "missed")
    assert quality["verdict"] == verdict["status"] == expected
    assert expected == "supported", "the search leaves the certificate room"
    accepted = [trial for trial in quality["trials"] if trial["accepted"]]
    chosen = min(accepted, key=lambda trial: trial["expert_packed_bytes"])
    assert chosen["expert_packed_bytes"] == quality["sizes"]["expert_packed_bytes"]
    searched = chosen["losses"]["perplexity"]
    assert searched["n"] == ITEMS["validation"] and searched["loss"] + searched["standard_error"] <= 0.05


def test_moec_eval_repeats_the_certified_values(compiled: tuple[Path, Path, set[str]]) -> None:
    """The baseline is the checkpoint's own weights in the runtime, as a uniform bundle of 16 bits holds them."""
    bundle, data, _ = compiled
    task = check_bundle(bundle)["tasks"]["perplexity"]
    compile_tiny(bundle.parent / "tiny", bundle.parent / "own", "uniform", 16, dense_bits=16)
    found = {}
    for name, model in (("value", bundle), ("baseline", bundle.parent / "own"), ("torch", bundle.parent / "tiny")):
        arguments = ["eval", str(model), "--data", str(data), "--task", "perplexity", "--split", "test", "--json"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.stderr
        found[name] = json.loads(result.stdout)
    assert {name: found[name]["value"] for name in ("value", "baseline")} == {n: task[n] for n in ("value", "baseline")}
    assert found["torch"]["value"] == pytest.approx(task["baseline"], rel=1e-6), "the checkpoint in transformers"
    assert found["value"]["data_sha256"] == task["data_sha256"] == found["baseline"]["data_sha256"]
    assert found["value"]["n"] == ITEMS["test"]


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MOEC_SLOW") != "1", reason="four minutes: set MOEC_SLOW=1, or run `make demo`")
def test_the_example_keeps_two_percent_on_4000_problems(tmp_path: Path) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    output = tmp_path / "example-moec"
    arguments = ["compile", str(EXAMPLE / "model"), "--loss", "2%", "--data", str(EXAMPLE / "data")]
    result = CliRunner().invoke(cli, [*arguments, "--task", "gsm8k", "--no-comparisons", "-o", str(output)])
    assert result.exit_code == 0, result.stderr
    quality = check_bundle(output)
    task = quality["tasks"]["gsm8k"]
    assert (quality["verdict"], task["verdict"]["status"], task["n"]) == ("supported", "supported", 4000)
    assert task["loss"]["upper95"] <= 0.02

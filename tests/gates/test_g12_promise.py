"""G12: the loss promise. The certificate takes the whole test split, which no other stage uses. It can be repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.main import cli
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.stages.encode_texts import CompileTexts, encode_all_texts
from moec.evaluation.data import item_key, load_splits
from moec.evaluation.text_pairs import TokenPair, encode_pairs
from tests.gates.shipped_bundle import RENEW, SHIPPED, differences, is_machine_of_bundle
from tests.tiny_compile import check_bundle, compile_tiny, save_model, save_texts

pytestmark = [pytest.mark.gate("G12"), pytest.mark.usefixtures("one_thread")]
ITEMS = {"train": 60, "validation": 60, "test": 200}
EXAMPLE = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """A bundle compiled to a loss of 5 % on plain text, its data, and every text used before the certificate."""
    root = tmp_path_factory.mktemp("promise")
    model, data = save_model(root / "tiny", layers=1, experts=3), save_texts(root / "texts", **ITEMS)
    seen, text_of = set[str](), dict[tuple[int, ...], str]()
    is_certifying = False

    def encoding(tokenizer: Any, pairs: Sequence[tuple[str, str]], **options: Any) -> list[TokenPair]:
        encoded = encode_pairs(tokenizer, pairs, **options)
        text_of.update({(*p, *a): prompt + answer for (p, a), (prompt, answer) in zip(encoded, pairs, strict=True)})
        return encoded

    def choosing(prepared: Prepared) -> CompileTexts:
        """Texts of calibration, gradients and search. What is held out is kept for the certificate alone."""
        texts = encode_all_texts(prepared)
        for rows in (texts.calibration.rows, texts.gradients.texts.rows, texts.validation.texts.rows):
            seen.update(text_of[tuple(row)] for row in rows)
        return texts

    class Watched:
        """An engine that answers for the search."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Any) -> None:
            if not is_certifying:
                seen.update(prompt + answer for prompt, answer in pairs)
            self._engine.answer_log_probs(pairs, take)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    @contextmanager
    def opening(path: Path, memory_bytes: int) -> Iterator[Any]:
        nonlocal is_certifying
        is_certifying = is_certifying or path.name == "out.partial"
        with open_partial(path, memory_bytes) as engine:
            yield Watched(engine)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moec.compiler.stages.encode_texts.encode_pairs", encoding)
        patched.setattr("moec.compiler.stages.measure.encode_all_texts", choosing)
        values: dict[str, Any] = {"tasks": ("perplexity",), "open_runtime": opening}
        compile_tiny(model, root / "out", "loss", 0.05, data=str(data), **values)
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


def test_the_verdict_follows_from_the_numbers(compiled: tuple[Path, Path, set[str]]) -> None:
    quality = check_bundle(compiled[0])
    task = quality["tasks"]["perplexity"]
    loss, verdict = task["loss"], task["verdict"]
    assert loss["loss"] == pytest.approx((task["value"] - task["baseline"]) / task["baseline"], rel=1e-12)
    low, high = loss["interval95"]
    assert low <= loss["loss"] <= high and loss["lower95"] <= loss["loss"] <= loss["upper95"]
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
    bundle, data, _ = compiled
    task = check_bundle(bundle)["tasks"]["perplexity"]
    found = {}
    for name, model in (("value", bundle), ("baseline", bundle.parent / "tiny")):
        arguments = ["eval", str(model), "--data", str(data), "--task", "perplexity", "--split", "test", "--json"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.stderr
        found[name] = json.loads(result.stdout)
    assert found["value"]["value"] == task["value"]
    # The certificate's baseline is the runtime on 16-bit weights, this one is transformers.
    assert found["baseline"]["value"] == pytest.approx(task["baseline"], rel=1e-6)
    assert found["value"]["data_sha256"] == task["data_sha256"] == found["baseline"]["data_sha256"]
    assert found["value"]["n"] == ITEMS["test"]


@pytest.mark.slow
@pytest.mark.gate("G4")
@pytest.mark.skipif(os.environ.get("MOEC_SLOW") != "1", reason="four minutes: set MOEC_SLOW=1, or run `make demo`")
def test_the_example_keeps_two_percent_on_4000_problems_and_is_the_shipped_bundle(tmp_path: Path) -> None:
    """`differences` says what is compared with examples/bundle, here and on other processors.

    Another processor may find another plan. Its loss must be at most 2 %. That its bound is, too, is not promised:
    `docs/benchmarks.md` has a certificate that is met, and not supported.
    The shipped bundle comes from two threads, this one from one: the tests next to it leave one processor.
    """
    output = tmp_path / "example-moec"
    arguments = ["compile", str(EXAMPLE / "model"), "--loss", "2%", "--data", str(EXAMPLE / "data")]
    result = CliRunner().invoke(
        cli, [*arguments, "--task", "gsm8k", "--no-comparisons", "--threads", "1", "-o", str(output)]
    )
    assert result.exit_code == 0, result.stderr
    quality = check_bundle(output)
    task = quality["tasks"]["gsm8k"]
    status, is_supported = task["verdict"]["status"], task["loss"]["upper95"] <= 0.02
    assert (quality["verdict"], task["n"]) == (status, 4000) and task["loss"]["loss"] <= 0.02
    assert status == ("supported" if is_supported else "met")
    assert is_supported or not is_machine_of_bundle()
    assert differences(output) == [], RENEW


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.skipif(os.environ.get("MOEC_SLOW") != "1", reason="half a minute: set MOEC_SLOW=1")
def test_the_shipped_bundle_answers_4000_problems_as_certified_on_any_processor() -> None:
    """All instruction sets of the runtime give the same bits, so the score is exactly the one of `quality.json`."""
    data = EXAMPLE / "data" / "gsm8k" / "test.jsonl"
    arguments = ["eval", str(SHIPPED), "--data", str(data), "--task", "gsm8k", "--threads", "1", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    found, task = json.loads(result.stdout), check_bundle(SHIPPED)["tasks"]["gsm8k"]
    assert {name: found[name] for name in ("n", "value", "data_sha256")} == {
        "n": 4000, "value": task["value"], "data_sha256": task["data_sha256"],
    }  # fmt: skip

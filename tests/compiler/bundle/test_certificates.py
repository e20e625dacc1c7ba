"""Certificates: compared results, words of a verdict, and the bundles that a compile opens for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.terminal.report import verdict_line
from moec.compiler.bundle.certify import (
    DivergenceCertificate,
    TaskCertificate,
    certify_divergence,
    certify_task,
)
from moec.compiler.bundle.plan_bundles import TRIAL, UNQUANTIZED, PlanBundles, clear_trials, trial_folder
from moec.compiler.bundle.quality import overall_verdict
from moec.compiler.preflight.prepared import runtime_bytes
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import Talk
from moec.compiler.request.plan import plain_plan
from moec.compiler.request.ports import LocalEngine
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import uniform_like
from moec.compiler.stages.learning import SAMPLE_SHARE
from moec.compiler.walker.texts import AnswerTexts, TokenTexts
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.data import ItemSet
from moec.evaluation.engine import Generation, TextEngine, in_order
from moec.evaluation.statistics import (
    MIN_ITEMS,
    DistributionSummary,
    LossEstimate,
    judge,
    judge_divergence,
    log_softmax,
    summarise_divergence,
)
from moec.evaluation.tasks import find_task
from moec.evaluation.text_pairs import forced_rows
from moec.manifests.errors import MoecError, OptionError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.lowered import lowered
from tests.compiler.search.toy_search import estimate
from tests.tiny_compile import check_bundle, compile_tiny, little_memory, make_request, names, save_model
from tests.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS = Target("loss", 0.02)
ANSWERS_AT_ONCE, ROWS_AT_ONCE = 3, 4
TEXTS = tuple(f"text {n} is one of forty texts" for n in range(40))


def summary(mean: float, standard_error: float) -> DistributionSummary:
    return DistributionSummary(mean, standard_error, 0.0, 1.0, 2.0, 0.9, 500)


DIVERGENCE = summary(0.01, 0.001)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> TransformersOracle:
    return TransformersOracle(save_model(tmp_path_factory.mktemp("certify") / "tiny", layers=1, experts=2))


class Coarse:
    """The model with one scaled projection. It stands for a bundle with a loss."""

    def __init__(self, reference: TransformersOracle, scale: float) -> None:
        self._reference = reference
        key = UnitKey(0, 0, "down")
        self._weights: dict[Any, torch.Tensor] = {key: scale * reference.weight(key)}
        self.scored = 0

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Any) -> None:
        self.scored += len(pairs)
        with self._reference.weights(self._weights):
            self._reference.answer_log_probs(pairs, take)

    def forced_logits(self, pairs: Sequence[Any]) -> list[np.ndarray]:
        with self._reference.weights(self._weights):
            return self._reference.forced_logits(pairs)

    def force_answers(self, pairs: Sequence[Any], take: Any, progress: Any) -> None:
        """Compute a few answers at a time, whose rows come in turns, as from a pass with several sequences."""
        for first in range(0, len(pairs), ANSWERS_AT_ONCE):
            found = self.forced_logits(pairs[first : first + ANSWERS_AT_ONCE])
            for row in range(0, max(map(len, found)), ROWS_AT_ONCE):
                for at, logits in enumerate(found):
                    take(first + at, logits[row : row + ROWS_AT_ONCE])
            progress(first + len(found), len(pairs))


class Solving:
    """A model that answers numbered questions, rightly where `is_right`."""

    def __init__(self, is_right: Callable[[int], bool]) -> None:
        self._is_right = is_right

    def generate(self, requests: Sequence[Any], take: Any) -> None:
        for index, request in enumerate(requests):
            number = int(request.prompt.split("#")[1].split()[0])
            take(index, Generation(f"#### {number if self._is_right(number) else -1}", 1, 1))


def solving(is_right: Callable[[int], bool]) -> TextEngine:
    return cast(TextEngine, Solving(is_right))


def numbered(count: int) -> ItemSet:
    """Return numbered questions."""
    task = find_task("gsm8k")
    return ItemSet(task, "made", tuple({"question": f"#{n} ?", "answer": f"#### {n}"} for n in range(count)))


def set_looks(monkeypatch: pytest.MonkeyPatch, *looks: float) -> None:
    """Let a certificate look after these shares of the items, and at the end."""
    monkeypatch.setattr("moec.compiler.bundle.looks.LOOKS", (*looks, 1.0))
    monkeypatch.setattr("moec.compiler.bundle.looks.LEAST_ITEMS", 1)


def certify(
    reference: TransformersOracle,
    engine: Coarse,
    target: Target = LOSS,
    texts: Sequence[str] = TEXTS,
    is_early: bool = False,
) -> TaskCertificate:
    task = find_task("perplexity")
    items = ItemSet(task, "made", tuple({"text": text} for text in texts))
    return certify_task(items, (), reference, cast(TextEngine, engine), target, Talk(), DIVERGENCE, is_early=is_early)


def divergence_of(
    reference: TransformersOracle, engine: Coarse, held: list[int], talk: Talk | None = None
) -> DivergenceCertificate:
    """KL of an engine. held: gets the number of tokens of each call of the reference."""
    pairs = reference.encode_pairs([("", text) for text in TEXTS])
    rows, targets, counts = forced_rows(pairs, reference.model.eos_token_ids[:1])
    answers = AnswerTexts(TokenTexts(rows, []), counts, targets, pairs, [len(pairs)])
    log_p = np.concatenate([log_softmax(logits) for logits in reference.forced_logits(pairs)])

    def own(start: int, end: int) -> np.ndarray:
        held.append(end - start)
        return log_p[start:end].copy()

    vocabulary = reference.model.vocab_size
    return certify_divergence("one", answers, own, vocabulary, cast(LocalEngine, engine), talk or Talk())


def test_an_equal_engine_loses_nothing(reference: TransformersOracle) -> None:
    certificate = certify(reference, Coarse(reference, 1.0))
    assert certificate.loss is not None and certificate.loss.loss == 0.0
    found = divergence_of(reference, Coarse(reference, 1.0), [])
    assert found.items == 40 and (found.divergence.mean, found.divergence.agreement) == (0.0, 1.0)
    assert certificate.verdict is not None and certificate.verdict.status == "supported"
    plain = certificate.to_json()
    assert plain["n"] == 40 and plain["baseline"] == plain["value"]
    assert "seconds" not in plain and "tokens_per_s" not in plain


def test_a_worse_engine_is_measured_against_the_reference(reference: TransformersOracle) -> None:
    engine = Coarse(reference, 40.0)
    certificate = certify(reference, engine)
    assert certificate.loss is not None
    baseline, value = certificate.baseline.value, certificate.value.value
    assert certificate.loss.loss == pytest.approx((value - baseline) / baseline)
    assert certificate.divergence == DIVERGENCE, "that of the held-out answers"
    assert certificate.baseline.data_sha256 == certificate.value.data_sha256


def test_a_divergence_is_that_of_all_tokens(reference: TransformersOracle) -> None:
    engine, held = Coarse(reference, 40.0), list[int]()
    whole = divergence_of(reference, engine, held)
    pairs = reference.encode_pairs([("", text) for text in TEXTS])
    logits = reference.forced_logits(pairs)
    assert held == [sum(map(len, logits))], "all of them are held at once"
    expected = summarise_divergence(list(map(log_softmax, logits)), engine.forced_logits(pairs))
    assert whole.divergence == expected and expected.mean > 0.01 and expected.agreement < 1.0


@pytest.mark.parametrize("tokens", [1, 10, 100])
def test_a_certificate_holds_no_more_logits_of_the_checkpoint_than_allowed(
    tokens: int, reference: TransformersOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one answer has more. Each token is computed once, and every text is part of the progress."""
    engine, held, done = Coarse(reference, 40.0), list[int](), list[tuple[int, int]]()
    whole = divergence_of(reference, engine, [])
    assert min(len(text) for text in TEXTS) > 10, "longer than two of the limits, in tokens"
    monkeypatch.setattr("moec.compiler.bundle.certify.LOGITS_AT_ONCE", (tokens + 1) * reference.model.vocab_size - 1)
    talk = Talk(progress=lambda title: lambda some, every: done.append((some, every)))
    parts = divergence_of(reference, engine, held, talk)
    assert max(held) <= tokens and sum(held) == whole.divergence.n
    assert parts.divergence == whole.divergence
    assert done[-1] == (40, 40) and [some for some, _ in done] == sorted({some for some, _ in done})


def test_other_targets_have_no_verdict(reference: TransformersOracle) -> None:
    certificate = certify(reference, Coarse(reference, 2.0), Target("kl", 0.05))
    assert certificate.verdict is None and certificate.loss is not None
    assert certificate.to_json()["verdict"] is None


def test_a_baseline_of_zero_has_no_loss_and_refuses_a_loss_target() -> None:
    items, engine = numbered(2), solving(lambda number: False)
    certificate = certify_task(items, (), engine, engine, Target("kl", 0.05), Talk(), DIVERGENCE)
    assert certificate.baseline.value == 0.0 and certificate.loss is None
    assert certificate.to_json()["loss"] is None
    with pytest.raises(OptionError, match="baseline scores 0"):
        certify_task(items, (), engine, engine, LOSS, Talk(), DIVERGENCE)


def test_a_clear_case_is_decided_at_an_early_look(
    reference: TransformersOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is that of a sample, with wider bounds for several looks. An unclear case takes all items."""
    set_looks(monkeypatch, 1 / 3, 2 / 3)
    texts = [f"{n} and one text more, {n * n}" for n in range(120)]
    sampled = ItemSet(find_task("perplexity"), "made", tuple({"text": text} for text in texts)).limit(40)
    first = certify(reference, Coarse(reference, 1.0), texts=[item["text"] for item in sampled.items])
    equal = Coarse(reference, 1.0)
    early = certify(reference, equal, texts=texts, is_early=True)
    assert early.verdict is not None and early.verdict.status == "supported"
    assert early.value.n == 40 and equal.scored == 40
    assert (early.value.value, early.value.data_sha256) == (first.value.value, first.value.data_sha256)
    assert early.loss is not None and early.loss.bounds is not None
    assert early.loss.error == pytest.approx(0.05 / 27, rel=0.01)
    coarse = certify(reference, Coarse(reference, 3.0), texts=texts)
    assert coarse.loss is not None
    unclear = Target("loss", coarse.loss.loss)  # the loss itself: never supported, never refuted
    whole = certify(reference, Coarse(reference, 3.0), unclear, texts, is_early=True)
    assert whole.verdict is not None and whole.verdict.status in ("met", "missed")
    assert whole.value.n == 120 and whole.value.value == coarse.value.value
    assert whole.value.interval95 == coarse.value.interval95 and whole.value.data_sha256 == coarse.value.data_sha256
    assert whole.loss is not None and whole.loss.bounds is not None
    assert whole.loss.bounds[0] <= whole.loss.lower95 <= whole.loss.upper95 <= whole.loss.bounds[1]


def test_a_look_at_a_sorted_file_is_at_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle fails on all but the first third. A look at the first items of the file would support it."""
    set_looks(monkeypatch, 1 / 3, 2 / 3)
    items, solved, bundle = numbered(120), solving(lambda number: True), solving(lambda number: number < 40)
    target = Target("loss", 0.4)
    early = certify_task(items, (), solved, bundle, target, Talk(), DIVERGENCE, is_early=True)
    assert early.value.n < 120 and early.verdict is not None and early.verdict.status == "refuted"
    whole = certify_task(items, (), solved, bundle, Target("loss", 2 / 3), Talk(), DIVERGENCE, is_early=True)
    plain = certify_task(items, (), solved, bundle, Target("loss", 2 / 3), Talk(), DIVERGENCE)
    assert whole.value.n == 120 and whole.value.value == plain.value.value
    assert whole.value.data_sha256 == plain.value.data_sha256
    assert [row.prediction for row in whole.value.items] == [row.prediction for row in plain.value.items]


def test_a_first_look_at_unsolved_items_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    set_looks(monkeypatch, 1 / 8)
    items = numbered(8)
    first = items.order()[0]
    engine = solving(lambda number: number != first)
    found = certify_task(items, (), engine, engine, LOSS, Talk(), DIVERGENCE, is_early=True)
    assert found.value.n == 8 and found.loss is not None and found.loss.loss == 0


def certificate_of(loss: LossEstimate, base: TaskCertificate) -> TaskCertificate:
    return replace(base, loss=loss, verdict=judge(loss, LOSS.value))


VERDICTS = {
    "supported": (estimate(0.010, 0.002, 4000), "at most 2.00 %, at 95 % confidence"),
    "met": (estimate(0.015, 0.010, 4000), "its 95 % bound is not"),
    "missed": (estimate(0.025, 0.010, 4000), "is above 2.00 %"),
    "refuted": (estimate(0.050, 0.005, 4000), "above 2.00 %, at 95 % confidence"),
}


@pytest.mark.parametrize("status", sorted(VERDICTS))
def test_the_verdict_and_its_sentence(reference: TransformersOracle, status: str) -> None:
    loss, sentence = VERDICTS[status]
    certificate = certificate_of(loss, certify(reference, Coarse(reference, 1.0)))
    assert overall_verdict(LOSS, {"toy": certificate}) == status
    quality = {
        "verdict": status,
        "target": {"kind": "loss", "value": 0.02},
        "tasks": {"toy": certificate.to_json()},
    }
    line = verdict_line(quality)
    assert line.startswith(status) and sentence in line
    assert ("items would decide" in line) == (status in ("met", "missed"))
    assert ("these items support about" in line) == (status in ("met", "missed"))
    if status == "met":
        assert "support about 3.2%: moec compile ... --loss 3.2%" in line


def test_the_weakest_task_speaks_for_all(reference: TransformersOracle) -> None:
    base = certify(reference, Coarse(reference, 1.0))
    order = ("supported", "met", "missed", "refuted")
    for weaker in range(4):
        for stronger in range(weaker + 1):
            pair = {
                name: certificate_of(VERDICTS[order[which]][0], base)
                for name, which in (("a", stronger), ("b", weaker))
            }
            assert overall_verdict(LOSS, pair) == order[weaker]
    assert overall_verdict(Target("size", 10**9), {"toy": base}) == "measured"
    assert overall_verdict(Target("uniform", 4), {}) == "not measured"


@pytest.mark.parametrize(
    ("mean", "standard_error", "status"),
    [(0.03, 0.01, "supported"), (0.045, 0.01, "met"), (0.055, 0.01, "missed"), (0.08, 0.01, "refuted")],
)
def test_a_kl_target_gets_a_verdict_of_its_own(mean: float, standard_error: float, status: str) -> None:
    target, good = Target("kl", 0.05), DivergenceCertificate(summary(0.001, 0.0001), 100)
    found = DivergenceCertificate(summary(mean, standard_error), 100)
    assert judge_divergence(found.divergence, 0.05, 100) == status
    of_few = judge_divergence(found.divergence, 0.05, MIN_ITEMS - 1)
    assert of_few == {"supported": "met", "refuted": "missed"}.get(status, status)
    assert overall_verdict(target, {}, {"good": good, "found": found}) == status
    assert overall_verdict(target, {}, {}) == "not measured"
    told = {"items": 100, **found.divergence.to_json()}
    quality = {"verdict": status, "target": {"kind": "kl", "value": 0.05}, "tasks": {}, "held_out_kl": {"a": told}}
    assert verdict_line(quality).startswith(status) and "0.05" in verdict_line(quality)


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
    """One runtime is open at a time, with all that is left. The metric takes all items, and the KL the first."""
    monkeypatch.setattr("moec.compiler.stages.encode_texts.HELD_OUT_ITEMS", 5)
    recorded, room = Recorded(), runtime_bytes(lowered(model).model, MEMORY_BYTES)
    task = compiled(model, texts, tmp_path / "out", recorded)["tasks"]["perplexity"]
    alone, reference, bundle, self_test = recorded.opened
    assert alone == bundle == ("out.partial", room, 0)
    assert self_test == ("out.partial", room - room // SAMPLE_SHARE, 0)
    assert reference == (trial_folder(tmp_path / "out", UNQUANTIZED).name, room, 0)
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
    assert min(trial["kl"]["mean"] for trial in quality["trials"] if trial["purpose"] == "search") <= 0.05
    assert quality["tasks"] == {} and quality["held_out_kl"]["perplexity"]["mean"] > 0


@pytest.mark.parametrize("name", ["out.partial", "out.work-unquantized.partial"])
def test_a_certificate_that_fails_leaves_no_bundle(name: str, model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="it cannot be opened"):
        compiled(model, texts, tmp_path / "out", Recorded(name))
    assert names(tmp_path) == {"out.work"}


def bundles_of(model: Path, output: Path, **values: Any) -> PlanBundles:
    request = make_request(model, output, "bits_per_weight", 4.0, **values)
    journal = Journal(output.parent.with_name(f"{output.parent.name}.work"), "one", Disk())
    return PlanBundles(request, lowered(model), MEMORY_BYTES, open_partial, journal)


@pytest.mark.parametrize("plan_only", [False, True])
def test_a_plan_answers_from_a_temporary_bundle(plan_only: bool, model: Path, tmp_path: Path) -> None:
    """With the bits of a bundle that a compile publishes. A plan alone writes nothing near its output."""
    bundles = bundles_of(model, tmp_path / "out", plan_only=plan_only)
    plain = plain_plan(bundles.lowering.model, bundles.lowering.spec_16bit, "rtn")
    plan, pairs = uniform_like(plain, QuantSpec(4, 32), "rtn"), [("a pen", " and a lamp"), ("the box", " near a pen")]
    with bundles.opened(plan, UnitStore(bundles.lowering, "rtn")) as engine:
        scores = in_order(engine.answer_log_probs, pairs)
        assert names(tmp_path) == (set() if plan_only else {"out.work-trial.partial"})
    assert names(tmp_path) == set()
    compile_tiny(model, tmp_path / "flat", "uniform", 4, symmetric=False, group_sizes=(32,), dense_bits=16)
    with cast(AbstractContextManager[Any], open_partial(tmp_path / "flat")) as engine:
        assert in_order(engine.answer_log_probs, pairs) == scores


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
    trial_folder(output, TRIAL).mkdir()
    compile_tiny(model, output, "uniform", 4)
    assert names(tmp_path) == {"out"}

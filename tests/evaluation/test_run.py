"""Evaluation of an engine that is a table, from items to JSON, and paired comparison of two results."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from moec.evaluation.results import EvaluationResult
from moec.evaluation.run import answer_scores, compare, evaluate
from moec.evaluation.statistics import judge
from moec.evaluation.tasks import find_task
from moec.manifests.errors import ExecutionError, OptionError

GSM8K, SAMSUM, TEXT = (find_task(name) for name in ("gsm8k", "samsum", "perplexity"))


def _answers(items, wrong: int) -> dict[str, str]:
    """The reference for every item, another number for the first `wrong`."""
    return {
        GSM8K.prompt(item): (" #### -1" if at < wrong else GSM8K.answer(item) + "\n\nQuestion: 1?")
        for at, item in enumerate(items)
    }


def test_generation_task(problems, table_engine) -> None:
    items = problems(0, 10)
    engine = table_engine(_answers(items, 2))
    calls: list[tuple[int, int]] = []
    result = evaluate(GSM8K, items, engine, progress=lambda done, total: calls.append((done, total)))
    assert (result.task, result.metric, result.value, result.n) == ("gsm8k", "exact_match", 0.8, 10)
    low, high = result.interval95
    assert 0.4 <= low < 0.8 < high <= 1
    assert calls == [(done, 10) for done in range(1, 11)]
    assert result.items[2].prediction == result.items[2].reference == "#### 3"
    assert result.scores.tolist() == [0, 0] + [1] * 8
    assert result.tokens.sum() == 2 * 2 + 8 * 4
    assert result.tokens_per_s > 0
    assert all(math.isnan(nll) for nll in result.nll)


def test_requests_carry_prompt_draft_length_and_stop(problems, table_engine) -> None:
    items, engine = problems(0, 2), table_engine()
    evaluate(GSM8K, items, engine, shots=problems(7, 1), max_new_tokens=9)
    evaluate(GSM8K, items, engine, drafts=[None, "x"])
    first, _, third, fourth = engine.requests
    assert first.prompt == "Question: What is 7 + 1?\nAnswer: #### 8\n\nQuestion: What is 0 + 1?\nAnswer:"
    assert (first.draft, first.max_new_tokens, first.stop) == (" #### 1", 9, GSM8K.stop)
    assert (third.draft, fourth.draft, third.max_new_tokens) == (None, "x", GSM8K.max_new_tokens)


def test_summaries_report_the_other_metrics(table_engine) -> None:
    items = [{"dialogue": f"A: {i}?\nB: Yes.", "summary": f"B says yes to {i}."} for i in range(4)]
    engine = table_engine({SAMSUM.prompt(item): SAMSUM.answer(item) for item in items[1:]})
    result = evaluate(SAMSUM, items, engine)
    assert (result.metric, result.value) == ("rouge2", 0.75)
    assert result.other_metrics == {"rouge1": 0.75, "rougeL": 0.75}


def test_perplexity_pools_tokens(table_engine) -> None:
    items = [{"text": "aa"}, {"text": "b"}, {"text": "?"}]
    engine = table_engine(nll={"aa": (2.0, 1), "b": (6.0, 3), "?": (0.0, 0)})
    result = evaluate(TEXT, items, engine)
    assert engine.pairs[:2] == [("", "aa"), ("", "b")]
    assert result.metric == "perplexity"
    assert result.value == pytest.approx(math.exp(2))
    assert (result.nll.tolist(), result.tokens.tolist()) == ([2, 6, 0], [1, 3, 0])
    document = json.loads(json.dumps(result.to_json(per_item=True)))
    assert document["items"][2] == {"prediction": "", "reference": "?", "score": None, "tokens": 0, "nll": 0.0}
    with pytest.raises(OptionError, match="takes no solved examples"):
        evaluate(TEXT, items, engine, shots=items[:1])


def test_json_has_what_was_promised(problems, table_engine) -> None:
    items = problems(0, 3)
    result = evaluate(GSM8K, items, table_engine(_answers(items, 1)))
    short = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert list(short)[:7] == ["task", "metric", "value", "n", "interval95", "seconds", "tokens_per_s"]
    assert "items" not in short
    again = evaluate(GSM8K, items, table_engine(_answers(items, 1)))
    assert again.to_json(per_item=True, timing=False) == result.to_json(per_item=True, timing=False)
    assert "seconds" not in result.to_json(timing=False)
    full = json.loads(json.dumps(result.to_json(per_item=True), allow_nan=False))
    assert len(full["items"]) == 3
    assert EvaluationResult.from_json(full) == result


def test_json_round_trip_of_undefined_numbers(table_engine) -> None:
    items = [{"text": "a"}, {"text": "b"}]
    result = evaluate(TEXT, items, table_engine(nll={"a": (1.0, 2), "b": (0.0, 0)}))
    document = json.loads(json.dumps(result.to_json(per_item=True), allow_nan=False))
    rebuilt = EvaluationResult.from_json(document)
    assert math.isnan(rebuilt.items[1].score)
    assert (rebuilt.items[0], rebuilt.nll.tolist()) == (result.items[0], [1, 0])


def test_comparison_is_paired_and_judged(problems, table_engine) -> None:
    items = problems(0, 400)
    baseline = evaluate(GSM8K, items, table_engine(_answers(items, 40)))
    worse = evaluate(GSM8K, items, table_engine(_answers(items, 58)))
    estimate = compare(GSM8K, baseline, worse, resamples=2000)
    assert estimate.loss == pytest.approx(18 / 360)
    assert judge(estimate, 0.02).status == "refuted"
    assert judge(estimate, 0.10).status == "supported"
    same = compare(GSM8K, baseline, baseline, resamples=100)
    assert (same.loss, same.standard_error) == (0, 0)


def test_comparison_of_perplexities(table_engine) -> None:
    items = [{"text": f"text {i}"} for i in range(60)]
    base = {item["text"]: (20.0 + i % 7, 10) for i, item in enumerate(items)}
    worse = {text: (nll + 0.1, tokens) for text, (nll, tokens) in base.items()}
    estimate = compare(
        TEXT, evaluate(TEXT, items, table_engine(nll=base)), evaluate(TEXT, items, table_engine(nll=worse))
    )
    assert estimate.loss == pytest.approx(math.expm1(0.01))
    assert judge(estimate, 0.02).supported


def test_different_runs_do_not_compare(problems, table_engine) -> None:
    items = problems(0, 4)
    result = evaluate(GSM8K, items, table_engine(_answers(items, 0)))
    for other, name in (
        (evaluate(GSM8K, items[::-1], table_engine()), "data_sha256"),
        (evaluate(GSM8K, items, table_engine(), max_new_tokens=3), "data_sha256"),
        (evaluate(GSM8K, items, table_engine(), shots=problems(9, 1)), "shots"),
        (evaluate(GSM8K, items[:3], table_engine()), "n"),
        (dataclasses.replace(result, task="samsum"), "task"),
    ):
        with pytest.raises(OptionError, match=f"do not compare: `{name}`"):
            compare(GSM8K, result, other)


def test_baseline_of_zero(problems, table_engine) -> None:
    items = problems(0, 4)
    nothing = evaluate(GSM8K, items, table_engine())
    assert nothing.value == 0
    with pytest.raises(OptionError, match=r"baseline scores 0 on 4 items.*--kl"):
        compare(GSM8K, nothing, nothing)


def test_unusable_arguments(problems, table_engine) -> None:
    with pytest.raises(OptionError, match="no items to evaluate"):
        evaluate(GSM8K, [], table_engine())
    with pytest.raises(OptionError, match="at least 1, found 0"):
        evaluate(GSM8K, problems(0, 1), table_engine(), max_new_tokens=0)
    with pytest.raises(OptionError, match="2 drafts for 1 items"):
        evaluate(GSM8K, problems(0, 1), table_engine(), drafts=["a", "b"])


def test_engine_that_breaks_its_contract(problems, table_engine) -> None:
    class Short(table_engine):
        def generate(self, requests, take):
            pass

        def answer_log_probs(self, pairs, take):
            pass

    with pytest.raises(ExecutionError, match="gave 0 results for 2 items"):
        evaluate(GSM8K, problems(0, 2), Short())
    with pytest.raises(ExecutionError, match="gave 0 results for 1 items"):
        evaluate(TEXT, [{"text": "a"}], Short())
    for nll in (math.nan, math.inf):
        with pytest.raises(ExecutionError, match=f"item 1: the engine gave 1 tokens an NLL of {nll}"):
            evaluate(TEXT, [{"text": "a"}, {"text": "b"}], table_engine(nll={"b": (nll, 1)}))
    with pytest.raises(ExecutionError, match="scored no tokens"):
        evaluate(TEXT, [{"text": "a"}], table_engine(nll={"a": (0.0, 0)}))


def test_answer_scores_use_prompt_and_answer(problems, table_engine) -> None:
    items, engine = problems(0, 2), table_engine(nll={" #### 1": (3.0, 2)})
    scores = answer_scores(GSM8K, items, engine)
    assert engine.pairs[0] == ("Question: What is 0 + 1?\nAnswer:", " #### 1")
    assert [(score.nll, score.tokens) for score in scores] == [(3.0, 2), (1.0, 1)]

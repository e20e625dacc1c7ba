"""Requests of the harness are grouped by context, stand longest first, and ask for what the engine has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moec.evaluation.harness.engine import answer_settings, by_context, longest_first, shortened
from moec.evaluation.harness.run import plain, score_rows
from moec.manifests.errors import ContextOverflow, OptionError


def request(context: str, continuation: str = "", task: str | None = None) -> Any:
    return SimpleNamespace(args=(context, continuation), task_name=task)


def test_tasks_stand_together_and_the_longest_request_is_first() -> None:
    requests = [request("aa", "x", "one"), request("b" * 9, "x", "two"), request("a" * 5, "x", "one")]
    requests += [request("c", "", "two"), request("aa", "yyy", "one")]
    assert longest_first(requests) == [[1], [3], [2], [0, 4]]
    assert longest_first([]) == []


def test_equal_contexts_of_two_tasks_stay_apart() -> None:
    assert longest_first([request("a", "x", "one"), request("a", "x", "two")]) == [[0], [1]]


def test_continuations_are_grouped_by_their_context() -> None:
    groups = by_context([("p", [1, 2], [3]), ("q", [1], [4]), ("r", [1, 2], [5, 6])])
    assert [(list(group.context), group.continuations, names) for group, names in groups] == [
        ([1, 2], [[3], [5, 6]], ["p", "r"]),
        ([1], [[4]], ["q"]),
    ]


def test_a_context_loses_its_beginning() -> None:
    assert shortened([1, 2, 3], [4, 5], 4, has_encoder=False) == [1, 2, 3]
    assert shortened([1, 2, 3], [4, 5], 3, has_encoder=False) == [2, 3]
    assert shortened([1, 2, 3], [4, 5], 2, has_encoder=False) == [3]
    assert shortened([1, 2, 3], [4, 5], 2, has_encoder=True) == [2, 3]
    with pytest.raises(ContextOverflow, match="a continuation has 2 tokens, the context holds 1"):
        shortened([1, 2, 3], [4, 5], 1, has_encoder=False)


@pytest.mark.parametrize(
    ("kwargs", "sampling"),
    [
        ({"temperature": 0.0, "top_p": 0.9, "num_beams": 1}, {}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"temperature": "0.5", "top_k": -1, "top_p": 0.9}, {"temperature": 0.5, "seed": 3, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 1, "top_k": 5, "seed": 8}, {"temperature": 1.0, "seed": 8, "top_k": 5}),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.0}, {"repetition_penalty": 1.2}),
        ({"best_of": None, "skip_special_tokens": False}, {}),
    ],
)
def test_settings_of_answers(kwargs: dict[str, Any], sampling: dict[str, Any]) -> None:
    stop, found = answer_settings({"until": ["a", "", "b", "a"], "max_gen_toks": 8, **kwargs}, 3)
    assert (stop, found) == (("a", "b"), sampling)


@pytest.mark.parametrize("setting", [{"num_beams": 2}, {"length_penalty": 0.5}])
def test_a_setting_that_there_is_not_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(setting))):
        answer_settings({"until": [], **setting}, 0)


def test_results_are_plain_and_become_rows() -> None:
    found = plain({"results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": float("nan"), "f": len}}})
    found |= {"n-shot": {"t": 2}, "groups": {"g": {"acc,none": 1.0, "acc_stderr,none": "N/A"}}}
    assert found["results"]["t"]["acc_stderr,none"] is None and isinstance(found["results"]["t"]["f"], str)
    assert list(score_rows(found)) == [("t", "none", 2, "acc", 0.5, "-"), ("g", "none", "-", "acc", 1.0, "-")]

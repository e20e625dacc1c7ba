"""Tasks as TOML files: those of the project, and those of users."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moec.manifests.errors import InputError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_TOML_BYTES
from moec.manifests.files.strict_toml import load_strict_toml

from ..metrics import load
from .answer_metrics import EXACT_MATCH, PERPLEXITY, answer_metric
from .answer_text import COMPARISONS, TEXT, AnswerText
from .base import Item, Task, places
from .choices import choices_of, listed_item

SUFFIX = ".toml"
MAX_NEW_TOKENS = 1 << 16
DEFAULT_NEW_TOKENS = 256
_SHOWN_CHARACTERS = 200
ACCURACIES = ("accuracy", "accuracy_by_length")
_NAME = re.compile(r"\w[\w-]{0,63}")
KEYS: dict[str, tuple[type, str]] = {
    "prompt": (str, "text"),
    "answer": (str, "text"),
    "metric": (str, "text"),
    "compare": (str, "text"),
    "filter": (str, "text"),
    "separator": (str, "text"),
    "choices": (str, "text"),
    "document": (str, "text"),
    "stop": (list, "a list of texts"),
    "max_new_tokens": (int, "a whole number"),
    "thinking": (bool, "true or false"),
    "lower_is_better": (bool, "true or false"),
}
_SEE = "see docs/guides/use-your-data.md"


def read_task_file(path: Path, trusts_code: bool = False) -> Task:
    """Return the task of a TOML file. Its name is the file's.

    trusts_code: whether code of other metrics than the project's own may run.
    Raises InputError with file, key and remedy; OptionError for its metric.
    """
    try:
        data = read_input(path, MAX_TOML_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise InputError(f"`{path}` {error}", f"give a task file; {_SEE}") from error
    if not _NAME.fullmatch(path.stem):
        raise InputError(f"`{path}`: the file's name is the name of the task", "use letters, digits, `-` and `_`")
    return _task(path, _plain(path, data), hashlib.sha256(data).hexdigest(), trusts_code)


def own_task(name: str) -> Task:
    """Return a task of the project that is a file."""
    path = Path(__file__).with_name(name + SUFFIX)
    return _task(path, _plain(path, path.read_bytes()), "", False)


def _plain(path: Path, data: bytes) -> dict[str, Any]:
    """Parse and check the keys of a task file. Raises InputError."""
    try:
        plain = load_strict_toml(data)
    except ValueError as error:
        raise InputError(f"`{path}` is not TOML that can be read: {error}", "repair the file") from error
    for key, value in plain.items():
        if key not in KEYS:
            raise InputError(f"`{path}`: unknown key `{key[:80]}`", f"the keys are {', '.join(KEYS)}")
        kind, expected = KEYS[key]
        is_right = all(isinstance(text, str) for text in value) if isinstance(value, list) else type(value) is kind
        if not is_right or isinstance(value, list) is not (kind is list):
            raise _fault(path, key, expected, value)
    return plain


def _task(path: Path, plain: Mapping[str, Any], digest: str, trusts_code: bool) -> Task:
    prompt = plain.get("prompt", "")
    if not places(prompt):
        raise _fault(path, "prompt", "a text with a field in braces, such as `{question}`", prompt)
    if prompt.endswith(" ") and plain.get("separator", " ").startswith(" "):
        raise InputError(
            f"`{path}`: `prompt` ends with a space and `separator` begins with one, which models do not expect",
            "leave it out of `prompt`",
        )
    if plain.get("document", None) not in (None, *places(prompt)):
        raise _fault(path, "document", "a field of the prompt", plain["document"])
    length = plain.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if not 1 <= length <= MAX_NEW_TOKENS:
        raise _fault(path, "max_new_tokens", f"1 to {MAX_NEW_TOKENS}", length)
    common: dict[str, Any] = {
        "name": path.stem,
        "template": prompt,
        "answer_field": plain.get("answer"),
        "stop": tuple(plain.get("stop", ())),
        "separator": plain.get("separator", " "),
        "document_field": plain.get("document"),
        "thinking": plain.get("thinking"),
        "settings": {"task_file_sha256": digest} if digest else {},
    }
    metric = plain.get("metric", EXACT_MATCH if "answer" in plain else PERPLEXITY)
    if common["thinking"] and ("choices" in plain or metric == PERPLEXITY):
        raise _fault(path, "thinking", "false where no answer is generated", True)
    if "choices" in plain:
        return _choice_task(path, plain, common, metric)
    if metric == PERPLEXITY:
        _refuse_keys(path, plain, "perplexity", "compare", "filter", "stop", "max_new_tokens", "lower_is_better")
        return Task(**common, metrics=(metric,), score=None, higher_is_better=False, score_range=None, max_new_tokens=0)
    if "answer" not in plain:
        raise InputError(f"`{path}`: the key `answer` is missing", "name the field of the answer")
    text = AnswerText(_pattern(path, plain), plain.get("compare", TEXT))
    if text.compare not in COMPARISONS:
        raise _fault(path, "compare", " or ".join(COMPARISONS), text.compare)
    scoring = answer_metric(metric, text, lower_is_better=plain.get("lower_is_better", False), trusts_code=trusts_code)
    return Task(**common, **scoring, max_new_tokens=length, answer_text=text)


def _choice_task(path: Path, plain: Mapping[str, Any], common: dict[str, Any], metric: str) -> Task:
    """Return a task whose items list their answers."""
    _refuse_keys(path, plain, "choices", "compare", "filter", "stop", "max_new_tokens", "lower_is_better", "document")
    metric = plain.get("metric", ACCURACIES[0])
    if metric not in ACCURACIES:
        raise _fault(path, "metric", f"{' or '.join(ACCURACIES)} with `choices`", metric)
    if "answer" not in plain:
        raise InputError(f"`{path}`: the key `answer` is missing", "name the field of the right answer")
    prompt, options, answer = common["template"], plain["choices"], plain["answer"]
    separator = common["separator"]

    def read(row: Mapping[str, object]) -> Item:
        return listed_item(row, prompt, options, answer, separator)

    return Task(
        **{**common, "template": "{question}", "answer_field": "answer"},
        metrics=(metric, *(name for name in ACCURACIES if name != metric)),
        score=None,
        higher_is_better=True,
        score_range=1.0,
        max_new_tokens=0,
        choices=choices_of,
        read=read,
        raw_fields=tuple(dict.fromkeys((*places(prompt), options, answer))),
    )


def _pattern(path: Path, plain: Mapping[str, Any]) -> Any:
    """Return the compiled `filter`, or None. RE2 searches in time proportional to the length of an answer.

    Raises InputError, and MissingDependency without `re2`.
    """
    if "filter" not in plain:
        return None
    re2 = load("re2", "the key `filter` of a task file")
    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(plain["filter"], options)
    except re2.error as error:
        reason = error.args[0]
        reason_text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise InputError(
            f"`{path}`: `filter` is no regular expression that RE2 takes: {reason_text[:_SHOWN_CHARACTERS]}",
            "repair it; RE2 has neither lookaround nor backreferences",
        ) from error
    if pattern.groups > 1:
        raise _fault(path, "filter", "at most one group", plain["filter"])
    return pattern


def _refuse_keys(path: Path, plain: Mapping[str, Any], reason: str, *keys: str) -> None:
    for key in keys:
        if key in plain:
            raise InputError(f"`{path}`: `{key}` has no effect with {reason}", "leave it out")


def _fault(path: Path, key: str, expected: str, value: object) -> InputError:
    shown = json.dumps(value, default=str, ensure_ascii=False)[:80]
    return InputError(f"`{path}`: `{key}` must be {expected}, found {shown}", f"repair the key; {_SEE}")

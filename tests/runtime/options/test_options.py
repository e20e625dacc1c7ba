"""Options of a run: defined once by the fields of RuntimeOptions, typed, checked, and sizes and shares as text."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import numpy as np
import pytest

from moec.cli.commands.running.run import run_command
from moec.cli.options.runtime_options import TUNED
from moec.manifests.errors import InputError, OptionError
from moec.runtime import load
from moec.runtime.options.runtime import MAX_THREADS, RuntimeOptions, RuntimeSettings, parse_cache
from moec.runtime.options.setting import settings_of
from moec.runtime.text.sampling import SamplingOptions
from moec.runtime.text.tokenizer import checked_ids


def test_shares_of_the_experts() -> None:
    assert parse_cache("50%", 1001) == 500 and parse_cache(" 100% ", 1001) == 1001 and parse_cache("0.5%", 1000) == 5
    assert parse_cache("1KiB", 5) == 1024
    for text in ("0%", "101%", "-5%", "%", "x%", "1e1%", "nan%", "50 %%", "\u0665%%"):
        with pytest.raises(OptionError, match="is not a share of the experts"):
            parse_cache(text, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "unknown policy `fifo`"),
        ({"slots": 0}, "slots must be 1 or more"),
        ({"threads": MAX_THREADS + 1}, f"threads must be 0 to {MAX_THREADS}"),
        ({"memory": 2 << 30}, "`memory` must be a text or None, found 2147483648"),
        ({"slots": 1.5}, "`slots` must be a whole number, found 1.5"),
        ({"verify": "no"}, "`verify` must be True or False, found 'no'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RuntimeOptions(**options)


class Strange:
    """Has no representation."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("name", [field.name for field in fields(RuntimeOptions)])
def test_every_option_has_a_type(name: str) -> None:
    default = getattr(RuntimeOptions(), name)
    for value in (True, 1, 1.5, float("nan"), "text", b"text", [], {}, Strange(), DEEP, np.int64(1), 10**5000):
        if type(value) is type(default) or (default is None and isinstance(value, str)):
            continue
        with pytest.raises(OptionError, match=f"`{name}` must be") as caught:
            RuntimeOptions(**{name: value})
        assert len(caught.value.message) < 150


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingOptions)])
def test_every_option_of_sampling_has_a_type(name: str) -> None:
    for value in (True, "1", None, [], np.float32(1)):
        with pytest.raises(OptionError, match=f"`{name}` must be"):
            SamplingOptions(**{name: value})
    assert SamplingOptions(temperature=1) == SamplingOptions(temperature=1.0), "a whole number is a number"


@pytest.mark.parametrize(
    "tokens",
    [[float("nan")], ["a"], [1.5], [True], [None], [[1]], [b"a"], 5, None, [np.float32(1)], [1, 2, "3"]],
)
def test_token_ids_that_are_none(tokens: Any) -> None:
    with pytest.raises(InputError) as caught:
        checked_ids(tokens)
    assert "\n" not in caught.value.message


def test_token_ids() -> None:
    assert checked_ids((1, np.int64(2), np.uint16(3))) == [1, 2, 3]
    assert checked_ids(np.array([4, 5], np.int32)) == [4, 5]  # type: ignore[arg-type]


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="colour"):
        load("nowhere", colour="red")


SETTINGS = settings_of(RuntimeOptions)
OPTIONS = [name for name, (_, shown) in SETTINGS.items() if shown.place == "option"]


def option(name: str) -> click.Option:
    (found,) = [param for param in run_command.params if isinstance(param, click.Option) and param.name == name]
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_line_shows_the_text_and_the_default(name: str) -> None:
    default, shown = SETTINGS[name]
    found = option(name)
    assert (found.help or "").startswith(shown.text)
    if default is not None:
        assert found.get_default(click.Context(run_command)) == default
    assert tuple(getattr(found.type, "choices", ())) == shown.choices


def test_the_docstring_holds_every_field_with_its_choices() -> None:
    text = " ".join((RuntimeOptions.__doc__ or "").split())
    for name, (_, shown) in SETTINGS.items():
        assert f"{name}: {shown.text}" in text
        for choice in shown.choices:
            assert f"`{choice}`" in text


def test_choices_are_those_of_the_types() -> None:
    hints = get_type_hints(RuntimeOptions)
    for name, (_, shown) in SETTINGS.items():
        literal = get_args(hints[name]) if shown.choices else ()
        assert literal == shown.choices, name


def outside(name: str) -> list[Any]:
    shown = SETTINGS[name][1]
    if shown.choices:
        return ["nothing"]
    if shown.bounds is None:
        return []
    least, most = shown.bounds
    return [least - 1] if most is None else [least - 1, most + 1]


@pytest.mark.parametrize(
    ("name", "value"), [(each.name, value) for each in fields(RuntimeOptions) for value in outside(each.name)]
)
def test_what_is_outside_is_refused_by_name(name: str, value: Any) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(OptionError) as caught:
        RuntimeOptions(**values)
    assert (SETTINGS[name][1].noun or name.replace("_", " ")) in str(caught.value) and str(value) in str(caught.value)


def test_tuned_options_change_no_result() -> None:
    assert TUNED == ("prefetch", "threads", "readers", "prefetch_layers", "prefetch_experts", "prefetch_rule")


ROOT = Path(__file__).parents[3]
# `load` and what its signature names; mypy reads nothing else, so that it ends soon.
CHECKED = ("moec.runtime", "moec.runtime.engine.engine", "moec.runtime.options.runtime", "moec.runtime.options.lossy")
CALLS = """
from moec.runtime import load

load("x", memory="2GiB", threads=2, policy="lru", verify=False, kv="float16", lossy="expert-activations bfloat16")
load("x", memory=2 << 30)
load("x", memory=None)
load("x", memry="2GiB")
load("x", memory=1.5)
load("x", policy="fifo")
load("x", threads="2")
load("x").generate("", samplng=None)
"""


def test_keywords_are_the_fields() -> None:
    assert list(RuntimeSettings.__annotations__) == [field.name for field in fields(RuntimeOptions)]
    expected = {name: get_type_hints(RuntimeOptions)[name] for name in RuntimeSettings.__annotations__}
    assert get_type_hints(RuntimeSettings) == {**expected, "memory": str | int | None}


@pytest.mark.slow
@pytest.mark.in_ci
def test_a_type_checker_finds_wrong_options(tmp_path: Path) -> None:
    (tmp_path / "moec").mkdir()
    for package in ("manifests", "profiles", "runtime"):
        (tmp_path / "moec" / package).symlink_to(ROOT / package)
    (tmp_path / "calls.py").write_text(CALLS)
    modules = [word for name in (*CHECKED, "calls") for word in ("-m", name)]
    options = ["--python-version", "3.10", "--follow-imports", "skip", "--namespace-packages", "--no-site-packages"]
    command = [sys.executable, "-m", "mypy", *options, "--explicit-package-bases", *modules]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    faults = re.findall(r"^calls\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    lines = [CALLS.splitlines()[int(number) - 1] for number, _ in faults]
    assert lines == CALLS.splitlines()[6:], done.stdout + done.stderr
    assert 'did you mean "memory"' in faults[0][1]

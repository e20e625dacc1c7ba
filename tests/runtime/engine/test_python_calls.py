"""Calls of the Python interface: errors that name keywords, conversations, and what an engine shows of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import BundleIncomplete, InputError, MemoryBudgetExceeded, MoecError, OptionError
from moec.runtime import Engine, load
from tests.listed_file import add_listed

TEMPLATE = b"{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
LARGE_PROCESS = """
import sys
from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime import load
data = bytearray(b"1") * (150 << 20)
try:
    load(sys.argv[1], memory="96MiB")
except MemoryBudgetExceeded as error:
    print(error.message)
with load(sys.argv[1], memory="256MiB") as engine:
    print(engine.memory.floor_bytes > 150 << 20, len(list(engine.generate("hi", 2))))
"""


@pytest.fixture(scope="module")
def chat_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("chat") / "chat-moec"))
    add_listed(copy, "chat_template.jinja", TEMPLATE)
    return copy


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"memory": "5MiB"}, '`memory="5MiB"` is under the floor of ', 'memory="'),
        ({"memory": 5 << 20}, '`memory="5242880"` is under the floor of ', "or a shorter `context=`"),
        ({"memory": "5MiB", "slots": 2}, '`memory="5MiB"` is under the floor of ', "or fewer `slots=`"),
        ({"expert_cache": "1KiB"}, '`expert_cache="1KiB"` is under the floor of ', 'expert_cache="'),
        ({"context": 10**6}, "`context=1000000` is longer than", "ask for less"),
        ({"policy_weights": "1,0,0,0"}, "weights have no effect", 'add `policy="hobbit"`'),
        ({"reader_cpus": "0"}, "`reader_cpus` has no effect", 'add `prefetch_rule="until-routed"`'),
        ({"lossy": "auto"}, "has no loss target", "write one: `auto 1%`"),
        ({"lossy": "slow"}, "`slow` is not a mode", "or a setting like"),
        ({"lossy": "auto 1% + big-little gamma=0.7"}, "without other modes", 'lossy="dynamic-precision 0.6,0.9 + '),
        ({"lossy": "dynamic-precision 2,3"}, "`dynamic-precision`: `2` is not a number", "like `0.6,0.9`"),
        ({"lossy": "auto", "memory": "5 apples"}, "`5 apples` is not a size", ""),
        ({"memry": "5MiB"}, "unknown option", "help(moec.runtime.RuntimeOptions)"),
        ({"threads": "2"}, "the option `threads` must be a whole number", "RuntimeOptions"),
    ],
)
def test_errors_name_keywords(tiny_bundle: Path, options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(MoecError) as caught:
        load(tiny_bundle, **options)
    error = caught.value
    assert message in error.message and hint in (error.hint or "") and "--" not in str(error)
    assert error.args == (error.message,)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    for path in ("/nope", tmp_path / "missing"):
        with pytest.raises(
            BundleIncomplete, match=f"`{path}` does not exist, expected the folder of a bundle"
        ) as caught:
            load(path)
        assert caught.value.hint == "check the path"
    with pytest.raises(BundleIncomplete, match=r"has no `moec\.json`"):
        load(tmp_path)


def test_the_error_says_what_the_process_holds(tiny_bundle: Path) -> None:
    command = [sys.executable, "-c", LARGE_PROCESS, str(tiny_bundle)]
    told, opened = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told.startswith('`memory="96MiB"` is under the floor of ') and opened == "True 2"
    _, _, share = told.partition("this process already holds ")
    assert 150 <= int(share.partition("MiB")[0]) < 256
    with pytest.raises(MemoryBudgetExceeded):
        load(tiny_bundle, memory="5MiB")


def test_a_conversation_follows_the_template(chat_bundle: Path) -> None:
    with load(chat_bundle, context=128) as engine:
        prompt = engine.encode("<system>be brief\n<user>hi\n<assistant>", adds_special_tokens=False)
        expected = [step.token_id for step in engine.generate(prompt, 4)]
        assert [step.token_id for step in engine.chat(MESSAGES, 4)] == expected
        turn = [*MESSAGES, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]
        first = next(engine.chat(turn, 4))
        text = "<system>be brief\n<user>hi\n<assistant>ho\n<user>and?\n<assistant>"
        assert first.position == len(engine.encode(text, adds_special_tokens=False))


def test_conversations_that_are_refused(chat_bundle: Path, tiny_bundle: Path) -> None:
    with load(chat_bundle) as engine:
        wrong: list[Any] = [
            "hi",
            ["hi"],
            [{"role": "user"}],
            [{"role": "user", "content": 5}],
            [{"content": "hi"}],
            [5],
        ]
        for messages in wrong:
            with pytest.raises(InputError, match="`messages` must be a list of dicts"):
                engine.chat(messages)
    with load(tiny_bundle) as engine, pytest.raises(OptionError, match="has no chat template") as caught:
        engine.chat(MESSAGES)
    assert "generate" in (caught.value.hint or "") and "--" not in str(caught.value)


def test_an_engine_shows_its_options(tiny_bundle: Path) -> None:
    with load(tiny_bundle, threads=1, context=64) as engine:
        assert repr(engine) == f"<Engine of '{tiny_bundle}', context=64, threads=1>"
    assert isinstance(engine, Engine) and repr(engine).startswith("<Engine of"), "after close, too"

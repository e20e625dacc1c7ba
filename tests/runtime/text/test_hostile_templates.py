"""Chat templates that ask for time or memory without end, and files that are no templates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import ManifestInvalid
from moec.runtime.text import limited_child, template_process
from moec.runtime.text.template_process import CONFIG_NAME, TEMPLATE_NAME, ChatRenderer, folder_files, render_chat
from moec.runtime.text.template_rendering import Source
from tests.interrupts import hear_interrupts
from tests.runtime.limited_child import ROOT, outcomes, report

MESSAGES = [{"role": "user", "content": "hello"}]
MEMORY = "bytes of memory"
TIME = "of processor time"
DAMAGED = "is damaged"
ENDLESS = "has no end"


def nested_macros(count: int) -> str:
    """Return a template whose text is 2**count letters long."""
    rows = [
        f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, count + 1)
    ]
    return "{% macro m0() %}x{% endmacro %}" + "".join(rows) + f"{{{{ m{count}() }}}}"


def doubling(operator: str, start: str) -> str:
    """Return a template that joins a value with itself 15 times."""
    loop = f"{{% for i in range(15) %}}{{% set ns.a = ns.a {operator} ns.a %}}{{% endfor %}}"
    return f"{{% set ns = namespace(a={start}) %}}{loop}"


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LONG_TEXT = "{% for i in range(99999) %}{{ 'a'*100000 }}{% endfor %}"
TEMPLATES = {
    "loops": (LOOPS, TIME),
    "macros": (nested_macros(40), TIME),
    "power": ("{{ 10 ** (10**9) }}", TIME),
    "lipsum": ("{{ lipsum(n=100000000) }}", TIME),
    "doubled by ~": (doubling("~", "'a'*1000000"), MEMORY),
    "doubled by +": (doubling("+", "'a'*1000000"), MEMORY),
    "doubled list": (doubling("+", "[1]*100000"), MEMORY),
    "set block": (f"{{% set x %}}{LONG_TEXT}{{% endset %}}", MEMORY),
    "filter block": (f"{{% filter upper %}}{LONG_TEXT}{{% endfilter %}}", MEMORY),
    "call block": (
        f"{{% macro c() %}}{{{{ caller() }}}}{{% endmacro %}}{{% call c() %}}{LONG_TEXT}{{% endcall %}}",
        MEMORY,
    ),
    "long text": (LONG_TEXT, "too long a text"),
    "percent": ("{{ '%2000000000d' % 1 }}", MEMORY),
    "percent star": ("{{ '%*d' % (2000000000, 1) }}", MEMORY),
    "format filter": ("{{ '%2000000000d'|format(1) }}", MEMORY),
    "format": ("{{ '{:2000000000}'.format(1) }}", MEMORY),
    "center": ("{{ 'a'|center(2000000000) }}", MEMORY),
    "ljust": ("{{ 'a'.ljust(2000000000) }}", MEMORY),
    "zfill": ("{{ 'a'.zfill(2000000000) }}", MEMORY),
    "expandtabs": ("{{ ('\t'*1000).expandtabs(2000000) }}", MEMORY),
    "join": ("{{ range(99999)|join('b'*100000) }}", MEMORY),
    "indent": ("{{ ('a\n'*100000)|indent(100000) }}", MEMORY),
    "wordwrap": ("{{ ('a'*9999)|wordwrap(1,true,'x'*1000000) }}", MEMORY),
    "tojson indent": ("{{ [1]|tojson(indent=2000000000) }}", MEMORY),
    "tojson separators": ("{{ range(99999)|list|tojson(separators=('x'*100000,':')) }}", MEMORY),
    "batch": ("{{ [1]|batch(1000000000,'x')|list }}", MEMORY),
    "slice": ("{{ [1]|slice(1000000000)|list }}", f"({MEMORY}|{TIME})"),
    "translate": ("{{ 'a'" + ".translate({97:'a'*1000})" * 4 + " }}", MEMORY),
    "21 loops": ("{% for i in [1] %}" * 21 + "{% endfor %}" * 21, DAMAGED),
    "200 conditions": ("{% if 1 %}" * 200 + "{% endif %}" * 200, DAMAGED),
    "break": ("{% break %}", DAMAGED),
    "argument twice": ("{{ namespace(a=1, a=2) }}", DAMAGED),
    "parameter twice": ("{% macro m(a, a) %}{% endmacro %}", DAMAGED),
    "infinity": ("{{ 'inf'|float|int }}", DAMAGED),
    "cycler": ("{{ cycler() }}", DAMAGED),
    "brackets": ("{{ " + "(" * 100_000, ENDLESS),
    "lists": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", ENDLESS),
    "minus signs": ("{{ " + "-" * 100_000 + "1 }}", ENDLESS),
    "attributes": ("{{ " + "a." * 20_000 + "b }}", ENDLESS),
}
CONFIGS = {
    "name is a list": ('{"chat_template": [{"name": [], "template": "x"}]}', "OptionError", "has no chat template"),
    "template is a number": ('{"chat_template": [{"name": "default", "template": 1}]}', "OptionError", "has no chat"),
    "no object": ("[1, 2]", "OptionError", "has no chat template"),
    "100,000 brackets": ("[" * 100_000, "ManifestInvalid", "is not JSON"),
    "half": ("{", "ManifestInvalid", "is not JSON"),
    "no text": ("\udcff", "ManifestInvalid", "is not JSON"),
    "long number": ('{"a": ' + "9" * 5000 + "}", "ManifestInvalid", "is not JSON"),
    "many lists": ("[" + "[]," * 1_300_000 + "[]]", "ManifestInvalid", MEMORY),
    "large": (" " * (5 << 20), "ManifestInvalid", "more than the limit of 4194304"),
    "token is a list": ('{"chat_template": "{{ bos_token }}", "bos_token": []}', "", "'[]'"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Return the outcome of every case, from one process with limits."""
    return outcomes("tests.runtime.text.test_hostile_templates", 2 << 30, 10)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the cases that `found` runs."""
    template_process.MAX_TEMPLATE_CPU_S = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, (template, _) in TEMPLATES.items():
            (folder / TEMPLATE_NAME).write_text(template)
            yield case, lambda: render_chat(folder, MESSAGES)
        (folder / TEMPLATE_NAME).unlink()
        for case, (config, _, _) in CONFIGS.items():
            (folder / CONFIG_NAME).write_bytes(config.encode("utf-8", errors="surrogateescape"))
            yield case, lambda: render_chat(folder, MESSAGES)


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_without_end(case: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[case]["error"] == "ManifestInvalid", found
    assert any(part in found[case]["message"] for part in TEMPLATES[case][1].strip("()").split("|"))


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_are_none(case: str, found: dict[str, dict[str, Any]]) -> None:
    _, error, message = CONFIGS[case]
    assert found[case].get("error", "") == error
    assert message in found[case].get("message", found[case].get("value"))


def test_nothing_else_was_said(found: dict[str, dict[str, Any]]) -> None:
    assert found["process"] == {"status": 0, "stderr": ""}


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TEMPLATE_NAME)
    with pytest.raises(ManifestInvalid, match="is a pipe"):
        render_chat(tmp_path, MESSAGES)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed(number: int, tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_NAME).write_text(LOOPS)
    with ChatRenderer() as renderer:
        threading.Timer(0.3, renderer.process.send_signal, [number]).start()
        with pytest.raises(ManifestInvalid, match=f"with {signal.Signals(number).name}|{TIME}"):
            renderer.render(folder_files(tmp_path), MESSAGES)
    assert renderer.process.returncode is not None


def test_one_process_renders_many_texts_and_each_has_its_own_limits(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_NAME).write_text(
        "{% if messages[0].content == 'long' %}{% for i in range(99999) %}{{ 'a'*100000 }}{% endfor %}{% endif %}"
        "{% if messages[0].content == 'large' %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}"
    )
    files = folder_files(tmp_path)
    with ChatRenderer() as renderer:
        for text in ("a", "long", "b\n", "large", "c" * 300_000, "é"):
            asked = [{"role": "user", "content": text}]
            if text in ("long", "large"):
                with pytest.raises(ManifestInvalid, match=f"too long a text|{MEMORY}"):
                    renderer.render(files, asked)
            else:
                assert renderer.render(files, asked) == text


def test_processor_time_is_limited_for_each_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that together take longer than the limit are rendered; a single one is not."""
    monkeypatch.setattr(template_process, "MAX_TEMPLATE_CPU_S", 1)
    inner = "{% for i in range(messages[0].content | int) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    (tmp_path / TEMPLATE_NAME).write_text(inner)
    files = folder_files(tmp_path)
    with ChatRenderer() as renderer:
        started = time.monotonic()
        while time.monotonic() - started < 2:
            assert renderer.render(files, [{"role": "user", "content": "2000"}]) == ""
        with pytest.raises(ManifestInvalid, match=TIME):
            renderer.render(files, [{"role": "user", "content": "99999"}])
        with pytest.raises(ManifestInvalid):  # the process has ended
            renderer.render(files, [{"role": "user", "content": "1"}])


def test_a_renderer_that_is_not_asked_ends() -> None:
    with ChatRenderer() as renderer:
        pass
    assert renderer.process.returncode is not None


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_NAME).write_text(LOOPS)
    code = (
        "import sys; from pathlib import Path; from moec.runtime.text import template_process\n"
        "template_process.MAX_TEMPLATE_CPU_S = 20\n"
        "with template_process.ChatRenderer() as renderer:\n"
        "    print(renderer.process.pid, flush=True)\n"
        "    renderer.render(template_process.folder_files(Path(sys.argv[1])), [])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=hear_interrupts,  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait() != 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


NAMES = st.sampled_from(
    ["messages", "m", "loop", "bos_token", "x", "namespace", "cycler", "joiner", "dict", "''", "[]"]
)
FILTERS = [
    "trim", "length", "first", "last", "int", "float", "list", "tojson", "join", "sort", "sum", "attr", "map",
]  # fmt: skip
VALUES = st.recursive(
    NAMES | st.sampled_from(["1", "0", "-1", "'a'", "none", "true", "{}", "1.5", "1e999"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "%", "~", "==", "<", "in", "and"]), inner).map(" ".join),
        st.tuples(inner, st.sampled_from(["role", "content", "__class__", "keys", "items", "format", "first"])).map(
            ".".join
        ),
        st.tuples(
            inner,
            st.sampled_from(FILTERS),
        ).map("|".join),
        inner.map(lambda value: f"({value})[0]"),
        inner.map(lambda value: f"({value})()"),
    ),
    max_leaves=4,
)
BLOCKS = st.recursive(
    VALUES.map(lambda value: f"{{{{ {value} }}}}")
    | st.sampled_from(["{% break %}", "{%- x", "a", "}}", "{#", "{% endif %}"]),
    lambda inner: st.one_of(
        st.tuples(VALUES, inner).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% endif %}}"),
        st.tuples(VALUES, inner).map(lambda p: f"{{% for m in {p[0]} %}}{p[1]}{{% endfor %}}"),
        st.tuples(VALUES, inner).map(lambda p: f"{{% set x = {p[0]} %}}{p[1]}"),
        inner.map(lambda text: f"{{% macro x(a) %}}{text}{{% endmacro %}}{{{{ x(1) }}}}"),
        st.lists(inner, max_size=3).map("".join),
    ),
    max_leaves=5,
)


@given(BLOCKS)
def test_any_template_has_one_of_the_outcomes(template: str) -> None:
    word, text = Source("chat", b"{}", template.encode()).render({"messages": MESSAGES}, 10_000)
    assert word in {"text", "damaged", "refused", "endless", "long"}
    assert word in {"text", "endless", "long"} or text


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: (
            st.lists(x)
            | st.dictionaries(st.sampled_from(["name", "template", "chat_template", "bos_token", "content"]), x)
        ),
        max_leaves=8,
    )
)
def test_any_settings_have_one_of_the_outcomes(settings_: object) -> None:
    word, _ = Source("chat", json.dumps(settings_).encode(), None).render({"messages": MESSAGES}, 10_000)
    assert word in {"text", "missing", "damaged", "refused"}


@pytest.mark.parametrize("call", [limited_child.answer, lambda job, line: limited_child.answer(job, line, True)])
def test_nothing_is_rendered_without_limits(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any, bytes], None]
) -> None:
    def refuse(*values: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    written: list[tuple[str, str]] = []
    monkeypatch.setattr(limited_child, "write", lambda word, text: written.append((word, text)))
    monkeypatch.setattr(limited_child, "limit", refuse)
    call(None, b'{"memory_bytes": 1, "cpu_s": 1}')
    assert written == [("unlimited", "Operation not permitted")]


if __name__ == "__main__":
    report(cases())

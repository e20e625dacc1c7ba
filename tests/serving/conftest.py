"""A tiny bundle for the tests of serving."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moec.runtime import Engine, load
from moec.serving.api.service import ServiceOptions
from tests.listed_file import add_listed
from tests.runtime.conftest import tiny_bundle as tiny_bundle
from tests.serving.live_server import LiveServer, live_server

CONTEXT = 96
EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


TEMPLATE = (
    b"{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    b"[{{ m.role }}] {{ m.content }}{% endfor %}!"
)


@pytest.fixture(scope="session")
def chat_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with a chat template."""
    copy = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("chat") / "tiny-chat"))
    return add_listed(copy, "chat_template.jinja", TEMPLATE)


@pytest.fixture(scope="module")
def engine(chat_bundle: Path) -> Iterator[Engine]:
    """The bundle, opened with three slots and a cache that is too small for its experts."""
    with load(chat_bundle, expert_cache="60%", context=CONTEXT, slots=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    """The engine, served."""
    with live_server(engine) as running:
        yield running


TOOL_TEMPLATE = (
    b"{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    b"<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}{% if tools %}tools {% endif %}"
    b"assistant:"
)


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The example bundle with a chat template that takes tools."""
    copy = Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("clients") / "bundle"))
    add_listed(copy, "chat_template.jinja", TOOL_TEMPLATE)
    options = ServiceOptions("bundle", deadline_s=60)
    with load(copy, slots=2) as engine, live_server(engine, service_options=options) as running:
        yield running

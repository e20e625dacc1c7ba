"""Templates of prompts that a user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.manifests.errors import InputError
from moec.runtime.text.template_process import PromptRenderer

FIELDS = {"question": "Who?", "answer": "I.", "shots": [{"question": "{{ a }}?", "answer": "b"}]}
TEMPLATE = """{% for shot in shots %}
Q: {{ shot.question }}
A: {{ shot.answer }}

{% endfor %}
Q: {{ question | trim }}
A:
"""


def test_fields_and_shots_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "prompt.jinja"
    path.write_text(TEMPLATE)
    with PromptRenderer(path) as renderer:
        assert renderer.render(FIELDS) == "Q: {{ a }}?\nA: b\n\nQ: Who?\nA:"
        assert renderer.render({**FIELDS, "shots": []}) == "Q: Who?\nA:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ context }}",
            "does not fit the items: 'context' is undefined the fields are `question`, `answer`, `shots`",
        ),
        ("a\n{% if %}", "is no Jinja template: line 2: "),
        ("{{ 'a' * 10**12 }}", "bytes of memory"),
        ("{% for i in range(99999) %}{{ 'a'*100000 }}{% endfor %}", "characters of its own"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without end"),
        ("{{ ''.__class__.__base__ }}", "unsafe"),
    ],
)
def test_templates_that_cannot_be_used(template: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.jinja"
    path.write_text(template)
    with PromptRenderer(path) as renderer, pytest.raises(InputError) as caught:
        renderer.render(FIELDS)
    assert message in f"{caught.value.message} {caught.value.hint}" and "prompt.jinja" in caught.value.message


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt\.jinja"):
        PromptRenderer(tmp_path / "prompt.jinja")


def test_a_template_that_is_no_utf_8_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "prompt.jinja").write_bytes(b"{{ question }} \xff")
    with pytest.raises(InputError, match="is not UTF-8 at byte 15"):
        PromptRenderer(tmp_path / "prompt.jinja")

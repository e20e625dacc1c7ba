"""Chat templates against transformers' own rendering, templates of prompts, and templates that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import InputError, ManifestInvalid, OptionError
from moec.runtime.text.template_process import PromptRenderer, render_chat
from tests.tiny_models import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où? {{ x }}"}]
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}
        {%- set system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {{- '[INST] ' + message.content | trim + ' [/INST]' }}{{ {'role': message.role} | tojson }}
{%- endfor %}
{{- eos_token }}"""


def save(folder: Path, template: Any, in_config: bool = False) -> Path:
    tokenizer = tiny_tokenizer()
    if not in_config:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if in_config:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


TOOLS = """{% if tools is not none %}tools{% endif %}{{ messages[1] | tojson(ensure_ascii=False, sort_keys=True) }}
{%- generation %}{{ 'ab' * 3 }}{% endgeneration %}{{ 2 ** 5 }}"""


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS])
@pytest.mark.parametrize("in_config", [False, True])
def test_the_text_is_what_transformers_makes(template: str, in_config: bool, tmp_path: Path) -> None:
    folder, tokenizer = save(tmp_path, template, in_config), tiny_tokenizer()
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert render_chat(folder, MESSAGES) == expected
    assert "{{ x }}" in expected  # a message is never itself a template


def test_of_several_templates_the_default_one(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    assert render_chat(save(tmp_path, several, in_config=True), MESSAGES) == "Be brief."


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('no system message') }}", InputError, "no system message"),
        ("{{ messages.__class__.__mro__ }}", InputError, "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", InputError, "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", InputError, "Range too big"),
        ("{{ messages.append(1) }}", InputError, "unsafe"),
        ("{% if %}", ManifestInvalid, "damaged"),
        ("{{ nothing.at.all }}", InputError, "undefined"),
        ("{{ 1 / 0 }}", InputError, "zero"),
        ("{{ '{5}'.format('a') }}", InputError, "range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ManifestInvalid, "has no end"),
    ],
)
def test_templates_that_misbehave(template: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        render_chat(save(tmp_path, template), MESSAGES)


def test_a_bundle_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no chat template"):
        render_chat(save(tmp_path, None), MESSAGES)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ManifestInvalid, match="is not JSON"):
        render_chat(tmp_path, MESSAGES)


FIELDS = {"question": "Who?", "answer": "I.", "shots": [{"question": "{{ a }}?", "answer": "b"}]}
PROMPT_TEMPLATE = """{% for shot in shots %}
Q: {{ shot.question }}
A: {{ shot.answer }}

{% endfor %}
Q: {{ question | trim }}
A:
"""


def test_fields_and_shots_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "prompt.jinja"
    path.write_text(PROMPT_TEMPLATE)
    (tmp_path / "link.jinja").symlink_to(path.name)
    with PromptRenderer(tmp_path / "link.jinja") as renderer:
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
def test_prompt_templates_that_cannot_be_used(template: str, message: str, tmp_path: Path) -> None:
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

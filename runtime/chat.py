"""Chat templates: messages to the text that a model was trained on, in a sandbox.

The template is the checkpoint's own, carried in the bundle and as little trusted as the rest of it: it sees nothing but
the messages and the names of the special tokens. Source: transformers, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from moec.manifests.errors import InputError, ManifestInvalid, OptionError

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MAX_FILE_BYTES = 16 << 20
_MAX_TEXT_CHARACTERS = 16 << 20

Message = Mapping[str, str]
"""`role` (system, user, assistant, ...) and `content`."""


def render_chat(folder: Path, messages: Sequence[Message]) -> str:
    """The text in front of the assistant's next message; its special tokens are in it.

    Raises OptionError where the bundle has no template, ManifestInvalid for one that is damaged, InputError where it
    refuses the messages.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    config = _tokenizer_config(folder)
    source = _template(folder, config)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
    try:
        parts, size = list[str](), 0
        template = environment.from_string(source)
        for part in template.generate(messages=[dict(m) for m in messages], add_generation_prompt=True, **tokens):
            parts.append(part)
            size += len(part)
            if size > _MAX_TEXT_CHARACTERS:
                raise InputError("the chat template makes too long a text", "drop `--chat`")
    except jinja2.TemplateSyntaxError as error:
        raise ManifestInvalid(f"`{folder}`: the chat template is damaged: {error}", "copy the bundle again") from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the chat template refuses these messages: {error}", "see the model's card") from error
    return "".join(parts)


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """From a file of its own, or from the tokenizer's settings, where there may be several by name."""
    path = folder / TEMPLATE_NAME
    if path.is_file():
        return _read(path).decode("utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry.get("template") for entry in found if isinstance(entry, dict) and "name" in entry}
        found = named.get("default")
    if not isinstance(found, str):
        raise OptionError(
            f"`{folder}` has no chat template", "drop `--chat` and write the prompt as the model reads it"
        )
    return found


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise ManifestInvalid(f"`{path}` is not JSON: {error}", "copy the bundle again") from error
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ManifestInvalid(f"`{path}` has more than {_MAX_FILE_BYTES} bytes", "copy the bundle again")
    return data


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)

"""Chat templates: messages to the text that a model was trained on, in a sandbox.

The template is the checkpoint's own, carried in the bundle and as little trusted as the rest of it: it sees nothing but
the messages and the names of the special tokens, repeats nothing without bound, and raises to no high power. Its time
is not bounded: loops inside loops can run for long. Source: transformers, utils/chat_template_utils.py.
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
_MAX_FACTOR, _MAX_POWER = 1 << 20, 64

Message = Mapping[str, str]
"""`role` (system, user, assistant, ...) and `content`."""


def render_chat(folder: Path, messages: Sequence[Message]) -> str:
    """The text in front of the assistant's next message; its special tokens are in it.

    Raises OptionError where the bundle has no template, ManifestInvalid for one that is damaged, InputError where it
    refuses the messages.
    """
    import jinja2

    config = _tokenizer_config(folder)
    source = _template(folder, config)
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
    try:
        parts, size = list[str](), 0
        template = environment.from_string(source)
        for part in template.generate(**_variables(messages), **tokens):
            parts.append(part)
            size += len(part)
            if size > _MAX_TEXT_CHARACTERS:
                raise InputError("the chat template makes too long a text", "drop `--chat`")
    except jinja2.TemplateSyntaxError as error:
        raise ManifestInvalid(f"`{folder}`: the chat template is damaged: {error}", "copy the bundle again") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the chat template refuses these messages: {error}", "see the model's card") from error
    except (RecursionError, MemoryError) as error:
        raise ManifestInvalid(f"`{folder}`: the chat template has no end", "copy the bundle again") from error
    return "".join(parts)


def _environment() -> Any:
    """The sandbox, with what transformers' templates may use, and operators whose results stay small."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's own text for training; the text inside is all that counts here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(value) if hasattr(value, "__len__") else abs(value) for value in (left, right)]
            if (operator == "**" and sizes[1] > _MAX_POWER) or max(sizes) > _MAX_FACTOR:
                raise ValueError(f"an operand of `{operator}` is too large")
            return super().call_binop(context, operator, left, right)

    return Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])


def _variables(messages: Sequence[Message]) -> dict[str, Any]:
    """What a template may ask for; there are no tools and no documents."""
    return {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
    }


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


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)

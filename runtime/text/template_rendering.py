"""Render a template, in a process of its own: a model's chat template, or a user's template of prompts.

`template_process.py` starts the process, and `limited_child.py` runs this file in it, under limits. It imports only the
standard library and jinja2. A request has `variables` and `text_characters`. Untrusted files are parsed only here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MAX_REASON_CHARACTERS = 300
IS_FORKED = False
"""One process renders all texts, because it compiles the template once."""

Answer = tuple[str, str]
"""One word and a text.

- `text`: the rendered text.
- `no-json`: the settings are not JSON; the reason.
- `missing`: there is no template.
- `damaged`: the template has an error; the reason.
- `refused`: the template refuses the messages; the reason.
- `endless`: the template calls itself without end.
- `memory`: the template needs more memory than the limit.
- `long`: the text is too long.
"""


class Source:
    """A template, which is compiled when it is rendered for the first time.

    kind: `chat` or `prompt`.
    config: content of `tokenizer_config.json`; None if the file is missing. A prompt has none.
    template: content of the template file; None if the file is missing.
    """

    def __init__(self, kind: str, config: bytes | None, template: bytes | None) -> None:
        self._kind, self._config, self._template = kind, config, template
        self._settings: Mapping[str, Any] = {}
        self._compiled: Any = None

    def render(self, variables: Mapping[str, Any], characters: int) -> Answer:
        """Return the text of the template, or why there is none. Raises nothing but KeyboardInterrupt.

        variables: `messages` of a chat, with `role` and `content`, and its `tools`; the fields of a prompt.
        characters: most characters of the text.
        """
        try:
            fault = self._compile() if self._compiled is None else None
            return fault or self._text(variables, characters)
        except MemoryError:
            return "memory", ""
        except RecursionError:
            return "endless", ""
        except Exception as error:
            import jinja2

            kinds = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
            is_refusal = isinstance(error, kinds) and not isinstance(error, jinja2.TemplateSyntaxError)
            # jinja2 passes on errors of Python's own compiler, and its code for a constant may use an undefined name.
            is_refusal = is_refusal and self._compiled is not None
            return "refused" if is_refusal else "damaged", _reason(error)

    def _compile(self) -> Answer | None:
        """Set the compiled template and the settings of its model. Returns why this is not possible, or None."""
        try:
            settings = {} if self._config is None else json.loads(self._config)
        except (ValueError, RecursionError) as error:
            return "no-json", _reason(error)
        self._settings = settings if isinstance(settings, dict) else {}
        if self._template is not None:
            source: Any = self._template.decode("utf-8")
        else:
            source = self._settings.get("chat_template")
            if isinstance(source, list):  # several named templates
                named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
                source = named[-1].get("template") if named else None
        if not isinstance(source, str):
            return "missing", ""
        self._compiled = _environment(is_strict=self._kind == "prompt").from_string(source)
        return None

    def _text(self, variables: Mapping[str, Any], characters: int) -> Answer:
        known = dict(variables)
        if self._kind == "chat":  # messages and tools; there are no documents
            settings = self._settings
            tokens = {name: _token_text(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name) is not None}
            given = {"messages": variables["messages"], "tools": variables.get("tools")}
            more = variables.get("more", {})
            known = {"add_generation_prompt": True, "documents": None, **tokens, **more, **given}
        parts, size = list[str](), 0
        for piece in self._compiled.generate(**known):
            parts.append(piece)
            size += len(piece)
            if size > characters:
                return "long", ""
        return "text", "".join(parts)


def _environment(is_strict: bool) -> Any:
    """Return the sandbox with the extensions of transformers (utils/chat_template_utils.py).

    is_strict: refuse unknown variables, instead of taking them for empty texts.
    """
    from jinja2 import StrictUndefined, Undefined, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's own text for training. Only the text inside is used."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
        undefined=StrictUndefined if is_strict else Undefined,
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    from datetime import datetime  # few templates use it, and its import takes 3 ms

    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    place = f"line {line}: " if isinstance(line, int) else ""
    return place + str(error)[:_MAX_REASON_CHARACTERS] or type(error).__name__


def prepare() -> None:
    """Do the one-time work of jinja2 (imports, its lexer), while the caller opens the bundle."""
    Source("chat", None, b"{{ '' | trim }}").render({"messages": []}, 1)


class Job:
    """Renders one template."""

    def __init__(self, kind: str, files: Sequence[bytes | None]) -> None:
        """files: content of `tokenizer_config.json` and of the template file."""
        self._source = Source(kind, files[0], files[1])

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Return the answer to a request with `variables` and `text_characters`."""
        return self._source.render(request["variables"], request["text_characters"])

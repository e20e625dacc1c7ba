"""Render a chat template, in a process of its own.

`chat_process.py` starts the process, sends a request through a pipe, and limits it.

It imports only the standard library and jinja2, because it is started with `python -I -S`.
The request on standard input is one line of JSON with `messages`, `config_bytes`, `template_bytes`, `memory_bytes`,
`cpu_s` and `text_characters`.
The bytes of `tokenizer_config.json` and of the template file follow. A size of -1 means that a file is missing.
The answer on standard output is one word on a line, then a text in UTF-8.
Untrusted files are parsed only here, under the limits.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MAX_REASON_CHARACTERS = 300

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


def render(messages: list[dict[str, str]], config: bytes | None, template: bytes | None, characters: int) -> Answer:
    """Render the template of a bundle. Raises nothing but KeyboardInterrupt.

    messages: objects with `role` and `content`.
    config: content of `tokenizer_config.json`; None if the file is missing.
    template: content of the template file; None if the file is missing.
    characters: most characters of the text.
    """
    try:
        settings = {} if config is None else json.loads(config)
    except (ValueError, RecursionError) as error:
        return "no-json", _reason(error)
    except MemoryError:
        return "memory", ""
    settings = settings if isinstance(settings, dict) else {}
    source = _template_of(settings) if template is None else template.decode("utf-8", errors="replace")
    if source is None:
        return "missing", ""
    return _render_source(source, settings, messages, characters)


def _render_source(source: str, settings: Mapping[str, Any], messages: list[dict[str, str]], characters: int) -> Answer:
    import jinja2

    refusals = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
    is_compiled = False
    try:
        template = _environment().from_string(source)
        is_compiled = True
        parts, size = list[str](), 0
        for part in template.generate(**_variables(messages, settings)):
            parts.append(part)
            size += len(part)
            if size > characters:
                return "long", ""
        return "text", "".join(parts)
    except MemoryError:
        return "memory", ""
    except RecursionError:
        return "endless", ""
    except Exception as error:
        # jinja2 passes on errors of Python's own compiler, and its code for a constant may use an undefined name.
        is_refusal = is_compiled and isinstance(error, refusals) and not isinstance(error, jinja2.TemplateSyntaxError)
        return "refused" if is_refusal else "damaged", _reason(error)


def _environment() -> Any:
    """Return the sandbox with the extensions of transformers (utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's own text for training. Only the text inside is used."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _variables(messages: list[dict[str, str]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a template. There are no tools and no documents."""
    tokens = {name: _token_text(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name) is not None}
    return {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None, **tokens}


def _template_of(settings: Mapping[str, Any]) -> str | None:
    """Return the template in the tokenizer's settings, or None. Of several named templates it is `default`."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


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
    return str(error)[:_MAX_REASON_CHARACTERS] or type(error).__name__


def set_limits(memory_bytes: int, cpu_s: int) -> None:
    """Limit the resources of this process.

    memory_bytes: address space in addition to what it has.
    cpu_s: processor time in addition to what it used, whole seconds.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        held_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, held_bytes + memory_bytes, held_bytes + memory_bytes)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    # The soft limit sends SIGXCPU, the hard limit SIGKILL
    _lower(resource.RLIMIT_CPU, used_s + cpu_s, used_s + cpu_s + 1)
    _lower(resource.RLIMIT_CORE, 0, 0)


def _lower(kind: int, soft: int, hard: int) -> None:
    """Set a limit, but not above the current one."""
    limits = []
    for new_limit, held in zip((soft, hard), resource.getrlimit(kind), strict=True):
        limits.append(new_limit if held == resource.RLIM_INFINITY else min(new_limit, held))
    resource.setrlimit(kind, (limits[0], limits[1]))


def _main() -> None:
    """Answer one request.

    The one-time work of jinja2 (imports, its lexer) is done before the request, while the caller opens the bundle.
    """
    render([], None, b"{{ '' | trim }}", 1)
    source = sys.stdin.buffer
    if not (line := source.readline()):
        return  # the caller has ended without a request
    request = json.loads(line)
    files = []
    for name in ("config_bytes", "template_bytes"):
        files.append(None if request[name] < 0 else source.read(request[name]))
    set_limits(request["memory_bytes"], request["cpu_s"])
    word, text = render(request["messages"], files[0], files[1], request["text_characters"])
    sys.stdout.buffer.write(word.encode() + b"\n")
    sys.stdout.buffer.write(text.encode("utf-8", errors="surrogatepass"))
    sys.stdout.buffer.flush()
    os._exit(0)  # skip the clean-up of the interpreter: it takes time and may run out of memory


if __name__ == "__main__":
    sys.path += sys.argv[1:]
    _main()

"""`response_format`: answers that are JSON, or follow a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moec.manifests.errors import InputError, MissingDependency
from moec.manifests.thinking import CLOSE, OPEN

from ...engine.request import AnswerMask
from ...grammar.masks import AfterThinking, CompiledGrammar, json_between, json_grammar
from ...tools.calls import NO_TOOLS, ToolsOfRequest
from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from ..service import Service

_ANY_OBJECT = {"type": "object"}


def read_response_format(fields: Fields) -> dict[str, Any] | None:
    """Return the schema that `response_format` asks for; None for plain text. Raises RequestError."""
    form = fields.object("response_format")
    if form is None:
        return None
    kind = form.text("type")
    schema: dict[str, Any] | None
    if kind == "json_schema":
        described = form.object("json_schema")
        if described is None:
            raise RequestError(400, "`response_format.json_schema` is missing", "response_format", "missing_field")
        schema = read_schema(described)
    else:
        schema = _simple_kind(kind, "response_format.type")
    form.end()
    return schema


def read_text_format(text: Fields) -> dict[str, Any] | None:
    """Return the schema that `text.format` of the Responses API asks for; None for plain text. Raises RequestError."""
    form = text.object("format")
    if form is None:
        return None
    kind = form.text("type")
    schema = read_schema(form) if kind == "json_schema" else _simple_kind(kind, f"{form.place}type")
    form.end()
    return schema


def read_schema(described: Fields) -> dict[str, Any]:
    """Return the schema of an object that describes one. Raises RequestError."""
    described.text("name", most=256)
    described.text("description", most=1 << 16)
    described.flag("strict")  # a schema is always followed
    schema = described.take("schema")
    if not isinstance(schema, dict):
        raise bad_field(f"{described.place}schema", f"must be a JSON schema, found {shown(schema)}")
    described.end()
    return schema


def _simple_kind(kind: str | None, place: str) -> dict[str, Any] | None:
    if kind not in ("text", "json_object"):
        raise bad_field(place, f"must be text, json_object or json_schema, found {shown(kind)}", "unsupported_value")
    return None if kind == "text" else _ANY_OBJECT


async def answer_masks(
    service: Service,
    schema: dict[str, Any] | None,
    param: str,
    starts_thinking: bool,
    tools: ToolsOfRequest = NO_TOOLS,
    count: int = 1,
) -> Sequence[AnswerMask] | None:
    """Return a mask for each answer; None if they may say anything.

    schema: JSON schema of the answers, or None.
    starts_thinking: the prompt ends inside `<think>`.
    tools: if some are forced, each answer is a call of one of them.
    count: number of answers.
    Raises RequestError for a schema that cannot be followed, and without the package.
    """
    if schema is not None and (tools.described or service.chat_form.is_harmony):
        what = "next to `tools`" if tools.described else "with this bundle's chat template"
        raise bad_field(param, f"is not supported {what}", "unsupported_value")
    syntax = service.chat_form.syntax
    compiled: CompiledGrammar
    if tools.forced and syntax is not None and syntax.forced is not None:
        around, special = syntax.forced, {mark: token for token, mark in service.chat_form.marks.items()}
        grammars = [lambda: forced_call(tools, around, special), lambda: forced_call(tools, around, {})]
        compiled = await _compiled(service, grammars, "tool_choice")
    elif schema is not None:
        compiled = await _compiled(service, [lambda: json_grammar(schema)], param)
    else:
        return None
    masks = [compiled.mask() for _ in range(count)]
    if not service.chat_form.thinks:
        return masks
    tokenizer, ends = service.engine.tokenizer, service.engine.bundle.manifest.model.eos_token_ids
    marks = tokenizer.id_of(OPEN), tokenizer.id_of(CLOSE)
    return [AfterThinking(mask, tokenizer, starts_thinking, service.vocabulary, ends, *marks) for mask in masks]


def forced_call(tools: ToolsOfRequest, around: tuple[str, str, bool], special: Mapping[str, int]) -> str:
    """Return the grammar of a call of one of the forced tools. special: marks that are special tokens."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": tools.parameters[name]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in tools.forced
    ]
    begin, end, is_list = around
    call: dict[str, Any] = {"anyOf": calls}
    if is_list:
        most = {} if tools.is_parallel else {"maxItems": 1}
        call = {"type": "array", "items": call, "minItems": 1, **most}
    return json_between(begin, call, end, special)


async def _compiled(service: Service, grammars: Sequence[Callable[[], str]], param: str) -> CompiledGrammar:
    """Return a compiled grammar. grammars: what makes it, and what makes it without numbers of tokens, if it has some.

    Raises RequestError.
    """
    try:
        return await service.with_grammars(lambda: service.grammars.compiled(*(make() for make in grammars)))
    except MissingDependency as error:
        message = f"`{param}` needs the package `llguidance`, which this server does not have"
        raise RequestError(400, message, param, "grammar_not_installed") from error
    except InputError as error:
        raise RequestError(400, f"`{param}`: {error.message}", param, "invalid_schema") from error

"""Facts of the server: models, properties, health, tokens."""

from __future__ import annotations

from typing import Any

from .errors import RequestError, bad_field
from .fields import Fields, token_ids
from .service import Service

MAX_TOKENS = 1 << 20


def models(service: Service) -> dict[str, Any]:
    """Return the answer of `GET /v1/models`: the one bundle."""
    return {"object": "list", "data": [model(service)]}


def model(service: Service) -> dict[str, Any]:
    """Return the one model, whose name every name stands for. `meta` has what clients of llama-server ask for."""
    memory = service.engine.memory
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "moec",
        "max_model_len": memory.context,
        "meta": {"n_ctx": memory.context, "n_vocab": service.vocabulary},
    }


def health(service: Service) -> dict[str, Any]:
    """Return that the server takes requests. Raises RequestError if it does not."""
    scheduler = service.scheduler
    if not scheduler.is_alive:
        raise RequestError(503, "the server takes no requests", None, "shutting_down")
    return {"status": "ok", "running": scheduler.running, "waiting": scheduler.waiting}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the special tokens and the chat template, as clients ask for them that count tokens by this server."""
    ends = service.engine.bundle.manifest.model.eos_token_ids
    end = {"eos_token": service.engine.tokenizer.piece(ends[0]) if ends else None}
    return {**end, **service.tokenizer_settings()}


async def tokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of `content` (or `prompt`). `with_pieces` adds their texts. Raises RequestError."""
    fields = Fields(body)
    text, prompt = fields.text("content"), fields.text("prompt")
    adds_special = fields.flag("add_special", fields.flag("add_special_tokens", True))
    with_pieces = fields.flag("with_pieces")
    fields.text("model", most=1024)
    fields.unsupported("parse_special", True)
    fields.end()
    given = text if text is not None else prompt
    if given is None:
        raise RequestError(400, "`content` is missing", "content", "missing_field")
    ids = await service.encode(given, "content", adds_special)
    shown: list[Any] = [{"id": token, "piece": _piece(service, token)} for token in ids] if with_pieces else ids
    return {"tokens": shown, "count": len(ids), "max_model_len": service.engine.memory.context}


def _piece(service: Service, token: int) -> str | list[int]:
    """Return the text of a token; its bytes if they are no text, as llama-server does."""
    text, data = service.token_text(token)
    return text if text.encode(errors="replace") == data else list(data)


async def detokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the text of `tokens`, without special tokens. Raises RequestError."""
    fields = Fields(body)
    tokens = fields.take("tokens")
    fields.text("model", most=1024)
    fields.end()
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS:
        raise bad_field("tokens", f"must be a list of at most {MAX_TOKENS} token ids")
    ids = token_ids(tokens, "tokens")
    if any(not 0 <= token < service.vocabulary for token in ids):
        raise bad_field("tokens", f"must be from 0 to {service.vocabulary - 1}")
    text = await service.in_thread(lambda: service.engine.tokenizer.decode(ids))
    return {"content": text, "prompt": text}

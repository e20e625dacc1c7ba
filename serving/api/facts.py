"""Facts of the server: models, health, tokens, and the metrics of `GET /metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moec.profiles.probe import resident_set_bytes

from .errors import RequestError, bad_field
from .fields import Fields, token_ids
from .service import Service

MAX_TOKENS = 1 << 20
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


def metrics(service: Service) -> str:
    return "".join(_lines(service))


def _lines(service: Service) -> Iterator[str]:
    scheduler, engine = service.scheduler, service.engine
    activity, cache, budget = scheduler.activity, scheduler.activity.cache, engine.memory.budget_bytes
    counters: dict[str, tuple[str, float]] = {
        "prompt_tokens": ("Tokens of prompts.", activity.prompt_tokens),
        "prompt_cached_tokens": ("Tokens of prompts that were in memory.", activity.cached_tokens),
        "answer_tokens": ("Tokens of answers.", activity.answer_tokens),
        "passes": ("Passes of the engine.", activity.passes),
        "pass_seconds": ("Time of all passes.", activity.running_ns / 1e9),
        "expert_lookups": ("Requests of experts by a layer.", cache.lookups),
        "expert_hits": ("Requests of experts that were in memory.", cache.hits),
        "expert_misses": ("Requests of experts that had to be read.", cache.misses),
        "expert_evictions": ("Experts taken out of memory.", cache.evictions),
        "expert_read_bytes": ("Bytes of experts read.", cache.bytes_read),
        "expert_stall_seconds": ("Time in which a layer waited for reads.", cache.stall_ns / 1e9),
    }
    gauges: dict[str, tuple[str, float]] = {
        "running_requests": ("Requests that have a slot.", scheduler.running),
        "waiting_requests": ("Requests in the queue.", scheduler.waiting),
        "slots": ("Slots.", engine.options.slots),
        "context_tokens": ("Longest sequence.", engine.memory.context),
        "resident_memory_bytes": ("Resident memory of the process.", resident_set_bytes()),
        "expert_cache_bytes": ("Bytes of experts in the cache.", engine.cache.used_bytes),
        "expert_cache_capacity_bytes": ("Size of the expert cache.", engine.cache.capacity_bytes),
    }
    if budget is not None:
        gauges["memory_budget_bytes"] = ("Memory budget of the process.", budget)
    for name, (text, value) in counters.items():
        yield _metric(f"{name}_total", "counter", text, value)
    for name, (text, value) in gauges.items():
        yield _metric(name, "gauge", text, value)
    yield "# HELP moec_requests_total Requests by how they ended.\n# TYPE moec_requests_total counter\n"
    for how, count in sorted(dict(activity.requests).items()):
        yield f'moec_requests_total{{end="{how}"}} {count}\n'
    yield "# HELP moec_first_token_seconds Time to the first token.\n# TYPE moec_first_token_seconds summary\n"
    yield f"moec_first_token_seconds_sum {activity.ttft_sum_ns / 1e9:.6f}\n"
    yield f"moec_first_token_seconds_count {activity.ttft_count}\n"


def _metric(name: str, kind: str, text: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.6f}"
    return f"# HELP moec_{name} {text}\n# TYPE moec_{name} {kind}\nmoec_{name} {shown}\n"

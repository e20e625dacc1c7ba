"""`GET /metrics`: counts in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from moec.profiles.probe import resident_set_bytes

from .service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(service: Service) -> str:
    """Return all metrics of the server."""
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

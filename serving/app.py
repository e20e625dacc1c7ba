"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .api import facts
from .api.endpoints.chat import chat
from .api.endpoints.completions import completions
from .api.endpoints.messages import count_tokens, message_error, messages
from .api.endpoints.responses import responses
from .api.errors import CLIENT_GONE, RequestError, json_bytes
from .api.facts import METRICS_TYPE, metrics
from .api.fields import body_limit_bytes, parse_body
from .api.live_feed import LiveFeed, experts
from .api.service import Service
from .security import Guard, SecurityOptions

Handler: TypeAlias = Callable[[Service, dict[str, Any]], Awaitable[Any]]
Fact: TypeAlias = Callable[[Service], Any]
_PARSED_HERE_BYTES = 64 << 10
"""A larger body is parsed in the thread of texts, so that other connections go on."""

HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": facts.tokenize,
    "/detokenize": facts.detokenize,
}
FACTS: dict[str, Fact] = {
    "/v1/models": facts.models,
    "/health": facts.health,
    "/ready": facts.health,
    "/props": Service.facts,
    "/tokenizer_info": facts.tokenizer_info,
    "/v1/moec/experts": experts,
    "/metrics": lambda service: Response(metrics(service), 200, {"content-type": METRICS_TYPE}),
}


PAGE = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_INDEX = "index.html"


def make_app(service: Service, security: SecurityOptions) -> ASGIApp:
    """Return the application of one served bundle, with its guard. The files of the page are read once."""
    page = _page_files()
    routes = [Route(path, _posted(service, handler), methods=["POST"]) for path, handler in HANDLERS.items()]
    routes += [Route(path, _fact(service, fact), methods=["GET"]) for path, fact in FACTS.items()]
    feed = LiveFeed(service)

    async def events(request: Request) -> Any:
        feed.require_place()
        return feed

    async def model(request: Request) -> Any:
        if not request.path_params["name"]:
            raise RequestError(404, "this path does not exist; ask `/v1/models`", None, "not_found")
        return _json(facts.model(service))

    async def file(request: Request) -> Any:
        data, kind = page[request.url.path]
        return Response(data, 200, {"cache-control": "no-cache", "content-type": kind})

    routes.append(Route("/v1/moec/events", events, methods=["GET"]))
    routes.append(Route("/v1/models/{name:path}", model, methods=["GET"]))
    routes += [Route(path, file, methods=["GET"]) for path in page]
    handlers = {RequestError: _refusal, HTTPException: _http_error, Exception: _fault}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a proxy with TLS would be left for http
    return Guard(app, security, _error_body, page)


def _page_files() -> dict[str, tuple[bytes, str]]:
    files = sorted(path for path in PAGE.glob("*") if path.suffix in _KINDS)
    page = {f"/{path.name}": (path.read_bytes(), _KINDS[path.suffix]) for path in files}
    return ({"/": page[f"/{_INDEX}"]} if f"/{_INDEX}" in page else {}) | page


def _posted(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Any]]:
    """Return the endpoint of a handler that reads a body."""

    async def endpoint(request: Request) -> Any:
        try:
            data = await asyncio.wait_for(read_body(request, service), service.options.body_s)
            is_small = len(data) <= _PARSED_HERE_BYTES
            body = parse_body(data) if is_small else await service.in_thread(lambda: parse_body(data))
            answer = await handler(service, body)
        except asyncio.TimeoutError as error:
            message = f"the body took more than {service.options.body_s:g} s"
            raise RequestError(408, message, code="timeout") from error
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        return _json(answer) if isinstance(answer, dict) else answer

    return endpoint


def _error_body(path: str, error: RequestError) -> dict[str, Any]:
    """Return the body of an error in the form of the API that a path belongs to."""
    return message_error(error) if path.startswith("/v1/messages") else error.to_plain()


def _fact(service: Service, fact: Fact) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        answer = fact(service)
        return _json(answer) if isinstance(answer, dict) else answer

    return endpoint


async def read_body(request: Request, service: Service) -> bytes:
    """Return the body of a request. Raises RequestError for one that is too long, ClientDisconnect."""
    parts, size, context = list[bytes](), 0, service.engine.memory.context
    limit = body_limit_bytes(context)
    message = f"the body has more than {limit} bytes, the most for a context of {context} tokens"
    too_long = RequestError(413, message, None, "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise too_long
    try:
        async for part in request.stream():
            size += len(part)
            service.body_bytes += len(part)
            if size > limit:
                raise too_long
            if service.body_bytes > 2 * limit:
                message, later = "too many long bodies arrive at the same time", {"Retry-After": "2"}
                raise RequestError(429, message, None, "bodies_too_large", later)
            parts.append(part)
        return b"".join(parts)
    finally:
        service.body_bytes -= size


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer a request that gets an error, in the form of its API."""
    if not isinstance(error, RequestError):
        raise error
    return _json(_error_body(request.url.path, error), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a path or a method that does not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {
        404: ("not_found", "this path does not exist"),
        405: ("method_not_allowed", "this path does not take this method"),
    }
    code, message = words.get(status, ("refused", "the request is refused"))
    path = request.url.path.rstrip("/")
    if status == 404:
        message = _remedy_of_path(path) or message
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return await _refusal(request, RequestError(status, message, None, code, headers))


def _remedy_of_path(path: str) -> str | None:
    """Return what to ask instead of a path that does not exist; None for an unknown one."""
    if path.endswith("/embeddings"):
        return "this server gives no embeddings; ask `/v1/chat/completions` or `/v1/completions`"
    instead = next((known for known in (*HANDLERS, *FACTS) if known in (path, f"/v1{path}")), None)
    instead = "/v1/models" if path in ("/api/tags", "/v1/models") else instead
    return None if instead is None else f"this path does not exist; ask `{instead}`"


async def _fault(request: Request, error: Exception) -> Response:
    """Answer a fault of the server. It is logged where it is raised again."""
    return await _refusal(request, RequestError(500, "a fault in the server ended this request", None, "server_fault"))

"""Errors of the API in the form of OpenAI: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from moec.manifests.errors import ContextOverflow, InputError, ManifestInvalid, MoecError, OptionError
from moec.manifests.files.strict_json import shown as shown_value

from ..engine.request import Failed

_STATUS_OF_FAILURE = {"deadline_exceeded": 504, "shutting_down": 503, "InputError": 400}
CLIENT_GONE = 499
_MESSAGE_CHARACTERS = 1000
"""Most characters of a message. A template or a schema may write one with all of a client's text."""


class RequestError(Exception):
    """A request that gets an error as its answer.

    status: HTTP status.
    message: one sentence.
    param: the field, or None.
    code: a word for programs.
    headers: more HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str = "invalid_request",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}..."
        self.headers = headers or {}

    def to_plain(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(name: str, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(400, f"`{name}` {message}", name, code)


def shown(value: Any) -> str:
    """Return a JSON value as a short text for a message, in the words of JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown_value(value)


def error_of(problem: MoecError, param: str | None = None) -> RequestError:
    """Return the error of a request that the runtime refused."""
    if isinstance(problem, ContextOverflow):
        return RequestError(400, problem.message, param, "context_length_exceeded")
    is_callers = isinstance(problem, InputError | OptionError | ManifestInvalid)
    return RequestError(400 if is_callers else 500, problem.message, param, type(problem).__name__)


def error_of_failure(failed: Failed) -> RequestError:
    """Return the error of a request that ended without an answer."""
    status = CLIENT_GONE if failed.code == "cancelled" else _STATUS_OF_FAILURE.get(failed.code, 500)
    headers = {"Retry-After": "5"} if status == 503 else None
    return RequestError(status, failed.message, None, failed.code, headers)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON in ASCII, so that text that is not Unicode can be told, too."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

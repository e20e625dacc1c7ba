"""Fields of a JSON body. Each is read once, with its type and bounds, and a field that is left over is an error.

The fields that all ways to ask for an answer share are read here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moec.manifests.errors import OptionError
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json
from moec.runtime.text.generation_defaults import with_given, without_limits
from moec.runtime.text.sampling import LEAST_PENALTY, MOST_PENALTY, SamplingOptions

from .errors import RequestError, bad_field, error_of, json_bytes, shown
from .log_probs import log_probs_limit_bytes

MAX_BODY_BYTES = 8 << 20
_LEAST_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 256
_COPIES_OF_A_BODY = 6
"""A body exists in parts, joined, as text, as pieces that are counted, and parsed."""
_OTHER_BYTES = 28 << 20
"""Memory of the packages of the server (16 MiB), and of connections, events and short bodies. Gate G16 measures it."""
BODY_JSON = JsonLimits(MAX_BODY_BYTES, containers=1 << 14, values=1 << 18, texts=1 << 16)
"""Bounds of a body: as many token ids as a long context has, or 4,000 messages with parts."""
MAX_ANSWERS = 16
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 512
MAX_LOG_PROBS = 20
_MAX_SEED = 2**63 - 1
_MAX_BIASES = 1024
_NUMBERS = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", LEAST_PENALTY, MOST_PENALTY),
)
"""Names of numbers with their least and most values."""
DEFAULT_NEW_TOKENS = 1 << 30
"""Without a limit an answer may fill the context."""


def body_limit_bytes(context: int) -> int:
    """Return the most bytes of a body. A longer text has no place in the context."""
    return min(MAX_BODY_BYTES, _LEAST_BODY_BYTES + _BODY_BYTES_PER_TOKEN * context)


def server_bytes(context: int) -> int:
    """Return the memory that the server takes in addition to the engine. Long bodies are read one at a time."""
    return _COPIES_OF_A_BODY * body_limit_bytes(context) + log_probs_limit_bytes(context) + _OTHER_BYTES


def parse_body(data: bytes) -> dict[str, Any]:
    """Return the object in a body. Raises RequestError."""
    try:
        body = load_strict_json(data, BODY_JSON)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from error
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON within the limits: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, f"the body must be an object, found {shown(body)}", code="invalid_json")
    return body


class Fields:
    """The fields of one object. null counts as absent.

    place: text before the name of a field in messages, like `messages[0].`.
    """

    def __init__(self, body: dict[str, Any], place: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self.place = place

    def take(self, name: str) -> Any:
        """Return the value of a field; None if it is absent."""
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """Return the value of a field that is read later; None if it is absent."""
        return self._left.get(name)

    def text(self, name: str, default: str | None = None, most: int | None = None) -> str | None:
        """Return a text. most: most characters."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise bad_field(self.place + name, f"must be a text, found {shown(value)}")
        if most is not None and len(value) > most:
            raise bad_field(self.place + name, f"has {len(value)} characters, more than {most}")
        check_unicode(value, self.place + name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_field(self.place + name, f"must be true or false, found {shown(value)}")
        return value

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> int | None:
        """Return a whole number between bounds."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise bad_field(self.place + name, f"must be a whole number of {least} to {most}, found {shown(value)}")
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        """Return a number between bounds."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise bad_field(self.place + name, f"must be a number of {least:g} to {most:g}, found {shown(value)}")
        return float(value)

    def object(self, name: str) -> Fields | None:
        """Return the fields of an object; None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad_field(self.place + name, f"must be an object, found {shown(value)}")
        return Fields(value, f"{self.place}{name}.")

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """Return a text or a list of texts as a tuple. most, longest: most texts, and most characters of one."""
        value = self.take(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise bad_field(self.place + name, f"must be a text or a list of texts, found {shown(value)}")
        if len(texts) > most or any(len(text) > longest for text in texts):
            raise bad_field(self.place + name, f"must have at most {most} texts of at most {longest} characters")
        for text in texts:
            check_unicode(text, self.place + name)
        return tuple(texts)

    def without_effect(self, *names: str) -> None:
        """Accept fields that do not change the output."""
        for name in names:
            self._left.pop(name, None)

    def unsupported(self, name: str, *harmless: Any) -> None:
        """Accept a field only with a value that changes nothing. An absent field is always accepted."""
        value = self.take(name)
        if value is None or any(type(value) is type(safe) and value == safe for safe in harmless):
            return
        allowed = " or ".join(dict.fromkeys(json_bytes(safe).decode() for safe in harmless)) or "absent"
        raise bad_field(
            self.place + name, f"is not supported with this value; it can be {allowed}", "unsupported_value"
        )

    def end(self) -> None:
        """Refuse fields that are left over. Raises RequestError that names the first one."""
        for name in self._left:
            raise RequestError(
                400, f"unknown field `{self.place}{name[:60]}`", f"{self.place}{name[:60]}", "unknown_field"
            )


def check_unicode(text: str, name: str) -> None:
    """Refuse a text with half of a surrogate pair, which JSON can have. Raises RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_field(name, f"is not Unicode at character {error.start}") from error


def token_ids(value: Sequence[Any], name: str) -> list[int]:
    """Return a list of token ids. Raises RequestError."""
    for at, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise bad_field(name, f"must have whole numbers only, found {shown(token)} at place {at}")
    return list(value)


@dataclass(frozen=True, slots=True)
class Asked:
    """The wishes of a body, apart from its prompt.

    model: the name that the client gave; None without one.
    max_new_tokens: most tokens of an answer.
    count: number of answers.
    sampling: options of the first answer. The seed of answer i is i more.
    stop: texts that end an answer.
    streams: whether the answer comes in pieces.
    includes_usage: whether the last piece has the counts of tokens.
    """

    model: str | None
    max_new_tokens: int
    count: int
    sampling: SamplingOptions
    stop: tuple[str, ...]
    streams: bool
    includes_usage: bool


def read_asked(
    fields: Fields,
    vocabulary: int,
    defaults: SamplingOptions,
    limits: tuple[str, ...],
    default_tokens: int,
    least: int = 1,
) -> Asked:
    """Read the fields that the APIs of OpenAI share. Raises RequestError.

    vocabulary, defaults: as in `read_sampling`.
    limits: names of the field with the most tokens of an answer.
    default_tokens: the limit without any of them.
    least: least value of the limit.
    """
    model = fields.text("model", most=1024)
    most = [value for name in limits if (value := fields.whole(name, least, 1 << 30)) is not None]
    if len(set(most)) > 1:
        raise bad_field(limits[0], f"differs from `{limits[1]}`")
    streams = fields.flag("stream")
    options = fields.object("stream_options")
    includes_usage = False
    if options is not None:
        if not streams:
            raise bad_field("stream_options", "is only for `stream`")
        includes_usage = options.flag("include_usage")
        options.without_effect("include_obfuscation")
        options.end()
    return Asked(
        model=model,
        max_new_tokens=most[0] if most else default_tokens,
        count=fields.whole("n", 1, MAX_ANSWERS, 1) or 1,
        sampling=read_sampling(fields, vocabulary, defaults),
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP_CHARACTERS),
        streams=streams,
        includes_usage=includes_usage,
    )


def read_sampling(fields: Fields, vocabulary: int, defaults: SamplingOptions) -> SamplingOptions:
    """Read the options of sampling. Raises RequestError.

    vocabulary: number of token ids.
    defaults: values of absent fields. A request with temperature 0 takes none of them.
    """
    given: dict[str, Any] = {
        name: fields.number(name, least, most, 0.0) for name, least, most in _NUMBERS if fields.peek(name) is not None
    }
    top_k = fields.whole("top_k", -1, 1 << 30)
    if top_k is not None:
        given["top_k"] = max(top_k, 0)
    if given.get("top_p") == 0 or top_k == 1:  # the likeliest token alone
        given["temperature"] = 0.0
    if given.get("temperature") == 0:
        given = without_limits(given)
    seed = fields.whole("seed", -_MAX_SEED, _MAX_SEED)
    try:
        return replace(
            with_given(defaults, given),
            seed=secrets.randbits(62) if seed is None else seed % (1 << 62),
            presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
            frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
            logit_bias=_biases(fields, vocabulary),
        )
    except OptionError as error:
        raise error_of(error) from error


def _biases(fields: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    given = fields.take("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict) or len(given) > _MAX_BIASES:
        raise bad_field("logit_bias", f"must be an object of at most {_MAX_BIASES} token ids")
    biases = []
    for name, bias in given.items():
        is_id = name.isascii() and name.isdigit() and len(name) <= 9 and int(name) < vocabulary
        if not is_id or isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise bad_field("logit_bias", f"must map token ids under {vocabulary} to numbers of -100 to 100")
        biases.append((int(name), float(bias)))
    return tuple(biases)

"""Fields that all ways to ask for an answer share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from moec.manifests.errors import OptionError
from moec.runtime.text.generation_defaults import with_given, without_limits
from moec.runtime.text.sampling import LEAST_PENALTY, MOST_PENALTY, SamplingOptions

from .errors import bad_field, error_of
from .fields import Fields

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

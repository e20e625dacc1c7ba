"""Fields that all ways to ask for an answer share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from moec.manifests.errors import OptionError
from moec.runtime.text.sampling import LEAST_PENALTY, MOST_PENALTY, SamplingOptions

from .errors import RequestError, bad_field, error_of
from .fields import Fields

MAX_ANSWERS = 16
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 512
MAX_LOG_PROBS = 20
_MAX_SEED = 2**63 - 1
_MAX_BIASES = 1024
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


def read_asked(fields: Fields, vocabulary: int, limits: tuple[str, ...], default_tokens: int, least: int = 1) -> Asked:
    """Read the fields that the APIs of OpenAI share. Raises RequestError.

    vocabulary: number of token ids.
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
        sampling=read_sampling(fields, vocabulary),
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP_CHARACTERS),
        streams=streams,
        includes_usage=includes_usage,
    )


def read_sampling(fields: Fields, vocabulary: int) -> SamplingOptions:
    """Read the options of sampling. The temperature is 1 by default, as in the API of OpenAI. Raises RequestError."""
    temperature = fields.number("temperature", 0, 2, 1.0)
    top_k = fields.whole("top_k", -1, 1 << 30, 0) or 0
    top_p = fields.number("top_p", 0, 1, 1.0)
    min_p = fields.number("min_p", 0, 1, 0.0)
    repetition = fields.number("repetition_penalty", LEAST_PENALTY, MOST_PENALTY, 1.0)
    presence = fields.number("presence_penalty", -2, 2, 0.0)
    frequency = fields.number("frequency_penalty", -2, 2, 0.0)
    seed = fields.whole("seed", -_MAX_SEED, _MAX_SEED)
    if top_p == 0 or top_k == 1:  # the likeliest token alone
        temperature = 0.0
    is_greedy = temperature == 0
    try:
        return SamplingOptions(
            temperature=temperature,
            top_k=0 if is_greedy else max(top_k, 0),
            top_p=1.0 if is_greedy else top_p,
            min_p=0.0 if is_greedy else min_p,
            repetition_penalty=repetition,
            seed=secrets.randbits(62) if seed is None else seed % (1 << 62),
            presence_penalty=presence,
            frequency_penalty=frequency,
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
    found = []
    for name, bias in given.items():
        is_id = name.isascii() and name.isdigit() and len(name) <= 9 and int(name) < vocabulary
        if not is_id or isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise bad_field("logit_bias", f"must map token ids under {vocabulary} to numbers of -100 to 100")
        found.append((int(name), float(bias)))
    return tuple(found)


def too_long(tokens: int, context: int, param: str) -> RequestError:
    """Return the error of a prompt that leaves no room for an answer."""
    return RequestError(
        400,
        f"the prompt has {tokens} tokens, and the context of {context} tokens must have room for an answer",
        param,
        "context_length_exceeded",
    )

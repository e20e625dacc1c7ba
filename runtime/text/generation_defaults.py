"""The sampling that a model's publisher recommends: `generation_config.json` of a bundle.

Sources of the fields: transformers, `GenerationConfig`. vLLM and TensorRT-LLM serve a model with them by default, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.errors import ManifestInvalid, OptionError
from moec.manifests.files.limits import COMPANION_JSON, MAX_CONFIG_BYTES
from moec.manifests.files.strict_json import load_strict_json, shown

from ..bundle.open_bundle import Bundle
from .sampling import SamplingOptions

GENERATION_NAME = "generation_config.json"
PLAIN = SamplingOptions(temperature=1.0)
"""Sampling without a recommendation: the model's own probabilities, as in the API of OpenAI."""
_MOST = 1e9
"""More than any valid value. A whole number in JSON may have thousands of digits."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_REPAIR = "compile the bundle again from a checkpoint with a repaired file"


def recommended_sampling(bundle: Bundle, verify: bool) -> SamplingOptions | None:
    """Return the sampling of an opened bundle; None without a recommendation.

    verify: whether to compare the file with its digest.
    Raises ManifestInvalid for a file or a value that is not valid, and the errors of `Bundle.read_file`.
    """
    if not bundle.has_file(GENERATION_NAME):
        return None
    data = bundle.read_file(GENERATION_NAME, MAX_CONFIG_BYTES, verify=verify)
    return sampling_in(data, bundle.path / GENERATION_NAME)


def sampling_in(data: bytes, path: Path) -> SamplingOptions | None:
    """Return the sampling in a generation_config.json; None without a recommendation.

    data: content of the file.
    path: the file, for messages.
    Raises ManifestInvalid for a file or a value that is not valid.
    """
    place = f"`{path}`"
    try:
        plain = load_strict_json(data, COMPANION_JSON)
    except ValueError as error:
        raise ManifestInvalid(f"{place} is not JSON within the limits: {error}", _REPAIR) from error
    if not isinstance(plain, dict):
        raise ManifestInvalid(f"{place} must be an object, found {shown(plain)}", _REPAIR)
    return _sampling_of(plain, place)


def _sampling_of(plain: Mapping[str, Any], place: str) -> SamplingOptions | None:
    given = dict[str, Any]()
    for name in _NUMBERS:
        value = plain.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
                raise ManifestInvalid(f"{place}: key `{name}`: expected a number, found {shown(value)}", _REPAIR)
            given[name] = float(value)
    top_k, draws = plain.get("top_k"), plain.get("do_sample")
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not -1 <= top_k < _MOST:
            raise ManifestInvalid(f"{place}: key `top_k`: expected a number of tokens, found {shown(top_k)}", _REPAIR)
        given["top_k"] = max(top_k, 0)
    if draws is not None and not isinstance(draws, bool):
        raise ManifestInvalid(f"{place}: key `do_sample`: expected true or false, found {shown(draws)}", _REPAIR)
    if draws is False:
        given["temperature"] = 0.0
    if not given and draws is None:
        return None
    try:
        return with_given(PLAIN, without_limits(given) if given.get("temperature") == 0 else given)
    except OptionError as error:
        raise ManifestInvalid(f"{place}: {error.message}", _REPAIR) from error


def without_limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that count at temperature 0."""
    return {name: value for name, value in given.items() if name in ("temperature", "repetition_penalty")}


def with_given(defaults: SamplingOptions, given: Mapping[str, Any]) -> SamplingOptions:
    """Return the defaults with the fields that a user gives.

    A temperature of 0 takes nothing else from the defaults. A limit on the tokens means that tokens are drawn.
    Raises OptionError.
    """
    if given.get("temperature") == 0:
        return SamplingOptions(**given)
    has_limit = given.get("top_k", 0) > 0 or given.get("top_p", 1) < 1 or given.get("min_p", 0) > 0
    if defaults.temperature == 0 and "temperature" not in given and has_limit:
        return replace(defaults, temperature=1.0, **given)
    return replace(defaults, **given)


def sampling_fields(options: SamplingOptions) -> dict[str, float | int]:
    """Return the fields that a publisher may recommend."""
    return {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


def sampling_text(options: SamplingOptions) -> str:
    """Return sampling as text, such as `temperature 0.6, top-k 20`."""
    if options.temperature == 0:
        parts = ["the likeliest token (temperature 0)"]
    else:
        parts = [f"temperature {options.temperature:g}"]
        parts += [f"top-k {options.top_k}"] if options.top_k else []
        parts += [f"top-p {options.top_p:g}"] if options.top_p < 1 else []
        parts += [f"min-p {options.min_p:g}"] if options.min_p else []
    if options.repetition_penalty != 1:
        parts.append(f"repetition penalty {options.repetition_penalty:g}")
    return ", ".join(parts)

"""Weights of HOBBIT's eviction score that a compile fitted: `eviction.json`.

A bundle has this file if they read fewer bytes on held-out texts than the default weights.
"""

from __future__ import annotations

from dataclasses import fields, replace

from moec.manifests.bundle import EVICTION_NAME
from moec.manifests.errors import ManifestInvalid, OptionError
from moec.manifests.files.limits import EVICTION_JSON, MAX_EVICTION_BYTES
from moec.manifests.files.strict_json import load_strict_json

from ..options.runtime import EvictionWeights, RuntimeOptions, parse_weights
from .open_bundle import Bundle

FITTED_POLICY = "hobbit"
"""The policy whose weights are fitted."""


def fitted_weights(bundle: Bundle, *, verify: bool = True) -> str | None:
    """Return the weights as `policy-weights` takes them; None if the bundle has none.

    verify: whether to compare the file with its digest.
    Raises BundleError, StorageReadFailed.
    """
    if not bundle.has_file(EVICTION_NAME):
        return None
    names = [field.name for field in fields(EvictionWeights)]
    place = f"`{bundle.path / EVICTION_NAME}`"
    try:
        plain = load_strict_json(bundle.read_file(EVICTION_NAME, MAX_EVICTION_BYTES, verify=verify), EVICTION_JSON)
        if not isinstance(plain, dict) or set(plain) != {FITTED_POLICY}:
            raise ValueError(f"expected an object of `{FITTED_POLICY}`")
        weights = plain[FITTED_POLICY]
        if not isinstance(weights, dict) or set(weights) != set(names):
            raise ValueError(f"`{FITTED_POLICY}`: expected an object of {', '.join(names)}")
        if any(type(weights[name]) not in (int, float) or not 0 <= weights[name] <= 1 for name in names):
            raise ValueError(f"`{FITTED_POLICY}`: expected numbers of 0 to 1")
        return parse_weights(EvictionWeights(**weights).to_text()).to_text()
    except (ValueError, OptionError) as error:
        reason = error.message if isinstance(error, OptionError) else str(error)
        raise ManifestInvalid(f"{place}: {reason}", "compile the bundle again") from error


def with_fitted_weights(bundle: Bundle, options: RuntimeOptions) -> RuntimeOptions:
    """Return options of a run with the weights of the bundle, if its policy has weights and none are named.

    Raises BundleError, StorageReadFailed.
    """
    if options.policy != FITTED_POLICY or options.policy_weights is not None:
        return options
    weights = fitted_weights(bundle, verify=options.verify)
    return options if weights is None else replace(options, policy_weights=weights)

"""LossyDecoder: the decode passes of one engine under the lossy modes. All passes update the logical cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec

from ..kernels.elementary import exp
from ..layers.routing import Router
from ..options.lossy import LossyModes
from ..prefetch.advisor import Advisor
from ..prefetch.pass_state import PassState
from ..prefetch.predictors import Predictor, foresee_unimportance
from .expert_choice import PassChoice, Versions
from .logical_cache import DecidingCache
from .mode_counts import ModeCounts

RunPass = Callable[[Sequence[int], Sequence[int], Sequence[int], PassChoice], np.ndarray]
"""Maps tokens, slots, positions and the choice of experts to the residual stream [T, D]."""
MakeChoice = Callable[..., PassChoice]


class DecodingModel(Protocol):
    """Interface of a model to the decoder. A trace can replace the model."""

    spec: ModelSpec
    advisor: Advisor

    def routers(self) -> list[Router | None]:
        """Return the router of each layer, or None for a layer that does not route."""

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Turn residual streams [n, D] into logits, float32 [n, V]."""

    def prefetch(self, experts: Sequence[int]) -> None:
        """Read stored experts ahead, likeliest first."""


class ForetoldPredictor(Predictor):
    """Predicts with the router outputs of a discarded pass over the same tokens.

    Source: MoBiLE, prefetching on fallback.
    """

    def __init__(self, model: DecodingModel, recorded: dict[int, np.ndarray]) -> None:
        self._spec, self._routers, self._recorded = model.spec, model.routers(), recorded

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        following = self._spec.layer_after(state.layer, ahead)
        router, logits = self._routers[following], self._recorded.get(following)
        if router is None or logits is None or following <= state.layer:
            return None
        foresee_unimportance(state, self._spec, ahead, router.rule, logits)
        return router.rule.demand(logits)


class LossyDecoder:
    """Decode passes of one engine.

    choices: PassChoice, or a replacement that makes the decisions.
    counts: decisions so far.
    prefill: the choice for passes over prompts.
    """

    def __init__(
        self,
        modes: LossyModes,
        model: DecodingModel,
        versions: Versions,
        cache: DecidingCache | None,
        choices: MakeChoice = PassChoice,
    ) -> None:
        self.modes, self.model, self.versions, self.cache = modes, model, versions, cache
        self.counts = ModeCounts()
        self._choice = partial(choices, modes, versions, cache, self.counts)
        self.prefill = self._choice(is_prompt=True)

    def begin_sequence(self) -> None:
        """Restart the per-sequence counts of the logical cache's policy."""
        if self.cache is not None:
            self.cache.begin_sequence()

    def decode(self, run: RunPass, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Decode one token of each sequence. Returns the logits of the next tokens, float32 [T, V]."""
        self.counts.tokens += len(tokens)
        big_little = self.modes.big_little
        if big_little is None:
            return self.model.logits(run(tokens, slots, positions, self._choice()))
        recorded: dict[int, np.ndarray] = {}
        little = self._choice(is_little=True, recorded=recorded)
        logits = self.model.logits(run(tokens, slots, positions, little))
        unsure = np.flatnonzero(self.is_unsure(logits, big_little.gamma)).tolist()
        if unsure:
            self.counts.fallback_tokens += len(unsure)
            recorded_unsure = {layer: rows[unsure] for layer, rows in recorded.items()}
            again = ([row[at] for at in unsure] for row in (tokens, slots, positions))
            logits[unsure] = self.model.logits(self._again(run, recorded_unsure, *again))
        return logits

    def is_unsure(self, logits: np.ndarray, gamma: float) -> np.ndarray:
        """Return the rows to compute again, bool [T]: those in which no token has a probability of gamma.

        logits: [T, V].
        """
        unsure: np.ndarray = confidence(logits) < gamma
        return unsure

    def _again(
        self,
        run: RunPass,
        recorded: dict[int, np.ndarray],
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
    ) -> np.ndarray:
        """Compute tokens with all K experts and overwrite their keys and values.

        Reads ahead as the first pass routed.
        """
        model, advisor, full = self.model, self.model.advisor, self._choice(foretold=recorded)
        if advisor.predictor is not None:
            first = min(recorded)
            router = model.routers()[first]
            chosen = [] if router is None else np.unique(router.rule.route(recorded[first])[0]).tolist()
            known = [full.index(first, expert) for expert in chosen]
            model.prefetch(known)
            if self.cache is not None:
                self.cache.advise(known)
            advisor.foretold = ForetoldPredictor(model, recorded)
        try:
            return run(tokens, slots, positions, full)
        finally:
            advisor.foretold = None


def confidence(logits: np.ndarray) -> np.ndarray:
    """Return the greatest probability of each row, before any temperature: float32 [T, V] -> [T]."""
    with np.errstate(invalid="ignore"):  # sampling raises for infinite logits
        shifted = logits - logits.max(axis=1, keepdims=True)
        greatest: np.ndarray = 1 / exp(shifted).sum(axis=1)
    return greatest


def check_modes(modes: LossyModes, model: ModelSpec, low_versions: int) -> None:
    """Refuse modes that have no meaning for a model. Raises OptionError.

    low_versions: number of experts that have a low version.
    """
    if not modes.decides:
        return
    if model.encoder is not None:
        raise OptionError(
            f"lossy modes ({modes.to_text()}) are for decoders, and this model has an encoder", "leave them out"
        )
    if modes.big_little is not None and model.state_bytes:
        raise OptionError(
            "`big-little` runs an unsure token again, and a recurrent state has no way back", "leave it out"
        )
    routers = [layer.experts.router for layer in model.layers if layer.experts.count]
    if any(router.static is not None for router in routers):
        raise OptionError(
            f"lossy modes ({modes.to_text()}) go by the weights of a router, and here experts follow from the token",
            "leave them out",
        )
    if modes.cache_routing is not None and any(router.scoring == "sparsemixer" for router in routers):
        raise OptionError(
            "`cache-routing` needs a weight for every expert, and this router weighs the two it chose",
            "leave it out; the other modes work",
        )
    most = max(layer.experts.top_k for layer in model.layers)
    if most < 2:
        raise OptionError(
            f"lossy modes ({modes.to_text()}) never touch a token's best expert, and this model has no other",
            "leave them out",
        )
    if modes.big_little is not None and modes.big_little.experts >= most:
        raise OptionError(
            f"a little model of {modes.big_little.experts} experts is the whole one, which has {most}",
            f"write k=K/2, or less than {most}",
        )
    dynamic = modes.dynamic_precision
    if dynamic is not None and dynamic.needs_low_versions and not low_versions:
        raise OptionError(
            f"`dynamic-precision {dynamic.to_text()}` asks for low versions, and the bundle has none",
            "compile it with `--fallback-bits 2`, or take T1 = T2, which skips only",
        )

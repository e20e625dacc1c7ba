"""What workers are asked: small values that can be pickled, with handles in place of weights.

`run` gives (result, kept): the result goes to the driver, what is kept stays in the cluster until another job names
its handle. Shapes: E experts, N rows, K columns, A answer tokens, V vocabulary, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from moec.evaluation.divergence import divergence, log_softmax
from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, no_progress
from moec.evaluation.text_pairs import TokenPair
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec

from ..calibration.second_moments import SecondMoments
from ..quantization.packing import unpack
from ..quantization.unit_store import UnitBatch, UnitStore
from ..walker.units import ExpertQuantizer
from ..workspace.parallel import workers
from .wire import BundleFiles, Handle, PlainMatrix, to_plain

if TYPE_CHECKING:
    from ..reference.decode import Continuation
    from .site import Site


@dataclass(frozen=True, slots=True)
class QuantizeBatches:
    """Quantize one projection of all experts of a layer, several times. Gives each batch as [(matrix, error)].

    moments: (layer, projection) -> handle of [E, K, K] float32, empty to round without inputs. tokens: layer -> [E].
    """

    quantizer: str
    batches: tuple[UnitBatch, ...]
    moments: Mapping[tuple[int, str], Handle]
    tokens: Mapping[int, np.ndarray]

    def run(self, site: Site) -> tuple[list[list[tuple[PlainMatrix, float]]], None]:
        """On as many threads as the site has."""
        store = UnitStore(site.lowering, self._moments(site), self.quantizer)
        for layer, projection, _ in self.batches:
            store.original(layer, projection)  # read by one thread
        with workers(site.threads) as pool:
            found = pool.in_order(lambda batch: store.quantized(*batch), self.batches)
            return [[(to_plain(matrix), error) for matrix, error in batch] for batch in found], None

    def _moments(self, site: Site) -> SecondMoments | None:
        if not self.moments:
            return None
        layers, nothing = site.lowering.model.num_layers, torch.empty(0)
        inputs, intermediates, counts = [nothing] * layers, [nothing] * layers, [nothing] * layers
        for (layer, projection), values in zip(self.moments, site.fetch(list(self.moments.values())), strict=True):
            (intermediates if projection == "down" else inputs)[layer] = torch.tensor(values)
            counts[layer] = torch.tensor(self.tokens[layer])
        return SecondMoments(inputs, intermediates, counts)


@dataclass(frozen=True, slots=True)
class QuantizeExperts:
    """Quantize whole experts of a layer. Gives of each [(unit, format, matrix)].

    moments: handle of [(gate's [1, D, D], down's [1, F, F])] of each expert, float32. tokens: of each.
    """

    quantizer: ExpertQuantizer
    experts: tuple[int, ...]
    moments: Handle
    tokens: tuple[int, ...]

    def run(self, site: Site) -> tuple[list[list[tuple[UnitKey, QuantSpec, PlainMatrix]]], None]:
        """On as many threads as the site has; weights come from the site's own checkpoint."""
        (moments,) = site.fetch([self.moments])
        lowering = site.lowering  # opened by one thread

        def one(job: tuple[int, tuple[np.ndarray, np.ndarray], int]) -> list[tuple[UnitKey, QuantSpec, PlainMatrix]]:
            expert, handed, tokens = job
            units = {name: UnitKey(self.quantizer.layer, expert, name) for name in PROJECTIONS}
            weights = {name: lowering.unit(unit).float() for name, unit in units.items()}
            with torch.inference_mode():
                found = self.quantizer.run(expert, weights, [torch.tensor(part) for part in handed], tokens)
            return [(unit, spec, to_plain(matrix)) for (unit, spec), matrix in found.items()]

        with workers(site.threads) as pool:
            return list(pool.in_order(one, zip(self.experts, moments, self.tokens, strict=True))), None


@dataclass(frozen=True, slots=True)
class PriceExperts:
    """What rounding some experts of a layer costs, see layerwise/unit_prices.py. Gives squares [3, S] of each.

    handed: handle of HandedTexts.to_arrays. packed: handle of (unit, format) -> bytes of what is not left out.
    """

    layer: int
    experts: tuple[int, ...]
    specs: tuple[QuantSpec, ...]
    handed: Handle
    num_texts: int
    packed: Handle

    def run(self, site: Site) -> tuple[list[np.ndarray], None]:
        """On as many threads as the site has; weights come from the site's own checkpoint."""
        from ..walker.unit_prices import HandedTexts, expert_squares  # loads transformers, as `site.layer` does

        arrays, packed = site.fetch([self.handed, self.packed])
        handed, module = HandedTexts.from_arrays(arrays, self.num_texts), site.layer(self.layer).experts
        shapes = {name: site.lowering.model.unit_shape(self.layer, name) for name in PROJECTIONS}

        def restored(unit: UnitKey, spec: QuantSpec) -> torch.Tensor:
            return unpack(packed[(unit, spec)], *shapes[unit.projection], spec).dequantize()

        def one(expert: int) -> np.ndarray:
            return expert_squares(module, partial(UnitKey, self.layer, expert), handed, self.specs, restored)

        with workers(site.threads) as pool:
            return list(pool.in_order(one, self.experts)), None


@dataclass(frozen=True, slots=True)
class ForgetLayer:
    """Gives the memory of a layer back."""

    def run(self, site: Site) -> tuple[None, None]:
        site.forget_layer()
        return None, None


@dataclass(frozen=True, slots=True)
class Weights:
    """What a plan stores below 16 bits: name -> handle of a PlainMatrix."""

    matrices: Mapping[UnitKey | str, Handle]


@dataclass(frozen=True, slots=True)
class KeepLogProbs:
    """Keeps log probabilities [A, V] of each pair under the checkpoint's own weights. Gives nothing."""

    pairs: Sequence[TokenPair]

    def run(self, site: Site) -> tuple[None, list[np.ndarray]]:
        return None, [log_softmax(rows) for rows in site.model(None).forced_logits(self.pairs)]


@dataclass(frozen=True, slots=True)
class Divergences:
    """KL [A] to kept log probabilities, and whether the top-1 tokens agree [A], of each pair.

    weights: handle of Weights, or None. bundle: the runtime on this bundle in place of the reference model.
    """

    weights: Handle
    pairs: Sequence[TokenPair]
    log_probs: Handle
    bundle: BundleFiles | None = None

    def run(self, site: Site) -> tuple[list[tuple[np.ndarray, np.ndarray]], None]:
        engine = site.model(self.weights) if self.bundle is None else site.engine(self.bundle)
        (own,) = site.fetch([self.log_probs])
        logits = engine.forced_logits(self.pairs)
        return [divergence(log_p, found) for log_p, found in zip(own, logits, strict=True)], None


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits [A, V] float32 of each pair. weights, bundle: as of Divergences."""

    weights: Handle
    pairs: Sequence[TokenPair]
    bundle: BundleFiles | None = None

    def run(self, site: Site) -> tuple[list[np.ndarray], None]:
        engine = site.model(self.weights) if self.bundle is None else site.engine(self.bundle)
        return engine.forced_logits(self.pairs), None


@dataclass(frozen=True, slots=True)
class Scores:
    """The score of each answer behind its prompt. weights, bundle: as of Divergences."""

    weights: Handle
    pairs: Sequence[tuple[str, str]]
    bundle: BundleFiles | None = None

    def run(self, site: Site) -> tuple[list[AnswerScore], None]:
        engine = site.model(self.weights) if self.bundle is None else site.engine(self.bundle)
        return engine.answer_log_probs(self.pairs, no_progress), None


@dataclass(frozen=True, slots=True)
class Verify:
    """One pass over each batch of prompts and drafts. Gives (tokens, done) of each; keeps the states of what goes on.

    States of a continuation: keys and values of every layer, [H, T, head size]; empty where it is done.
    """

    weights: Handle
    batches: Sequence[Sequence[Continuation]]

    def run(self, site: Site) -> tuple[list[tuple[list[int], bool]], list[list[tuple[np.ndarray, np.ndarray]]]]:
        decoder = site.model(self.weights).decoder()
        with workers(site.threads) as pool:
            items = [item for batch in pool.in_order(decoder.verify, self.batches) for item in batch]
        states = [[(keys.numpy(), values.numpy()) for keys, values in item.states] for item in items]
        return [(item.tokens, item.done) for item in items], states


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode groups of verified continuations to their ends. Gives the tokens of each.

    states: for each continuation of each group, the handle that Verify's states have, and its place in them.
    """

    weights: Handle
    groups: Sequence[Sequence[Continuation]]
    states: Sequence[Sequence[tuple[Handle, int]]]

    def run(self, site: Site) -> tuple[list[list[list[int]]], None]:
        decoder = site.model(self.weights).decoder()
        handles = list(dict.fromkeys(handle for group in self.states for handle, _ in group))
        kept = dict(zip(handles, site.fetch(handles), strict=True))
        for group, places in zip(self.groups, self.states, strict=True):
            for item, (handle, at) in zip(group, places, strict=True):
                item.states = [(torch.tensor(keys), torch.tensor(values)) for keys, values in kept[handle][at]]
        with workers(site.threads) as pool:
            list(pool.in_order(lambda group: decoder.decode_rows(list(group)), self.groups))
        return [[item.tokens for item in group] for group in self.groups], None


@dataclass(frozen=True, slots=True)
class BundleGenerations:
    """Continuations of prompts by the runtime on a bundle."""

    bundle: BundleFiles
    requests: Sequence[GenerationRequest]

    def run(self, site: Site) -> tuple[list[Generation], None]:
        return site.engine(self.bundle).generate(self.requests, no_progress), None


@dataclass(frozen=True, slots=True)
class CloseBundle:
    """Give up the runtime on a bundle, by its digest, where a worker has it open."""

    digest: str

    def run(self, site: Site) -> tuple[None, None]:
        """Its memory and files are free again."""
        site.close_engine(self.digest)
        return None, None

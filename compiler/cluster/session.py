"""A compile's hold on a cluster: what it refuses before work, and what its stages use in place of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..checkpoint.url import is_url
from ..families import Lowering
from ..quantization.unit_store import UnitStore
from ..reference.model import ReferenceModel
from ..request.ports import BundleEngine
from ..request.request import CompileRequest
from ..sensitivity.fisher import asks_gradients
from ..sensitivity.trials import TaskData
from ..walker.memory import PROCESS_BYTES, certifying_bytes, gradients_bytes, layer_weights, quantizing_bytes
from ..walker.planning import runtime_bytes
from ..workspace.journal import Journal
from .jobs import CloseBundle, ForgetLayer
from .ray_pool import Pool, connected
from .remote import RemoteBundle, RemoteEngine, RemoteModel, experts_priced_by, experts_quantized_by, quantized_by
from .trials import ClusterTrials

_WORKER_BYTES_PER_WEIGHT = 4 + 2 + 2
"""The reference model in float32, 16-bit originals of what a plan exchanges, a bundle of at most 16 bits."""


_ANSWERING_BYTES_PER_WEIGHT = 2 + 1
"""On disk while two bundles answer layer by layer: the checkpoint's own weights, and a plan of at most 8 bits."""


def check_cluster(kind: str, model: ModelSpec) -> None:
    """Raise OptionError where a cluster would have nothing to do."""
    if kind == "uniform":
        raise OptionError("`--cluster` has no effect beside `--uniform`, which searches nothing", "leave it out")
    if model.encoder is not None:
        raise OptionError(
            "`--cluster` hands out passes of a decoder alone, and the model has an encoder", "leave it out"
        )


def worker_bytes(model: ModelSpec) -> int:
    """What a worker takes of memory at most, beside its passes."""
    return PROCESS_BYTES + _WORKER_BYTES_PER_WEIGHT * _weights(model)


def _weights(model: ModelSpec) -> int:
    outside = sum(prod(shape) for name, shape in model.dense_shapes().items() if not name.startswith("layers."))
    return outside + sum(layer_weights(model, layer) for layer in range(model.num_layers))


def layer_worker_bytes(model: ModelSpec, specs: Sequence[QuantSpec], cpus: int) -> int:
    """What a worker takes of memory at most that quantizes experts alone, one on each of its CPUs."""
    moments = 4 * (model.hidden_size**2 + max(layer.experts.width for layer in model.layers) ** 2)
    return PROCESS_BYTES + cpus * (quantizing_bytes(model, specs) + moments)


class ClusterSession:
    """What the stages ask for."""

    def __init__(self, pool: Pool, room_bytes: int) -> None:
        """room_bytes: that a runtime of its own would have on this machine."""
        self._pool, self._room_bytes = pool, room_bytes
        self.quantize, self.quantize_experts = quantized_by(pool), experts_quantized_by(pool)
        self.price_experts = experts_priced_by(pool)
        self._model: RemoteModel | None = None

    def forget_layers(self) -> None:
        """Workers give up the layer that they priced experts of."""
        self._pool.on_all(ForgetLayer())

    def trials(
        self,
        reference: ReferenceModel,
        store: UnitStore,
        tasks: Sequence[TaskData],
        kl_items: int,
        progress: Progress,
        journal: Journal,
    ) -> ClusterTrials:
        """Trials on workers; `reference` stays for tokens."""
        self._model = RemoteModel(self._pool, reference)
        return ClusterTrials(self._model, store, tasks, kl_items, progress, journal)

    def bundle(self, partial: Path) -> AbstractContextManager[BundleEngine]:
        """The runtime on an unpublished bundle, on workers."""
        if self._model is None:
            raise RuntimeError("a bundle is certified against the reference model of the trials")
        return nullcontext(RemoteBundle(self._model, partial))

    @contextmanager
    def open_runtime(self, partial: Path, memory_bytes: int) -> Iterator[BundleEngine]:
        """The same beside no reference model, as a `certify.OpenRuntime`, closed on every worker afterwards.

        memory_bytes: of this machine; a worker takes that share of its own node's.
        """
        engine = RemoteEngine(self._pool, partial, min(1.0, memory_bytes / self._room_bytes))
        try:
            yield engine
        finally:
            self._pool.on_all(CloseBundle(engine.bundle.digest))


@contextmanager
def cluster_session(
    request: CompileRequest, lowering: Lowering, layer_specs: Sequence[QuantSpec] | None
) -> Iterator[ClusterSession]:
    """Workers for the length of a compile. layer_specs: formats of one that goes layer by layer, None of any other.

    Raises as ray_pool.connected.
    """
    checkpoint, model = lowering.checkpoint, lowering.model

    sensitivity = request.options.sensitivity
    answers = layer_specs is not None and request.options.target.kind == "loss"

    def need(cpus: int) -> int:
        if layer_specs is None:
            return worker_bytes(model)
        # The certificate has two bundles open, one of them at 16 bits.
        runtimes = 2 * certifying_bytes(model, tokens=0) if answers else 0
        prices = gradients_bytes(model, 0, layer_specs, cpus) if asks_gradients(sensitivity, model) else 0
        return max(layer_worker_bytes(model, layer_specs, cpus), prices, runtimes)

    # A relative path means another folder on another machine; what is no folder here is a hub id.
    is_folder = not is_url(request.source) and Path(request.source).expanduser().is_dir()
    source = str(checkpoint.root.resolve()) if is_folder else request.source
    address = request.cluster or "auto"
    bundles = _ANSWERING_BYTES_PER_WEIGHT * _weights(model) if answers else 0
    with connected(address, source, checkpoint, need, bundles, request.open_runtime, request.talk) as pool:
        yield ClusterSession(pool, runtime_bytes(model, request.memory_limit_bytes))

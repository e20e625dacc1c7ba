"""A compile's hold on a cluster: what it refuses before work, and what its stages use in place of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..certify import BundleEngine
from ..checkpoint_url import is_url
from ..families import Lowering
from ..journal import Journal
from ..layerwise.memory import PROCESS_BYTES, layer_weights, quantizing_bytes
from ..reference import ReferenceModel
from ..request import CompileRequest
from ..trials import Progress, TaskData
from ..unit_store import UnitStore
from .ray_pool import Pool, connected
from .remote import RemoteBundle, RemoteEngine, RemoteModel, experts_quantized_by, quantized_by
from .trials import ClusterTrials

_WORKER_BYTES_PER_WEIGHT = 4 + 2 + 2
"""The reference model in float32, 16-bit originals of what a plan exchanges, a bundle of at most 16 bits."""


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
    weights = sum(layer_weights(model, layer) for layer in range(model.num_layers))
    outside = sum(prod(shape) for name, shape in model.dense_shapes().items() if not name.startswith("layers."))
    return PROCESS_BYTES + _WORKER_BYTES_PER_WEIGHT * (weights + outside)


def layer_worker_bytes(model: ModelSpec, specs: Sequence[QuantSpec], cpus: int) -> int:
    """What a worker takes of memory at most that quantizes experts alone, one on each of its CPUs."""
    moments = 4 * (model.hidden_size**2 + max(layer.experts.width for layer in model.layers) ** 2)
    return PROCESS_BYTES + cpus * (quantizing_bytes(model, specs) + moments)


class ClusterSession:
    """What the stages ask for."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.quantize, self.quantize_experts = quantized_by(pool), experts_quantized_by(pool)
        self._model: RemoteModel | None = None

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

    def open_runtime(self, partial: Path, memory_bytes: int) -> AbstractContextManager[BundleEngine]:
        """The same beside no reference model, as a `certify.OpenRuntime`: a worker takes what memory its node has."""
        return nullcontext(RemoteEngine(self._pool, partial))


@contextmanager
def cluster_session(
    request: CompileRequest, lowering: Lowering, layer_specs: Sequence[QuantSpec] | None
) -> Iterator[ClusterSession]:
    """Workers for the length of a compile. layer_specs: formats of one that goes layer by layer, None of any other.

    Raises as ray_pool.connected.
    """
    checkpoint, model = lowering.checkpoint, lowering.model

    def need(cpus: int) -> int:
        return worker_bytes(model) if layer_specs is None else layer_worker_bytes(model, layer_specs, cpus)

    # A relative path means another folder on another machine; what is no folder here is a hub id.
    is_folder = not is_url(request.source) and Path(request.source).expanduser().is_dir()
    source = str(checkpoint.root.resolve()) if is_folder else request.source
    address = request.cluster or "auto"
    with connected(address, source, checkpoint, need, request.open_runtime, request.talk) as pool:
        yield ClusterSession(pool)

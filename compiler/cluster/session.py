"""The cluster of a compile: what is refused before work, and the workers that its stages use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moec.evaluation.engine import TextEngine
from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from moec.profiles.weight_counts import all_weights

from ..checkpoint.url import is_url
from ..families import Lowering
from ..request.options import DEFAULT_TORCH_DEVICE
from ..request.request import CompileRequest
from ..walker.memory import COMPILE_PROCESS_BYTES, certifying_bytes, gradients_bytes, quantizing_bytes
from ..walker.texts import AnswerTexts
from .jobs import CloseBundle, ForgetLayer
from .ray_pool import Pool, connected
from .remote import RemoteAnswers, RemoteEngine, experts_priced_by, experts_quantized_by

_ANSWERING_BYTES_PER_WEIGHT = 2 + 1
"""Disk of two bundles that answer: the checkpoint's own weights, and a plan of at most 8 bits."""


def check_cluster(kind: str, torch_device: str = DEFAULT_TORCH_DEVICE) -> None:
    """Raise OptionError where a cluster would have nothing to do, or where its workers compute on another device."""
    if kind == "uniform":
        raise OptionError("`--cluster` has no effect without a search", "leave it out")
    if torch_device != DEFAULT_TORCH_DEVICE:
        raise OptionError(
            f"the workers of `--cluster` compute on their CPUs, found `--torch-device {torch_device}`",
            "leave one of the two out",
        )


def layer_worker_bytes(model: ModelSpec, specs: Sequence[QuantSpec], cpus: int) -> int:
    """Return the maximum memory of a worker that quantizes one expert on each of its CPUs."""
    moments = 4 * (model.hidden_size**2 + max(layer.experts.width for layer in model.layers) ** 2)
    return COMPILE_PROCESS_BYTES + cpus * (quantizing_bytes(model, specs) + moments)


class ClusterSession:
    """The workers of a compile.

    room_bytes: memory that a runtime on this machine would have.
    """

    def __init__(self, pool: Pool, room_bytes: int) -> None:
        self._pool, self._room_bytes = pool, room_bytes
        self.quantize_experts, self.price_experts = experts_quantized_by(pool), experts_priced_by(pool)

    def forget_layers(self) -> None:
        """Let workers give back the memory of loaded layers."""
        self._pool.on_all(ForgetLayer())

    def measure_answers(self, answers: AnswerTexts) -> RemoteAnswers:
        """Return what measures answers on workers."""
        return RemoteAnswers(self._pool, answers)

    @contextmanager
    def open_runtime(self, partial: Path, memory_bytes: int) -> Iterator[TextEngine]:
        """Open the runtime on an unpublished bundle, on workers. It is closed on every worker afterwards.

        memory_bytes: of this machine. A worker takes that share of its own node's memory.
        """
        self.forget_layers()
        engine = RemoteEngine(self._pool, partial, min(1.0, memory_bytes / self._room_bytes))
        try:
            yield engine
        finally:
            self._pool.on_all(CloseBundle(engine.bundle.digest))


@contextmanager
def cluster_session(
    request: CompileRequest, lowering: Lowering, specs: Sequence[QuantSpec], room_bytes: int
) -> Iterator[ClusterSession]:
    """Start workers for a compile.

    specs: formats in which units are quantized.
    room_bytes: memory that a runtime on this machine would have.
    Raises the errors of ray_pool.connected.
    """
    checkpoint, model = lowering.checkpoint, lowering.model

    def need(cpus: int) -> int:
        prices = gradients_bytes(model, 0, 0, specs, cpus)
        return max(layer_worker_bytes(model, specs, cpus), prices, certifying_bytes(model, 0))

    # A relative path is another folder on another machine. A source that is no folder here is a hub id.
    is_folder = not is_url(request.source) and Path(request.source).expanduser().is_dir()
    source = str(checkpoint.root.resolve()) if is_folder else request.source
    bundles = _ANSWERING_BYTES_PER_WEIGHT * all_weights(model)
    address = request.cluster or "auto"
    with connected(address, source, checkpoint, need, bundles, request.open_runtime, request.talk) as pool:
        yield ClusterSession(pool, room_bytes)

"""The reference model of a family that transformers lacks: its stand-in, with every weight set by name."""

from __future__ import annotations

from transformers.initialization import no_init_weights

from moec.manifests.errors import CheckpointError

from ..checkpoint.stand_ins import build_model, read_config
from ..families import Lowering
from .network import Network, network_of, quiet_transformers
from .weights import WeightName, weight_view


def load_stand_in(lowering: Lowering) -> Network:
    """Load the checkpoint's own 16-bit weights in float32 arithmetic; see load_network. Raises CheckpointError."""
    checkpoint = lowering.checkpoint
    _check_tensors(lowering)
    with quiet_transformers(checkpoint.root, "build a model like this one"), no_init_weights():
        model = build_model(read_config(checkpoint), checkpoint)
    model.tie_weights()  # transformers skips this for weights that are not initialised
    network = network_of(model, lowering, list(lowering.model.expert_layers))
    names: list[WeightName] = [*lowering.dense, *lowering.units]
    for name in names:
        weight = lowering.dense_weight(name) if isinstance(name, str) else lowering.unit(name)
        view = weight_view(network, name)
        view.copy_(weight.reshape(view.shape))
    return network


def _check_tensors(lowering: Lowering) -> None:
    """Raise CheckpointError if a weight is missing or has another shape."""
    tensors = lowering.checkpoint.tensors
    sources = {source.name: source.shape for source in (*lowering.dense.values(), *lowering.units.values())}
    faults = sorted(name for name, shape in sources.items() if name not in tensors or tensors[name].shape != shape)
    if faults:
        raise CheckpointError(
            f"`{lowering.checkpoint.root}`: {len(faults)} weights are missing or have another shape, "
            f"first `{faults[0]}`",
            "copy the checkpoint again",
        )

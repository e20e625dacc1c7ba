"""The part of a model that stays in memory while a compile passes through its layers, and the size of its texts.

One layer at a time is loaded, computed and quantized. The 16-bit weights of the first layers may stay in memory, so
that later passes read them from there. Which layers stay changes no bit of a result. The size of the texts does.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.manifests.model import ModelSpec

from .memory import layer_weights, outside_weights


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the texts that pass through the layers, in tokens. They bound the residual streams in memory.

    calibration: tokens of all calibration texts.
    probe: tokens of the texts on which the error of each layer is measured.
    gradients: tokens of the texts of the gradients.
    answers: tokens of the validation texts of all tasks, prompts included.
    held_out: tokens of the held-out texts of one task, prompts included.
    """

    calibration: int
    probe: int
    gradients: int
    answers: int
    held_out: int

    def scored(self, tasks: int) -> int:
        """Return the tokens of all scored texts."""
        return self.answers + tasks * self.held_out


SMALL_TEXTS = TextLimits(calibration=65_536, probe=512, gradients=16_384, answers=16_384, held_out=16_384)
"""Texts of a compile whose memory does not hold the model."""
LARGE_TEXTS = TextLimits(calibration=131_072, probe=2_048, gradients=16_384, answers=65_536, held_out=65_536)
"""Texts of a compile whose memory holds the model."""


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """The layers of a model that stay in memory between the passes of a compile.

    count: number of layers, from the first, whose 16-bit weights stay.
    holds_model: all of them do, with room for LARGE_TEXTS.
    """

    count: int
    holds_model: bool

    @property
    def texts(self) -> TextLimits:
        """Sizes of the texts."""
        return LARGE_TEXTS if self.holds_model else SMALL_TEXTS


NOTHING_KEPT = KeptLayers(0, holds_model=False)


def resident_bytes(model: ModelSpec, layers: int) -> int:
    """Return the memory of the 16-bit weights of the first layers. The embedding and the norms stay with the first."""
    outside = outside_weights(model) if layers else 0
    return 2 * (outside + sum(layer_weights(model, layer) for layer in range(layers)))


def fitting_layers(model: ModelSpec, free_bytes: int) -> int:
    """Return how many layers, from the first, fit into some memory."""
    count = 0
    while count < model.num_layers and resident_bytes(model, count + 1) <= free_bytes:
        count += 1
    return count

"""Importance data of experts, as llama.cpp's tool counts them: mean squares of inputs.

Shapes: E experts, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.reference.expert_module import intermediate
from moec.compiler.walker.texts import TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers

from ..example import Example


def importance_of(example: Example, texts: TokenTexts) -> dict[tuple[int, str], Tensor]:
    """Return the mean squares of the inputs of each expert, [E, K], by layer and projection.

    An expert without tokens has ones.
    """
    slot, moments = example.slot, dict[tuple[int, str], Tensor]()
    states = TextStates.begin(texts, slot.embed, tokens_per_batch=1)  # so that no padding is counted
    for layer in range(example.model.num_layers):
        slot.load(layer)
        module, held = slot.experts, list[tuple[Tensor, Tensor]]()
        handle = module.register_forward_pre_hook(lambda _, given, held=held: held.append(given[:2]))
        with workers(1) as pool:
            slot.run([states], pool)
        handle.remove()
        inputs, chosen = (torch.cat(parts) for parts in zip(*held, strict=True))
        for expert in range(module.num_experts):
            read = inputs[torch.where(chosen == expert)[0]]
            for projection, values in (("gate", read), ("up", read), ("down", intermediate(module, expert, read))):
                means = moments.setdefault((layer, projection), torch.ones(module.num_experts, values.shape[1]))
                if len(values):
                    means[expert] = values.square().mean(0)
    return moments

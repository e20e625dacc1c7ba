"""The example model one layer at a time, as a compile passes it. Several benchmarks use it.

Shapes: D hidden, F expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moec.compiler.calibration.collect import ActivationStatistics, choose_texts, count_statistics
from moec.compiler.calibration.layer_inputs import LayerInputs, calibrate_layer
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.families import lower
from moec.compiler.request.plan import plain_plan
from moec.compiler.sensitivity.answer_walk import AnswerWalk
from moec.compiler.sensitivity.sensitivity import dense_formats
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import AnswerTexts, TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers
from moec.evaluation.data import load_splits
from moec.evaluation.tasks import Item
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.quant import QuantSpec

SEED = 0


def silent(done: int, total: int) -> None:
    """Show no progress."""


class Example:
    """A model without an encoder, and the texts of one task.

    model, data: folders.
    task: None for the first task.
    """

    def __init__(self, model: str, data: str, task: str | None = None) -> None:
        checkpoint = open_checkpoint(model)
        self.splits, self.lowering = load_splits(data, task), lower(checkpoint)
        self.model = self.lowering.model
        self.slot = LoadedLayer(self.lowering, self.model.num_layers)
        self.plain = plain_plan(self.model, self.lowering.spec_16bit, "gptq")
        self._tokenizer = load_tokenizer(checkpoint.root)

    def pairs(self, items: Sequence[Item]) -> list[TokenPair]:
        """Return the tokens of prompts and answers."""
        task = self.splits.task
        return encode_pairs(self._tokenizer, [(task.prompt(item, ()), task.answer(item)) for item in items])

    def texts(self, items: Sequence[Item]) -> TokenTexts:
        """Return prompts with their answers, in the order of a calibration."""
        texts = TokenTexts([prompt + answer for prompt, answer in self.pairs(items)])
        return choose_texts(texts, self.model.original_positions, SEED, texts.num_tokens)[0]

    def answers(self, items: Sequence[Item]) -> AnswerTexts:
        """Return texts whose answers are scored, their end tokens included."""
        pairs = self.pairs(items)
        rows, answers, counts = forced_rows(pairs, self.model.eos_token_ids[:1])
        targets = [answer[len(answer) - count :] for answer, count in zip(answers, counts, strict=True)]
        return AnswerTexts(TokenTexts(rows), counts, targets, pairs, [len(pairs)])

    def walk(self, items: Sequence[Item]) -> AnswerWalk:
        """Return what measures the answers of these items under other weights."""
        return AnswerWalk(lambda: self.slot, self.answers(items), torch.get_num_threads(), silent)

    def calibrated(self, texts: TokenTexts) -> tuple[list[LayerInputs], ActivationStatistics]:
        """Return what texts hand to the experts of each layer, and the counts of it."""
        inputs, counts = self._passed(texts, has_moments=True)
        return inputs, count_statistics(self.model, texts, SEED, counts)

    def routes(self, texts: TokenTexts) -> np.ndarray:
        """Return the experts that each token chooses, text after text, uint16 [T, L, K]."""
        _, counts = self._passed(texts, has_moments=False)
        return np.stack([counted["routes"] for counted in counts], axis=1)

    def _passed(self, texts: TokenTexts, has_moments: bool) -> tuple[list[LayerInputs], list[dict[str, np.ndarray]]]:
        inputs, counts = list[LayerInputs](), []
        states = TextStates.begin(texts, self.slot.embed)
        with workers(torch.get_num_threads()) as pool:
            for layer in range(self.model.num_layers):
                self.slot.load(layer)
                handed, counted = calibrate_layer(self.slot, states, pool, has_moments)
                inputs.append(handed)
                counts.append(counted)
        return inputs, counts

    def dense(self, bitwidth: int) -> Mapping[str, QuantSpec]:
        """Return formats that give all dense weights one bitwidth."""
        return dense_formats(self.plain, (bitwidth,), 64, self.lowering.float_type)[0]


def moments_of(inputs: LayerInputs, projection: str) -> Tensor:
    """Return the second moments of a projection's inputs, [E, D, D] or [E, F, F]."""
    return inputs.middle_moments if projection == "down" else inputs.input_moments

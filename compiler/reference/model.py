"""The reference model: the checkpoint in transformers, with its own 16-bit weights and float32 arithmetic.

It is the baseline of every measured loss. Plans are tried on it: expert weights and dense weights can be exchanged for
dequantized ones, and restored. It implements `moec.evaluation.engine.TextEngine`.
Shapes: A answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, no_progress
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.errors import ContextOverflow
from moec.manifests.model import ModelSpec
from moec.manifests.progress import Progress

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.stand_ins import is_stood_in
from ..checkpoint.tokenizer import load_tokenizer
from ..families import Lowering, lower
from ..workspace.parallel import workers
from .decode import Continuation, GreedyDecoder
from .network import TOKENS_PER_FORWARD, TORCH_TYPES, Network, length_batches, load_network
from .seq2seq import divided_pairs, load_seq2seq_network
from .stand_in import load_stand_in
from .weights import WeightName, WeightStore

Score = Callable[[Tensor, Tensor], Tensor]
"""Hidden states that predict the answer tokens [A, D], and these tokens [A] -> one row per token."""


class ReferenceModel:
    """A checkpoint that generates and scores text, and whose weights can be exchanged.

    model: the ModelSpec of the checkpoint.
    network: the transformers model.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        """Load a model folder.

        threads: number of passes that run in parallel, or None for torch's number of threads.
        Raises CheckpointError if the folder holds no known family, weights are damaged or missing, or there is no fast
        tokenizer.
        """
        self._threads = threads or torch.get_num_threads()
        lowering = lower(open_checkpoint(str(path)))
        self.model: ModelSpec = lowering.model
        self.network: Network = _load(lowering)
        self._tokenizer = load_tokenizer(lowering.checkpoint.root)
        self._weights = WeightStore(self.network, TORCH_TYPES[lowering.float_type])

    # -- text -------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_pair(self, prompt: str, answer: str) -> TokenPair:
        """Return the tokens of a prompt and of its answer."""
        return self.encode_pairs([(prompt, answer)])[0]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Return the tokens of prompts and answers; see evaluation/text_pairs.py."""
        return encode_pairs(self._tokenizer, pairs, is_joint=self.model.encoder is None)

    def divide(self, pairs: Sequence[TokenPair]) -> tuple[list[list[int]], list[TokenPair]]:
        """Split each pair into the tokens for an encoder and the pair for the decoder.

        Without an encoder its tokens are empty, and the pairs do not change.
        Raises InputError if an encoder's prompt is empty.
        """
        prompts, decoded = divided_pairs(self.model, pairs)
        return prompts or [[] for _ in pairs], decoded

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress = no_progress) -> list[Generation]:
        """Continue each prompt greedily. Drafts only save time. The end token is not counted.

        A continuation ends at the end of the context.
        Raises ContextOverflow if a prompt leaves no room.
        """
        items = self.continuations(requests)
        with workers(self._threads) as pool:
            self.decoder().run(items, pool, progress)
        return self.generations(items)

    def continuations(self, requests: Sequence[GenerationRequest]) -> list[Continuation]:
        """Return the tokens of prompts and drafts, before decoding. Raises ContextOverflow."""
        pairs = self.encode_pairs([(request.prompt, request.draft or "") for request in requests])
        items = []
        for prompt, _ in pairs:
            if not 0 < len(prompt) < self.model.original_positions:
                raise ContextOverflow(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {self.model.original_positions - 1}",
                    "shorten the prompt" if prompt else "write a prompt",
                )
        for request, source, (prompt, draft) in zip(requests, *self.divide(pairs), strict=True):
            limit = min(request.max_new_tokens, self.model.original_positions - len(prompt))
            items.append(Continuation(prompt, draft[:limit], limit, request.stop, source=source))
        return items

    def decoder(self) -> GreedyDecoder:
        """Return the decoder that completes continuations."""
        return GreedyDecoder(self.network, self.model.eos_token_ids, self.decode)

    def generations(self, items: Sequence[Continuation]) -> list[Generation]:
        """Return the texts of completed continuations."""
        return [
            Generation(self.decode(item.tokens), len(item.tokens), len(item.source or item.prompt)) for item in items
        ]

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress = no_progress) -> list[AnswerScore]:
        """Score each answer given its prompt, teacher-forced, without the end token.

        If no token precedes an answer, its first token is not scored.
        Raises ContextOverflow if prompt and answer exceed the context.
        """
        scores = [AnswerScore(0.0, 0)] * len(pairs)
        encoded = self.encode_pairs(pairs)
        for indices, counts, losses in self.answer_nll(encoded, with_end=False, progress=progress):
            for index, count, part in zip(indices, counts, torch.split(losses, counts), strict=True):
                scores[index] = AnswerScore(float(part.double().sum()), count)
        return scores

    # -- tokens -----------------------------------------------------------------------------------------------------

    def forced_logits(
        self, pairs: Sequence[TokenPair], with_end: bool = True, progress: Progress = no_progress
    ) -> list[np.ndarray]:
        """Return the logits that predict the answer tokens, float32 [A, V] for each pair.

        with_end: the end token counts as the last token of every answer.
        Raises ContextOverflow.
        """
        logits = [np.empty((0, self.model.vocab_size), np.float32)] * len(pairs)

        def score(hidden: Tensor, targets: Tensor) -> Tensor:
            return self.network.logits(hidden)

        for indices, counts, rows in self._forced(pairs, with_end, score, progress):
            for index, part in zip(indices, torch.split(rows, counts), strict=True):
                logits[index] = part.numpy()
        return logits

    def answer_nll(
        self, pairs: Sequence[TokenPair], with_end: bool = True, progress: Progress = no_progress
    ) -> Iterator[tuple[list[int], list[int], Tensor]]:
        """Yield -log p of every answer token in nats, per batch: (pairs, tokens of each, losses float32 [sum])."""

        def score(hidden: Tensor, targets: Tensor) -> Tensor:
            losses, start = [], 0
            for chunk in self.network.logit_chunks(hidden):
                wanted = targets[start : start + len(chunk)]
                losses.append(torch.nn.functional.cross_entropy(chunk, wanted, reduction="none"))
                start += len(chunk)
            return torch.cat(losses)

        return self._forced(pairs, with_end, score, progress)

    def _forced(
        self, pairs: Sequence[TokenPair], with_end: bool, score: Score, progress: Progress
    ) -> Iterator[tuple[list[int], list[int], Tensor]]:
        """Run teacher-forced passes over prompts and answers, batched by length. Apply `score` to the answer tokens.

        Yields (pairs, scored tokens of each, result of `score`). Raises ContextOverflow.
        """
        sources, decoded = self.divide(pairs)
        rows, answers, scored = forced_rows(decoded, self.model.eos_token_ids[:1] if with_end else ())
        usable = [index for index, count in enumerate(scored) if count]
        done = len(pairs) - len(usable)
        self._check_context([*rows, *sources])

        @torch.inference_mode()
        def scores(chosen: list[int]) -> tuple[list[int], list[int], Tensor]:
            indices = [usable[at] for at in chosen]
            counts = [scored[index] for index in indices]
            hidden = self.network.hidden([rows[i] for i in indices], prompts=[sources[i] for i in indices])
            spans = [
                states[len(rows[index]) - count : len(rows[index])]
                for states, index, count in zip(hidden, indices, counts, strict=True)
            ]
            targets = [token for index, count in zip(indices, counts, strict=True) for token in answers[index][-count:]]
            return indices, counts, score(torch.cat(spans), torch.tensor(targets))

        batches = length_batches([len(rows[at]) + len(sources[at]) for at in usable], TOKENS_PER_FORWARD)
        with workers(self._threads) as pool:
            for indices, counts, result in pool.in_order(scores, batches):
                yield indices, counts, result
                done += len(indices)
                progress(done, len(pairs))

    @property
    def _context_name(self) -> str:
        return "context" if self.model.original_positions == self.model.max_positions else "original context"

    def _check_context(self, rows: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, rows), default=0)
        # Beyond the original context, transformers and the runtime rotate differently (families/longrope.py).
        if longest > self.model.original_positions:
            raise ContextOverflow(
                f"a text has {longest} tokens, "
                f"the {self._context_name} of the model has {self.model.original_positions}",
                "shorten the text",
            )

    # -- weights ----------------------------------------------------------------------------------------------------

    def original_weight(self, name: WeightName) -> Tensor:
        """Return the checkpoint's own weight in float32.

        name: a UnitKey or a canonical dense name.
        Raises KeyError.
        """
        return self._weights.original(name)

    def set_weight(self, name: WeightName, weight: Tensor) -> None:
        """Compute with this weight until `restore`.

        name: a UnitKey or a canonical dense name.
        Raises KeyError.
        Raises ValueError for another shape.
        """
        self._weights.set(name, weight)

    def restore(self) -> None:
        """Restore every weight of the checkpoint, bit for bit."""
        self._weights.restore()

    def weights(self, mapping: Mapping[WeightName, Tensor]) -> AbstractContextManager[None]:
        """Compute with these weights inside a `with` block, and restore the previous weights after it."""
        return self._weights.exchanged(mapping)


def _load(lowering: Lowering) -> Network:
    """Return the network of a checkpoint. Raises CheckpointError."""
    if lowering.model.encoder is not None:
        return load_seq2seq_network(lowering)
    return load_stand_in(lowering) if is_stood_in(lowering.checkpoint) else load_network(lowering)

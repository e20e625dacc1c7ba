"""Engines for evaluation with one protocol: the runtime on a bundle, or on a checkpoint as a temporary bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest
from moec.evaluation.engine import Take as TakeResult
from moec.evaluation.long_items import Context, FittedItems, fit_items
from moec.evaluation.tasks import Item, Task
from moec.evaluation.text_pairs import TokenPair, encode_pairs
from moec.manifests.errors import ContextOverflow
from moec.manifests.progress import Progress
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.manifests.self_test import SelfTest
from moec.runtime.engine.batch import Take, force_answers, forced_logits, generate_many
from moec.runtime.engine.continuations import score_answers
from moec.runtime.engine.self_test import make_self_test
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.prefetch.learned_routers import RecordedRouting, recorded_routers

from ..options.opening import open_engine, with_fitting_slots
from ..terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine


class BundleEngine:
    """A runtime Engine as a TextEngine of the evaluation. Texts become tokens as in a compile.

    decodes: score given answers token by token. Lossy modes do that, so the times are comparable.
    divides: generate with as many slots as fit, instead of those of the options.
    """

    def __init__(self, engine: Engine, decodes: bool = False, divides: bool = True) -> None:
        self.engine, self._decodes, self._divides = engine, decodes, divides

    def generate(self, requests: Sequence[GenerationRequest], take: TakeResult[Generation]) -> None:
        """Continue each prompt greedily, up to a stop text or the end of the context. The end token is not counted.

        Drafts save time and change no result.
        Raises ContextOverflow if a prompt fills the context.
        """
        pairs = self.encode_pairs([(request.prompt, request.draft or "") for request in requests])
        context, limits = self.engine.memory.context, []
        for request, (prompt, _) in zip(requests, pairs, strict=True):
            if not 0 < len(prompt) < context:
                raise ContextOverflow(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {context - 1}",
                    "shorten it or raise `--context`" if prompt else "write a prompt",
                )
            limits.append(self.engine.new_tokens_limit(prompt, request.max_new_tokens + 1) - 1)
        prompts, drafts = [prompt for prompt, _ in pairs], [draft for _, draft in pairs]
        stops = [request.stop for request in requests]

        def take_tokens(index: int, answer: list[int]) -> None:
            text = self.engine.tokenizer.decode(answer)
            is_cut = len(answer) == limits[index] and not any(mark in text for mark in stops[index])
            take(index, Generation(text, len(answer), len(prompts[index]), is_cut))

        generate_many(self.engine, prompts, drafts, limits, take_tokens, stops, self._divides)

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: TakeResult[AnswerScore]) -> None:
        """Score each answer given its prompt, teacher-forced, without the end token.

        After an empty prompt without special tokens, the first token is not scored.
        """
        encoded = self.encode_pairs(pairs)
        scored = list[int]()
        for at, (prompt, answer) in enumerate(encoded):
            if answer and len(prompt) + len(answer) > 1:
                scored.append(at)
            else:
                take(at, AnswerScore(0.0, 0))
        for index, total in score_answers(self.engine, [encoded[at] for at in scored], self._decodes):
            take(scored[index], AnswerScore(-total.log_prob, total.tokens))

    def forced_logits(self, pairs: Sequence[TokenPair]) -> list[np.ndarray]:
        """Return the logits [A, V] float32 that predict each answer token, and the end token."""
        collected = dict(forced_logits(self.engine, self._ended(pairs), self._decodes))
        return [collected[index] for index in range(len(pairs))]

    def force_answers(self, pairs: Sequence[TokenPair], take: Take, progress: Progress) -> None:
        """Hand the logits that predict each answer token, and the end token, to `take` as they are computed."""
        done = 0
        for finished in force_answers(self.engine, self._ended(pairs), take, self._decodes):
            done += len(finished)
            progress(done, len(pairs))

    def _ended(self, pairs: Sequence[TokenPair]) -> list[TokenPair]:
        """Return pairs with the end token after each answer."""
        end = list(self.engine.bundle.manifest.model.eos_token_ids[:1])
        return [(prompt, [*answer, *end]) for prompt, answer in pairs]

    def self_test(self) -> SelfTest | None:
        """Return a few texts and the digest of their logits, for `moec verify --self-test`; None with numpy kernels."""
        return make_self_test(self.engine)

    def recorded_routing(self, texts: Iterable[Sequence[int]]) -> Iterator[dict[int, RecordedRouting]]:
        """Yield the routing of the beginning of each text by layer, as much of it as one pass has."""
        engine, model = self.engine, self.engine.model
        most = min(MAX_PASS_TOKENS, engine.memory.context)
        with recorded_routers(model.advisor, model.router_norms(), model.routers()) as recorder:
            for tokens in texts:
                recorder.layers = {}
                engine.begin_sequence()
                engine.prefill(tokens[:most])
                yield recorder.layers

    def fit_items(self, task: Task, items: Sequence[Item], shots: Sequence[Item], policy: str) -> FittedItems:
        """Return the items that fit the context of the engine. policy: see `evaluation/long_items.py`."""
        has_encoder = self.engine.bundle.manifest.model.encoder is not None
        context = Context(self.engine.memory.context, self._encode, has_encoder, self._has_memory_for)
        return fit_items(task, items, shots, context, policy)

    def _has_memory_for(self, text: str) -> bool:
        """Return whether a text can be encoded within the budget."""
        try:
            self.engine.tokenizer.check_size(text, self.engine.memory)
        except ContextOverflow:
            return False
        return True

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Return the tokens of prompts and answers, see evaluation/text_pairs.py.

        Raises ContextOverflow for a text that is too long to encode.
        """
        for pair in pairs:
            for text in pair:
                self.engine.tokenizer.check_size(text, self.engine.memory)
        return self._encode(pairs)

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Return the tokens of prompts and answers, which are already known to be short enough to encode."""
        has_encoder = self.engine.bundle.manifest.model.encoder is not None
        return encode_pairs(self.engine.tokenizer, pairs, is_joint=not has_encoder)


@contextmanager
def bundle_engine(
    path: Path, options: RuntimeOptions, kernels: str | None = None, shrinks: bool = False, allow_partial: bool = False
) -> Iterator[BundleEngine]:
    """Open a bundle for evaluation.

    shrinks: halve the slots until they fit into the memory budget.
    allow_partial: whether to open a bundle that is not certified.
    Raises the errors of `open_engine`.
    """
    opened = with_fitting_slots(
        lambda fitting: open_engine(path, fitting, kernels, allow_partial=allow_partial), options, shrinks
    )
    with opened as engine:
        yield BundleEngine(engine, divides=shrinks)


@contextmanager
def checkpoint_engine(
    path: Path, options: RuntimeOptions, kernels: str | None = None, shrinks: bool = False
) -> Iterator[BundleEngine]:
    """Write a model folder as a temporary bundle with its own 16-bit weights, and open it like `bundle_engine`.

    Raises CheckpointError, DoesNotFit, and the errors of `open_engine`; ModuleNotFoundError if the extra is missing.
    """
    from moec.compiler.bundle.plan_bundles import unquantized_bundle
    from moec.compiler.checkpoint.opening import open_checkpoint
    from moec.compiler.families import lower
    from moec.compiler.preflight.preflight import preflight
    from moec.runtime.modes.decoder import check_modes

    lowering = lower(open_checkpoint(str(path)))
    preflight(lowering)
    check_modes(options.modes, lowering.model, low_versions=0)
    with ExitStack() as opened:
        with ProgressBar("writing a temporary bundle of 16 bits per weight") as progress:
            folder = opened.enter_context(unquantized_bundle(lowering, progress))
        yield opened.enter_context(bundle_engine(folder, options, kernels, shrinks, allow_partial=True))

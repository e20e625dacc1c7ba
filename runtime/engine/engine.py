"""Engine: one opened bundle that decodes inside its budget.

Prefill and decode are the same pass over a flat batch of tokens. They differ only in the number of tokens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from moec.manifests.errors import ContextOverflow, ExecutionError, InputError, MoecError, OptionError
from moec.manifests.files.strict_json import shown
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.memory_floor import LOGITS_ROWS_PER_SLOT

from ..bundle.eviction_weights import with_fitted_weights
from ..bundle.open_bundle import Bundle, open_bundle
from ..expert_cache.cache_stats import CacheStats
from ..layers.kv_cache import KVCache
from ..memory.budget import MemoryPlan, require_memory_for_manifest
from ..modes.expert_choice import PassChoice
from ..modes.mode_counts import ModeCounts
from ..options.runtime import RuntimeOptions, RuntimeSettings
from ..text.sampling import Sampler, SamplingOptions
from ..text.streaming_text import StopTexts, TextStream
from ..text.tokenizer import checked_ids
from .answer_slots import answer_slots
from .exclusive_use import ExclusiveUse, exclusively
from .mode_line import mode_line
from .open_engine import open_parts
from .slots import Slot, SlotPool

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it; Python has it from 3.11 on

    from ..text.template_process import Message

_Ints: TypeAlias = Sequence[int]
_Result = TypeVar("_Result")
_RunStack: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, KVCache], _Result]
# An option of the command line, and its value if it is a number, has quotes, or is the rest of a text in backticks.
_OPTION = re.compile(r"--(?:set )?([a-z][a-z-]*)(?:[ =]('[^'`]+'|[^` ]+(?=`)|[0-9][0-9A-Za-z]*))?")
_SETTING = re.compile(r"(?<=`)[a-z]+(?:-[a-z]+)+(?=[`=])")

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One emitted token.

    text: text that can be shown now; may be empty.
    position: position of the token in the sequence.
    elapsed_ns: time since the step before. For the first step it includes prefill.
    cache: counts of the expert cache for this token.
    finish_reason: set on the last step.
    reused_tokens: tokens of the prompt that were not computed, as a slot had their keys and values.
    """

    token_id: int
    text: str
    position: int
    elapsed_ns: int
    cache: CacheStats
    finish_reason: FinishReason | None
    reused_tokens: int = 0


def load(path: str | Path, **options: Unpack[RuntimeSettings]) -> Engine:
    """Open a bundle: `load("x-moec", memory="2GiB")`.

    options: fields of RuntimeOptions. `memory` may be a number of bytes, too.
    Raises BundleError, MemoryBudgetExceeded, OptionError.
    """
    values: dict[str, Any] = {**options}
    if type(options.get("memory")) is int:
        values["memory"] = str(options["memory"])
    try:
        chosen = RuntimeOptions(**values | {"lossy": None})
        require_memory_for_manifest(Path(path), chosen)
        if options.get("lossy"):
            from ..tuning.mode_records import recorded_setting

            chosen = replace(chosen, lossy=recorded_setting(Path(path), str(options["lossy"])))
        return Engine(open_bundle(Path(path)), chosen, closes_bundle=True)
    except TypeError as error:
        if not values.keys() - RuntimeSettings.__annotations__:
            raise
        raise OptionError(f"unknown option: {error}", "see `help(moec.runtime.RuntimeOptions)`") from error
    except MoecError as error:
        error.message = _with_keywords(error.message)
        error.hint = None if error.hint is None else _with_keywords(error.hint)
        error.args = (error.message,)
        raise


def _with_keywords(text: str) -> str:
    """Return a text of an error with `memory="2GiB"` in place of `--memory 2GiB`."""

    def keyword(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2]
        if name not in RuntimeSettings.__annotations__:
            return match[0]
        is_number = RuntimeSettings.__annotations__[name].__forward_arg__ == "int"
        return f"{name}=" if value is None else f"{name}={value if is_number else json.dumps(value.strip(chr(39)))}"

    def setting(match: re.Match[str]) -> str:
        name = match[0].replace("-", "_")
        return name if name in RuntimeSettings.__annotations__ else match[0]

    return _SETTING.sub(setting, _OPTION.sub(keyword, text))


class Engine:
    """One opened bundle in memory: dense weights, KV cache, expert cache.

    Threads may take turns. A call raises ExecutionError while another thread is in a call, or holds `exclusive`.
    A caller holds `exclusive` around several calls that must not be interrupted.
    slots: what each slot of the keys and values holds.
    logits_rows: most rows whose logits the memory plan holds.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions, closes_bundle: bool = False) -> None:
        """Open the engine.

        closes_bundle: close the bundle with the engine, also if opening fails. Otherwise the caller closes it.
        """
        self.bundle, self.options, self.exclusive = bundle, options, ExclusiveUse()
        self._closes_bundle = closes_bundle
        try:
            self.options = with_fitted_weights(bundle, options)
            parts = open_parts(bundle, self.options)
        except BaseException:
            if closes_bundle:
                bundle.close()
            raise
        self.tokenizer, self.memory = parts.tokenizer, parts.memory
        self.storage, self.cache, self.records = parts.storage, parts.cache, parts.records
        self.model, self.kv = parts.model, parts.kv
        self.lossy, self.accelerator = parts.lossy, parts.accelerator
        self._experts, self._elastic = parts.experts, parts.elastic
        self.code_path = parts.path
        self._sequence, self.dense_on_host = 0, (self.model.dense_part, self.kv)
        has_capacities = any(layer.experts.router.capacity for layer in self.model.spec.layers)
        self.logits_rows = LOGITS_ROWS_PER_SLOT * self.options.slots
        self.slots = SlotPool(self.options.slots, self.model.spec.encoder is None and not has_capacities, self.kv)
        if self.accelerator is not None:
            self.place_dense(on_device=self.accelerator.dense is not None)

    def __repr__(self) -> str:
        names = [field.name for field in fields(self.options)]
        chosen = [(name, getattr(self.options, name)) for name in names]
        default = RuntimeOptions()
        texts = [f", {name}={value!r}" for name, value in chosen if value != getattr(default, name)]
        return f"<Engine of {str(self.bundle.path)!r}{''.join(texts)}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the readers, close files and free the accelerator's memory. The rest is freed with the engine."""
        self.cache.close()
        self.model.advisor.holds = bool  # a method would keep the engine alive until cycles are collected
        if self.accelerator is not None:
            self.place_dense(on_device=False)  # otherwise this engine holds the device's memory as long as it lives
            self.accelerator.close()
        self.storage.close()
        if self._closes_bundle:
            self.bundle.close()

    @exclusively
    def place_dense(self, on_device: bool) -> None:
        """Compute attention and head on the accelerator or on the CPU. Sequences that have begun cannot continue.

        Raises OptionError if the accelerator does not have them.
        """
        dense = None if self.accelerator is None else self.accelerator.dense
        if on_device and dense is None:
            raise OptionError("no accelerator holds the dense weights", "add `--set accelerator-dense=device`")
        dense_part, kv = (dense.part, dense.kv) if on_device and dense is not None else self.dense_on_host
        self.model.dense_part, self.kv, self.slots.kv = dense_part, kv, kv
        if self.accelerator is not None:
            self.accelerator.uses_dense = on_device
        self.slots.begin(keeps_tokens=False)
        self._sequence += 1

    @contextmanager
    def divided_slots(self, positions: int) -> Iterator[None]:
        """Have as many slots of so many positions as fit, inside a `with` block, if these are more than there are.

        What the slots held is lost. An encoder and an accelerator keep their slots.
        """
        options, memory = self.options, self.memory
        count = answer_slots(self.bundle.manifest, memory, options, positions)
        if count <= options.slots or self.model.spec.encoder is not None or self.accelerator is not None:
            yield
            return
        try:
            self._arrange_slots(replace(options, slots=count), replace(memory, context=positions))
            yield
        finally:
            self._arrange_slots(options, memory)

    def _arrange_slots(self, options: RuntimeOptions, memory: MemoryPlan) -> None:
        dense_part, _ = self.dense_on_host
        del self.kv, self.slots.kv, self.dense_on_host  # its memory is given back before there is a second one
        self.options, self.memory = options, memory
        self.kv = KVCache(self.model.spec, options.slots, memory.context, options.kv)
        self.dense_on_host = dense_part, self.kv
        self.slots = SlotPool(options.slots, self.slots.can_reuse, self.kv)
        self._sequence += 1
        if self._elastic is not None:
            self._elastic.begin(options.slots, memory.context)

    def decoding_cache_bytes(self, positions: int) -> int:
        """Return the bytes of the expert cache while one sequence of so many positions is decoded."""
        if self._elastic is None:
            return self.memory.cache_bytes
        return self._elastic.capacity_bytes(1, [positions] + [0] * (self.options.slots - 1))

    @property
    def mode(self) -> str:
        """The `mode:` line: the options and code paths of this run."""
        io, holds_all, grows = self.storage.mode, self._experts.holds_all, self._elastic is not None
        line = mode_line(self.bundle.manifest, self.options, self.memory, self.code_path, io, holds_all, grows)
        return line if self.accelerator is None else f"{line}; {self.accelerator.mode}"

    @property
    def is_exact(self) -> bool:
        """True if no lossy mode decides about experts. Several tokens may then share a pass."""
        return self.lossy is None

    @property
    def mode_counts(self) -> ModeCounts | None:
        """Decisions of the lossy modes so far; None if no mode decides."""
        return None if self.lossy is None else self.lossy.counts

    # -- generation --------------------------------------------------------------------------------------------

    def encode(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        adds_special_tokens: let the tokenizer add its special tokens. A rendered chat already has them.
        Raises ContextOverflow if the text is too long to be encoded, InputError if it is not Unicode.
        """
        self.tokenizer.check_size(text, self.memory)
        return self.tokenizer.encode(text, adds_special_tokens).ids

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        reuses_prefix: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[GenerationStep]:
        """Decode one sequence. Yields one step per token, including the eos token.

        The generation stops at the end of the context.
        stop: texts that end the generation. They are not part of the steps' texts.
        reuses_prefix: do not compute again the beginning of the prompt that a slot holds from a generation before. No
            bit of the logits changes. With a lossy mode or an encoder, the whole prompt is computed.
        is_stopped: asked before each pass. True ends the generation.
        Raises ContextOverflow if the prompt leaves no room.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else checked_ids(prompt)
        self.check_tokens(tokens)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be a whole number of 1 or more, found {max_new_tokens}")
        limit = self.new_tokens_limit(tokens, max_new_tokens)
        sampler = Sampler(sampling or SamplingOptions())
        return self._decode(tokens, limit, sampler, StopTexts(stop), reuses_prefix, is_stopped)

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        reuses_prefix: bool = False,
    ) -> Iterator[GenerationStep]:
        """Decode the assistant's next message, by the chat template of the bundle. Yields steps as `generate` does.

        messages: the conversation so far, like `[{"role": "user", "content": "hello"}]`.
        Raises OptionError if the bundle has no chat template, InputError if the template refuses the messages.
        Raises the errors of `generate`.
        """
        from ..text.template_process import ChatRenderer, is_message, template_files  # most runs need no process

        if isinstance(messages, str) or not all(map(is_message, messages)):
            raise InputError("`messages` must be a list of dicts with two texts, `role` and `content`")
        try:
            with ChatRenderer() as renderer:
                text = renderer.render(template_files(self.bundle, self.options.verify), messages)
        except OptionError as error:
            raise OptionError(error.message, "give `generate` the prompt as the model reads it") from error
        return self.generate(self.encode(text, False), max_new_tokens, sampling, stop, reuses_prefix)

    def _decode(
        self,
        tokens: list[int],
        limit: int,
        sampler: Sampler,
        stop: StopTexts,
        reuses_prefix: bool,
        is_stopped: Callable[[], bool],
    ) -> Iterator[GenerationStep]:
        eos = self.bundle.manifest.model.eos_token_ids
        with self.exclusive:
            mine = self.begin_sequence(keeps_slots=reuses_prefix and self.is_exact)
            before, start_ns = self.cache.stats.copy(), time.perf_counter_ns()
            placement = self.slots.place(tokens)
            slot, reused = placement.slot, placement.reused
            if placement.source is not None:
                self.copy_prefix(placement.source, slot, reused)
            (known,) = self.begin_texts([slot.index], [tokens])
            for first in range(reused, len(known), MAX_PASS_TOKENS):
                if is_stopped():
                    return
                chunk = known[first : first + MAX_PASS_TOKENS]
                hidden = self.step(chunk, [slot.index] * len(chunk), range(first, first + len(chunk)))
                slot.tokens += chunk
            logits, position = self.model.logits(hidden[-1:])[0], len(known)
        stream, prompt_tokens = TextStream(self.tokenizer, known), len(known)
        for count in range(1, limit + 1):
            token = sampler(logits, known, prompt_tokens)
            known.append(token)
            reason: FinishReason | None = "stop" if token in eos else ("length" if count == limit else None)
            text = "" if token in eos else stream.push(token)
            text, is_ended = stop.push(text if reason is None else text + stream.flush())
            if is_ended:
                reason = "stop"
            elif reason is not None:
                text += stop.flush()
            now_ns, stats = time.perf_counter_ns(), self.cache.stats.copy()
            yield GenerationStep(token, text, position, now_ns - start_ns, stats.since(before), reason, reused)
            if reason is not None or is_stopped():
                return
            before, start_ns = stats, time.perf_counter_ns()
            if not self.exclusive.acquire(False):
                raise self.exclusive.refusal()
            try:
                if self._sequence != mine:
                    raise ExecutionError(
                        "another call has taken over the keys and values of this generation",
                        "finish one generation before the next, or load a second engine",
                    )
                logits = self.decode([token], [slot.index], [position])[0]
                slot.tokens.append(token)
            finally:
                self.exclusive.release()
            position += 1

    @exclusively
    def begin_sequence(self, keeps_slots: bool = False) -> int:
        """Take over the KV cache. A generation that has begun cannot continue. Returns the number of the sequence.

        Eviction policies that count uses within a sequence begin again, also if other slots continue.
        keeps_slots: the caller writes only to slots that `slots.place` gives it, so they may keep what they hold.
        """
        self.slots.begin(keeps_slots)
        self.cache.begin_sequence()
        if self.lossy is not None:
            self.lossy.begin_sequence()
        self._sequence += 1
        return self._sequence

    @exclusively
    def begin_texts(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the first tokens of the decoder's text in these slots: the prompt, or the start token.

        With an encoder it is the start token, and the encoder reads the prompts here. Prompts share a pass of at most
        MAX_PASS_TOKENS tokens. A prompt is never split.
        """
        encoder = self.model.spec.encoder
        if encoder is None:
            return [list(prompt) for prompt in prompts]
        group, waiting = list[tuple[int, Sequence[int]]](), 0
        for slot, prompt in zip(slots, prompts, strict=True):
            if group and waiting + len(prompt) > MAX_PASS_TOKENS:
                self._encode(group)
                group, waiting = [], 0
            group.append((slot, prompt))
            waiting += len(prompt)
        if group:
            self._encode(group)
        return [[encoder.start_token_id] for _ in prompts]

    def _encode(self, group: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Run one pass of the encoder over whole prompts.

        group: slot and prompt of each.
        """
        tokens = [token for _, prompt in group for token in prompt]
        slots = [slot for slot, prompt in group for _ in prompt]
        positions = [position for _, prompt in group for position in range(len(prompt))]
        for slot, prompt in group:
            self.kv.begin_prompt(slot, len(prompt))
        self._pass(self.model.encode, tokens, slots, positions)

    def new_tokens_limit(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Return the number of new tokens that the context has room for, at most `max_new_tokens`.

        An encoder has a context of its own. The decoder's text then begins with one token.
        """
        used = len(prompt) if self.model.spec.encoder is None else 1
        return min(max_new_tokens, self.memory.context - used + 1)

    @exclusively
    def prefill(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """Run a part of a text in the first slot. Returns the residual stream of its last pass.

        first: position of the first token. The slot holds the tokens before it.
        """
        hidden = np.empty((0, self.model.spec.hidden_size), np.float32)
        for start in range(0, len(tokens), MAX_PASS_TOKENS):
            chunk = tokens[start : start + MAX_PASS_TOKENS]
            hidden = self.step(chunk, [0] * len(chunk), range(first + start, first + start + len(chunk)))
        return hidden

    def _step(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Run one pass over a flat batch. Returns the residual stream [T, D]; `model.logits` turns rows into logits.

        Raises ExecutionError if the model has an encoder and it has not read the prompt of a slot.
        """
        if self.model.spec.encoder is not None and not self.kv.prompt_lengths[list(slots)].all():
            raise ExecutionError("a slot has no prompt that the decoder could attend to", "call `begin_texts` first")
        return self._pass(self._forward(None if self.lossy is None else self.lossy.prefill), tokens, slots, positions)

    step = exclusively(_step)

    def decode(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Run the next token of T sequences, one each, and return the logits after it, [T, V].

        All lossy modes decide here. Before it, only dynamic precision decides.

        Raises ExecutionError as `step`.
        """
        if not self.exclusive.acquire(False):  # without `with`, which takes longer: this runs for every token
            raise self.exclusive.refusal()
        try:
            if self.lossy is None:
                return self.model.logits(self._step(tokens, slots, positions))
            return self.lossy.decode(self._run_chosen, tokens, slots, positions)
        finally:
            self.exclusive.release()

    def _run_chosen(self, tokens: _Ints, slots: _Ints, positions: _Ints, choice: PassChoice) -> np.ndarray:
        return self._pass(self._forward(choice), tokens, slots, positions)

    def _forward(self, choice: PassChoice | None) -> _RunStack[np.ndarray]:
        return self.model.forward if choice is None else partial(self.model.forward, choice=choice)

    def _pass(self, run: _RunStack[_Result], tokens: _Ints, slots: _Ints, positions: _Ints) -> _Result:
        """Run a stack of the model over a flat batch. The expert cache gets the size that the batch leaves free."""
        if self._elastic is not None:
            self._elastic.before_pass(slots, positions)
        in_slots, at = np.asarray(slots, np.int32), np.asarray(positions, np.int32)
        self.kv.begin_pass(in_slots, at)
        result = run(np.asarray(tokens, np.int64), in_slots, at, self.kv)
        self.kv.end_pass()
        if self._elastic is not None:
            self._elastic.after_pass(len(tokens))
        if self.storage.mode == "mmap":
            self.storage.end_pass(self.cache.resident)
        return result

    @exclusively
    def logits(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> np.ndarray:
        """Return the logits after every token of one sequence, float32 [T, V].

        prompt: for models with an encoder, the tokens that it reads.
        Raises ContextOverflow, InputError.
        """
        tokens = checked_ids(token_ids)
        self.check_tokens(tokens, room=0)
        self.begin_sequence()
        if self.model.spec.encoder is not None:
            self.check_tokens(prompt, room=0)
            self.begin_texts([0], [prompt])
        out = np.empty((len(tokens), self.model.spec.vocab_size), np.float32)
        for start in range(0, len(tokens), MAX_PASS_TOKENS):
            chunk = tokens[start : start + MAX_PASS_TOKENS]
            hidden = self.step(chunk, [0] * len(chunk), range(start, start + len(chunk)))
            out[start : start + len(chunk)] = self.model.logits(hidden)
        return out

    @exclusively
    def copy_slots(self, parents: Sequence[int], positions: int) -> None:
        """Copy to each slot i the first positions of slot parents[i], all at once."""
        if self._elastic is not None:
            longest = max(positions, int(self.kv.prompt_lengths.max()))
            self._elastic.before_pass(range(len(parents)), [longest - 1] * len(parents))
        self.kv.copy_slots(parents, positions)

    @exclusively
    def copy_prefix(self, source: Slot, target: Slot, positions: int) -> None:
        """Copy the first positions of one slot to another slot."""
        self.make_room(target, positions)
        parents = list(range(self.options.slots))
        parents[target.index] = source.index
        target.tokens = []  # an interrupted copy leaves keys and values of neither text
        self.kv.copy_slots(parents, positions)
        target.tokens = source.tokens[:positions]

    @exclusively
    def make_room(self, slot: Slot, positions: int) -> None:
        """Let the expert cache leave memory for the first positions of a slot."""
        if self._elastic is not None:
            self._elastic.before_pass([slot.index], [positions - 1])

    def check_tokens(self, tokens: Sequence[int], room: int = 1) -> None:
        """Check a prompt.

        room: new tokens that must fit after it.
        Raises InputError if it is empty or has ids outside the vocabulary, ContextOverflow if it leaves no room.
        """
        if not tokens:
            raise InputError("the prompt is empty", "give at least one token")
        self.check_vocabulary(tokens)
        if len(tokens) + room - 1 > self.memory.context or len(tokens) > self.memory.context:
            raise ContextOverflow(
                f"the prompt has {len(tokens)} tokens, the context holds {self.memory.context}",
                "shorten it"
                if self.memory.context >= self.model.spec.max_positions
                else "shorten it or raise `--context`",
            )

    def check_pair(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check that an answer can be scored after a prompt. Raises the errors of `check_tokens`."""
        if self.model.spec.encoder is None:
            self.check_tokens([*prompt, *answer], room=0)
            return
        self.check_tokens(prompt)
        if answer:
            self.check_tokens(answer)

    def check_vocabulary(self, tokens: Sequence[int]) -> None:
        """Raise InputError if an id is outside the vocabulary."""
        vocab_size = self.model.spec.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InputError(
                f"token id {shown(wrong)} is outside the vocabulary of {vocab_size}",
                "hand in tokens of this model; its tokenizer may know tokens that the model was never given",
            )

"""Timing of an engine on forced tokens, for `bench` and `tune`."""

from __future__ import annotations

import codecs
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import InputError, OptionError

from ..options.opening import open_engine
from ..terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    import numpy as np

    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.kernels.profile import KernelTimes
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.trace.statistics import RunStatistics
    from moec.runtime.trace.trace import TraceRecorder

DEFAULT_PROMPT = "Question: A box holds 12 pens. How many pens are in 3 boxes?\nAnswer:"


def continuation(path: Path, options: RuntimeOptions, kernels: str | None, prompt: str, tokens: int) -> list[int]:
    """Return the prompt and `tokens` greedy tokens after it, end tokens included, from a new engine.

    Raises OptionError if they do not fit.
    """
    import numpy as np

    with open_engine(path, options, kernels) as engine:
        sequence = engine.encode(prompt)
        engine.check_tokens(sequence)
        if len(sequence) + tokens > engine.memory.context:
            raise OptionError(
                f"a prompt of {len(sequence)} tokens and {tokens} more exceed the context of {engine.memory.context}",
                "lower `--tokens` or raise `--context`",
            )
        (text,) = engine.begin_texts([0], [sequence])
        hidden = _forward(engine, text, 0, len(text))
        with ProgressBar("making the sequence") as progress:
            for count in range(tokens):
                token = int(np.argmax(engine.model.logits(hidden[-1:])[0]))
                sequence.append(token)
                text.append(token)
                if count + 1 < tokens:
                    hidden = _forward(engine, text, len(text) - 1, len(text))
                progress(count + 1, tokens)
        return sequence


LEAST_TEXT_BYTES, BYTES_PER_TOKEN = 1 << 20, 256
MAX_TEXT_BYTES = 64 << 20
"""No more of a text is read, however long it is."""


def sequence_of(bundle: Bundle, path: Path, prompt_tokens: int, tokens: int) -> list[int]:
    """Return the first tokens of a text: a prompt and `tokens` more. Raises InputError; OptionError for too few."""
    from moec.runtime.text.tokenizer import load_tokenizer

    if prompt_tokens < 1:
        raise OptionError(f"`--prompt-tokens` must be at least 1, found {prompt_tokens}", "leave it out for 32")
    wanted = prompt_tokens + tokens
    if path.exists() and not path.is_file():  # a device or a pipe
        raise InputError(f"`{path}` is no regular file", "name a text file")
    most_bytes = min(MAX_TEXT_BYTES, LEAST_TEXT_BYTES + BYTES_PER_TOKEN * wanted)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes)
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < most_bytes)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"`{path}` cannot be read as UTF-8 text: {error}", "name a text file") from error
    sequence = list(load_tokenizer(bundle).encode(text).ids)
    if len(sequence) < wanted:
        raise OptionError(
            f"`{path}` has {len(sequence)} tokens, {prompt_tokens} and {tokens} are needed", "lower `--tokens`"
        )
    return sequence[:wanted]


def _forward(engine: Engine, sequence: list[int], start: int, end: int) -> np.ndarray:
    """Run tokens start to end of the sequence, as many at once as a pass may hold. Return the last residuals."""
    from moec.manifests.runtime_limits import MAX_PASS_TOKENS

    for first in range(start, end, MAX_PASS_TOKENS):
        last = min(end, first + MAX_PASS_TOKENS)
        hidden = engine.step(sequence[first:last], [0] * (last - first), range(first, last))
    return hidden


def new_tracer(engine: Engine) -> TraceRecorder:
    """Return a recorder of a trace, for `measure_decode`."""
    from moec.runtime.trace.trace import TraceRecorder

    first_decoder_layer = engine.model.spec.first_decoder_layer
    return TraceRecorder(engine.model.times, lambda: engine.cache.stats, first_decoder_layer)


def measure_decode(
    engine: Engine,
    sequence: list[int],
    prompt_tokens: int,
    logits: list[np.ndarray] | None = None,
    title: str = "measuring",
    kernel_times: KernelTimes | None = None,
    tracer: TraceRecorder | None = None,
) -> RunStatistics:
    """Time a prefill and the forced decode of the rest.

    logits: list to which the logits [1, V] of every step are appended, or None.
    kernel_times: cleared after the prefill.
    tracer: records every pass. It takes about 2 ms a token on the yardstick while experts are streamed.
    """
    from moec.runtime.trace.statistics import RunRecorder

    engine.model.trace = tracer
    recorder = RunRecorder(prompt_tokens)
    with ProgressBar(title) as progress:
        text: list[int] = []
        for end in range(prompt_tokens, len(sequence)):
            before, times = engine.cache.stats.copy(), engine.model.times.copy()
            if tracer is not None:
                tracer.begin()
            started_ns = time.perf_counter_ns()
            done = len(text)
            if end == prompt_tokens:
                (text,) = engine.begin_texts([0], [sequence[:prompt_tokens]])
                step_logits = engine.model.logits(_forward(engine, text, done, len(text))[-1:])
            else:
                text.append(sequence[end - 1])
                step_logits = engine.decode(text[-1:], [0], [done])
            elapsed_ns = time.perf_counter_ns() - started_ns
            if tracer is not None:
                tracer.end()
            recorder.add(elapsed_ns, engine.cache.stats.since(before), engine.model.times.since(times))
            if logits is not None:
                logits.append(step_logits)
            if kernel_times is not None and end == prompt_tokens:
                kernel_times.clear()
            progress(end - prompt_tokens, len(sequence) - prompt_tokens)
    engine.model.trace = None
    return recorder.finish(engine.model.prefetch_quality.recall)

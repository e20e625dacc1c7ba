"""`POST /v1/completions`: continue texts or token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from moec.runtime.text.streaming_text import TextStream

from ...engine.request import Ended, Event, GenerationRequest, PromptScored, TokenMade
from ..answer import Answer, OpenAIForm
from ..errors import RequestError, bad_field
from ..fields import MAX_ANSWERS, MAX_LOG_PROBS, Asked, Fields, read_asked, token_ids
from ..log_probs import CompletionLogProbs
from ..service import Service

_DEFAULT_TOKENS = 16
"""As in the API of OpenAI."""
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class CompletionForm(OpenAIForm):
    """The form of completions.

    prompts: text and token ids of each answer's prompt.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        service: Service,
        asked: Asked,
        prompts: Sequence[tuple[str, Sequence[int]]],
        echo: bool,
        has_log_probs: bool,
    ) -> None:
        tokens = sum(len(ids) for _, ids in prompts) // asked.count
        super().__init__(service.options.name, len(prompts), tokens, asked.includes_usage)
        self._prompts, self._echo, self._has_log_probs = prompts, echo, has_log_probs
        self._log_probs = [self._log_probs_of(service, ids, not asked.streams) for _, ids in prompts]
        self._has_echoed = [not echo] * len(prompts)

    def _log_probs_of(self, service: Service, prompt: Sequence[int], keeps: bool) -> CompletionLogProbs:
        before = () if self._echo or service.engine.model.spec.encoder is not None else prompt
        return CompletionLogProbs(service.token_text, TextStream(service.engine.tokenizer, before), keeps)

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        answer = self.answers[index]
        answer.add(event)
        if isinstance(event, Ended):
            text = "" if self._has_echoed[index] else self._prompts[index][0]  # nothing but the prompt was asked for
            choice = self._choice(index, text, None)
            yield self.chunk([{**choice, "finish_reason": event.reason}], timings=self.timings(index))
            return
        text, log_probs = "", None
        if not self._has_echoed[index]:
            self._has_echoed[index], text = True, self._prompts[index][0]
        if isinstance(event, PromptScored):
            log_probs = self._log_probs[index].of_prompt(self._prompts[index][1][0], event.tokens)
        elif isinstance(event, TokenMade):
            text += event.text
            if event.log_prob is not None:
                log_probs = self._log_probs[index].of_tokens([event.log_prob])
        if text or log_probs is not None:
            yield self.chunk([self._choice(index, text, log_probs)])

    def _choice(self, index: int, text: str, log_probs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            log_probs = self._log_probs[index].whole if self._has_log_probs else None
            text = (self._prompts[index][0] if self._echo else "") + answer.text
            choices.append({**self._choice(index, text, log_probs), "finish_reason": self.reason(index)})
        return self.whole_of(choices)


async def completions(service: Service, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of `/v1/completions`. Raises RequestError."""
    fields = Fields(body)
    given = fields.take("prompt")
    asked = read_asked(fields, service.vocabulary, service.options.sampling, ("max_tokens",), _DEFAULT_TOKENS, least=0)
    echo, log_probs = fields.flag("echo"), fields.whole("logprobs", 0, MAX_LOG_PROBS)
    fields.unsupported("best_of", 1, asked.count)
    fields.unsupported("suffix", "")
    fields.without_effect(*_NO_EFFECT)
    fields.end()
    if asked.max_new_tokens == 0 and not echo:
        raise bad_field("max_tokens", "can be 0 only with `echo`")
    if echo and service.engine.model.spec.encoder is not None:
        raise bad_field("echo", "is not supported for a model with an encoder", "unsupported_value")
    prompts = await _prompts(service, given)
    if len(prompts) * asked.count > MAX_ANSWERS * 4:
        raise bad_field("prompt", f"and `n` ask for more than {MAX_ANSWERS * 4} answers")
    for _, ids in prompts:
        service.check_prompt(ids, "prompt", has_answer=asked.max_new_tokens > 0)
    repeated = [prompt for prompt in prompts for _ in range(asked.count)]
    scores = echo and log_probs is not None
    form = CompletionForm(service, asked, repeated, echo, log_probs is not None)

    def make(receivers: Sequence[Callable[[Event], None]]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                list(ids),
                asked.max_new_tokens,
                deliver,
                replace(asked.sampling, seed=asked.sampling.seed + at % asked.count),
                asked.stop,
                log_probs,
                scores,
                service.options.deadline_s,
            )
            for at, ((_, ids), deliver) in enumerate(zip(repeated, receivers, strict=True))
        ]

    limit = service.engine.new_tokens_limit
    most_tokens = sum(limit(ids, asked.max_new_tokens) + scores * len(ids) for _, ids in repeated)
    log_prob_bytes = service.log_probs.needed_bytes(most_tokens, log_probs)
    return Answer(service, len(repeated), make, form, asked.streams, log_prob_bytes)


async def _prompts(service: Service, given: Any) -> list[tuple[str, list[int]]]:
    """Return text and token ids of each prompt: a text, token ids, or a list of either. Raises RequestError."""
    if given is None:
        raise RequestError(400, "`prompt` is missing", "prompt", "missing_field")
    if isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], str | list)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise bad_field("prompt", "must be a text, token ids, or a list of either")
    if len(given) > MAX_ANSWERS * 4:
        raise bad_field("prompt", f"has more than {MAX_ANSWERS * 4} prompts")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, await service.encode(prompt, "prompt")))
        elif isinstance(prompt, list):
            ids = token_ids(prompt, "prompt")
            service.check_prompt(ids, "prompt", has_answer=False)
            prompts.append((service.engine.tokenizer.decode(ids), ids))
        else:
            raise bad_field("prompt", "must be a text, token ids, or a list of either")
    return prompts

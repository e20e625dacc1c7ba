"""Forms of a prompt that differ from a task's own: turns of a chat, or a user's template.

What renders a template is handed in, because a template may not be trusted and needs a process with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moec.manifests.errors import OptionError

RenderChat = Callable[[Sequence[Mapping[str, str]]], str]
"""Messages with `role` and `content` -> the text before the assistant's next message, with special tokens."""
RenderPrompt = Callable[[Mapping[str, object]], str]
"""Fields of an item, and `shots` with the fields of solved items -> a prompt."""


class RenderedPrompt(str):
    """A prompt with its special tokens. A tokenizer adds none."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One question.

    question: the prompt in the task's own form, without solved examples.
    answer: the reference, or an empty text.
    fields: the fields of the item.
    """

    question: str
    answer: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """Prompts by a user's template. It receives the fields of the item, and `shots`.

    uses_shots: the template names `shots`.
    """

    render: RenderPrompt
    separator: str = " "
    uses_shots: bool = True

    def prompt(self, solved: Sequence[Example], question: Example) -> str:
        """Return the rendered template. Raises OptionError if it has no place for solved examples."""
        if solved and not self.uses_shots:
            raise OptionError(
                "`--shots` has no effect: the template does not name `shots`", "use them, or drop `--shots`"
            )
        return self.render({**question.fields, "shots": [dict(example.fields) for example in solved]})


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Prompts by the model's chat template. Solved examples are earlier turns.

    render: the chat template.
    system: the first message, or None.
    turn: makes a user's message from an example; None: the task's own prompt.
    thinks: the template knows the marks around a thought.
    """

    render: RenderChat
    system: str | None = None
    turn: TemplateForm | None = None
    thinks: bool = False
    separator: str = ""

    def prompt(self, solved: Sequence[Example], question: Example) -> RenderedPrompt:
        """Return the text before the assistant's next message."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for example in solved:
            messages.append({"role": "user", "content": self._turn(example)})
            messages.append({"role": "assistant", "content": example.answer.strip()})
        messages.append({"role": "user", "content": self._turn(question)})
        return RenderedPrompt(self.render(messages))

    def _turn(self, example: Example) -> str:
        return example.question.strip() if self.turn is None else self.turn.prompt((), example)


PromptForm = TemplateForm | ChatForm

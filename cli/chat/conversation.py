"""The messages of a conversation, and the text that the model reads for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.manifests.errors import InputError, OptionError

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.text.template_process import Message, TemplateFiles


def chat_template(bundle: Bundle, verify: bool) -> TemplateFiles | None:
    """Return the files of a bundle's chat template, or None without one. The template is tried with one message.

    verify: whether to compare each file with its digest.
    Raises the errors of `template_files`, and ManifestInvalid for a damaged template.
    """
    from moec.runtime.text.template_process import ChatRenderer, template_files

    files = template_files(bundle, verify)
    try:
        with ChatRenderer() as renderer:
            renderer.render(files, [{"role": "user", "content": "hello"}])
    except OptionError:
        return None
    except InputError:
        pass  # it wants other messages; the first turn says so
    return files


class Conversation:
    """Messages so far.

    template: files of the chat template. None: the model continues the messages as plain text.
    system: message before the others, or None.
    messages: messages of user and assistant, in turns.
    """

    def __init__(self, template: TemplateFiles | None, system: str | None) -> None:
        self.template, self.messages = template, list[dict[str, str]]()
        self.system: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Set the system message; None removes it. Raises OptionError without a template."""
        if text is not None and self.template is None:
            raise OptionError("a system message needs a chat template, and the messages are plain text", "leave it out")
        self.system = text

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds its special tokens. A rendered chat has them already."""
        return self.template is None

    def text_with(self, message: str) -> str:
        """Return the text that the model reads, with the user's next message at its end.

        Raises the errors of ChatRenderer.render.
        """
        messages = [*self.all_messages(), {"role": "user", "content": message}]
        if self.template is None:
            return plain_text(messages)
        from moec.runtime.text.template_process import ChatRenderer

        with ChatRenderer() as renderer:  # ends before the model runs, whose budget has no place for the process
            return renderer.render(self.template, messages)

    def add(self, message: str, answer: str) -> None:
        """Add a finished turn."""
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Remove all messages. The system message stays."""
        self.messages.clear()

    def all_messages(self) -> list[dict[str, str]]:
        """Return all messages, the system message first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]


def plain_text(messages: Sequence[Message]) -> str:
    """Return messages as one text, as a terminal shows them: each message of the user begins a line."""
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text

"""Prompts of `moec run`: from the command line or standard input, and through the model's chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from moec.manifests.errors import ContextOverflow, InputError, OptionError
from moec.manifests.files.limits import MAX_PROMPT_BYTES, MAX_PROMPT_BYTES_PER_TOKEN

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.options.runtime import RuntimeOptions


class RunPrompt:
    """The prompt of one run. Call `read` before the memory of the run is planned, so that its memory is free by then.

    With a chat template, the process that renders it starts at once, while the bundle is opened. The end of the `with`
    block ends the process.
    """

    def __init__(self, prompt: str, is_chat: bool, system: str | None) -> None:
        """Start the renderer of a chat.

        prompt: the text, or `-` for standard input.
        is_chat: the prompt is a user's message.
        system: a message before it, or None.
        Raises OptionError for a system message without a chat.
        """
        if system is not None and not is_chat:
            raise OptionError("`--system` has no effect without `--chat`", "add `--chat`")
        self._prompt, self._system = prompt, system
        self.text = ""
        self.adds_special_tokens = not is_chat  # a rendered chat has them already
        self._renderer = None
        if is_chat:
            from moec.runtime.text.template_process import ChatRenderer

            self._renderer = ChatRenderer()

    def __enter__(self) -> RunPrompt:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def read(self, bundle: Bundle, options: RuntimeOptions) -> None:
        """Set `text`, which the model continues.

        Raises InputError or ContextOverflow for a prompt that cannot be used, and the errors of ChatRenderer.render.
        """
        from moec.runtime.memory.budget import chosen_context

        limit_bytes = prompt_limit_bytes(chosen_context(bundle.manifest.model, options))
        text = standard_input(limit_bytes) if self._prompt == "-" else self._prompt
        if self._renderer is None:
            self.text = text
            return
        from moec.runtime.text.template_process import template_files

        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.text = self._renderer.render(
            template_files(bundle, options.verify), [*system, {"role": "user", "content": text}]
        )


def prompt_limit_bytes(context: int) -> int:
    """Return the most bytes that are read for a prompt.

    context: tokens.
    """
    return min(MAX_PROMPT_BYTES, MAX_PROMPT_BYTES_PER_TOKEN * context)


def standard_input(limit_bytes: int) -> str:
    """Return standard input as text, without its last line end. Raises InputError, ContextOverflow."""
    if sys.stdin is None:
        raise InputError("standard input is closed, expected a prompt", "give the text with `--prompt TEXT`")
    try:
        data = sys.stdin.buffer.read(limit_bytes + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(
            f"standard input cannot be read: {error.strerror}", "give the text with `--prompt TEXT`"
        ) from error
    except UnicodeDecodeError as error:
        if len(data) <= limit_bytes:
            raise InputError(f"the prompt is not UTF-8 at byte {error.start}", "convert it to UTF-8") from error
        text = ""
    if len(data) > limit_bytes:
        raise ContextOverflow(
            f"the prompt has more than {limit_bytes} bytes, which is more than its context holds",
            "shorten it or raise `--context`",
        )
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")

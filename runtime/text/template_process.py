"""The process of a template: send it variables, and turn its answers into texts and errors.

`template_rendering.py` renders, inside this process. A chat template turns messages into the text that a model was
trained on. It comes from the checkpoint. The bundle carries it, and it is not trusted.
It sees only the messages and the names of the special tokens. The sandbox of jinja2 keeps it from everything else.
A user's template of prompts sees the fields of an item.
Limits of the system bound the time and memory of each text.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moec.manifests.errors import InputError, ManifestInvalid, OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import (
    MAX_TEMPLATE_CPU_S,
    MAX_TEMPLATE_FILE_BYTES,
    MAX_TEMPLATE_MEMORY_BYTES,
    MAX_TEMPLATE_TEXT_CHARACTERS,
)
from moec.manifests.tokenizer.special_tokens import (
    SPECIAL_TOKENS_MAP_NAME,
    TOKENIZER_CONFIG_NAME,
    with_special_tokens,
)

from ..bundle.open_bundle import Bundle
from .limited_process import Answer, LimitedProcess, signal_name

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = TOKENIZER_CONFIG_NAME
# Most memory that rendering needs for each byte of the messages. They exist as JSON, as texts, in parts and joined.
_MEMORY_PER_MESSAGE_BYTE = 16
# Most times that a template may repeat the messages.
_TEXT_PER_MESSAGE_BYTE = 4
_COPY_AGAIN = "copy the bundle again"

Message = Mapping[str, Any]
"""`role` (system, user, assistant, ...), `content`, and what else a template knows, like `tool_calls`."""


def is_message(value: object) -> bool:
    """Return whether a value is a message with a role and a text."""
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Files of a folder that define its chat template.

    folder: the folder, for messages.
    config: content of `tokenizer_config.json`, with the special tokens of `special_tokens_map.json`; None without one.
    template: content of `chat_template.jinja`, None without one.
    """

    folder: Path
    config: bytes | None
    template: bytes | None


def template_files(bundle: Bundle, verify: bool) -> TemplateFiles:
    """Read the files of an opened bundle.

    verify: whether to compare each file with its digest.
    Raises BundleIncomplete, ChecksumMismatch, StorageReadFailed.
    """

    def read(name: str) -> bytes | None:
        return bundle.read_file(name, MAX_TEMPLATE_FILE_BYTES, verify=verify) if bundle.has_file(name) else None

    config = with_special_tokens(read(CONFIG_NAME), read(SPECIAL_TOKENS_MAP_NAME))
    return TemplateFiles(bundle.path, config, read(TEMPLATE_NAME))


def folder_files(folder: Path) -> TemplateFiles:
    """Read the files of a folder that is not opened as a bundle. Raises ManifestInvalid."""
    config = with_special_tokens(_read(folder / CONFIG_NAME), _read(folder / SPECIAL_TOKENS_MAP_NAME))
    return TemplateFiles(folder, config, _read(folder / TEMPLATE_NAME))


def render_chat(folder: Path, messages: Sequence[Message]) -> str:
    """Return the text before the assistant's next message, by the template of a folder.

    Raises the errors of ChatRenderer.
    """
    with ChatRenderer() as renderer:
        return renderer.render(folder_files(folder), messages)


class _TemplateProcess(LimitedProcess):
    """A process that renders one template, any number of times. See `LimitedProcess`."""

    def __init__(self) -> None:
        packages = {"jinja2": "jinja2", "markupsafe": "markupsafe"}
        super().__init__(Path(__file__).with_name("template_rendering.py"), packages, "chat templates")

    def _render(self, kind: str, files: tuple[bytes | None, bytes | None], variables: Mapping[str, object]) -> Answer:
        """Return the answer to a request.

        kind: `chat` or `prompt`.
        files: content of `tokenizer_config.json` and of the template. Only those of the first request count.
        """
        size = len(json.dumps(variables))
        characters = MAX_TEMPLATE_TEXT_CHARACTERS + _TEXT_PER_MESSAGE_BYTE * size
        request = {
            "variables": variables,
            "memory_bytes": MAX_TEMPLATE_MEMORY_BYTES + _MEMORY_PER_MESSAGE_BYTE * size,
            "cpu_s": MAX_TEMPLATE_CPU_S,
            "text_characters": characters,
        }
        return self.ask(request, 4 * characters, kind, files)


class ChatRenderer(_TemplateProcess):
    """Renders the chat template of one folder. See `_TemplateProcess`."""

    def render(
        self,
        files: TemplateFiles,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text before the assistant's next message, with special tokens.

        files: the same in every call.
        tools: tools that the model may call, in the form of OpenAI.
        more: more variables of the template; None for none.
        Raises OptionError if the bundle has no template.
        Raises ManifestInvalid for a damaged template, or one that needs more time or memory than the limits.
        Raises InputError if the template refuses the messages.
        """
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) or None,
            "more": dict(more or {}),
        }
        answer = self._render("chat", (files.config, files.template), variables)
        return answer.text if answer.word == "text" else _refuse_chat(answer, files)


class PromptRenderer(_TemplateProcess):
    """Renders a user's template of prompts. See `_TemplateProcess`.

    path: the template, read at once.
    content: its bytes.
    Raises InputError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.content = read_input(path, MAX_TEMPLATE_FILE_BYTES, follow_links=True)
            self.content.decode()
        except (UnreadableFile, UnicodeDecodeError) as error:
            reason = error if isinstance(error, UnreadableFile) else f"is not UTF-8 at byte {error.start}"
            raise InputError(
                f"`{path}` {reason}", "give a Jinja template of a prompt, like `{{ question }}`"
            ) from error
        self._path = path
        super().__init__()

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the prompt of an item.

        variables: the fields of the item, and `shots`.
        Raises InputError for a template that is none, that names an unknown field, or that exceeds the limits.
        """
        answer = self._render("prompt", (None, self.content), variables)
        if answer.word == "text":
            return answer.text
        fields = ", ".join(f"`{name}`" for name in variables)
        if answer.word == "refused":
            raise InputError(f"`{self._path}` does not fit the items: {answer.text}", f"the fields are {fields}")
        reasons = {
            "damaged": f"is no Jinja template: {answer.text}",
            "endless": "calls itself without end",
            "memory": f"needs more than {MAX_TEMPLATE_MEMORY_BYTES} bytes of memory",
            "long": f"makes more than {MAX_TEMPLATE_TEXT_CHARACTERS} characters of its own",
        }
        reason = reasons.get(answer.word) or _end_reason(answer.status)
        raise InputError(f"`{self._path}` {reason}", f"repair the template; the fields are {fields}")


def _refuse_chat(answer: Answer, files: TemplateFiles) -> NoReturn:
    """Raise the error that the word of an answer names."""
    folder = files.folder
    place = f"`{folder / (CONFIG_NAME if files.template is None else TEMPLATE_NAME)}`"
    if answer.word == "missing":
        raise OptionError(
            f"`{folder}` has no chat template", "drop `--chat` and write the prompt as the model reads it"
        )
    if answer.word == "refused":
        raise InputError(f"the chat template refuses these messages: {answer.text}", "see the model's card")
    reasons = {
        "": f"the chat template {_end_reason(answer.status)}",
        "no-json": f"`{folder / CONFIG_NAME}` is not JSON: {answer.text}",
        "damaged": f"{place}: the chat template is damaged: {answer.text}",
        "endless": f"{place}: the chat template has no end",
        "memory": f"{place}: the chat template needs more than {MAX_TEMPLATE_MEMORY_BYTES} bytes of memory",
        "long": f"{place}: the chat template makes too long a text, more than "
        f"{MAX_TEMPLATE_TEXT_CHARACTERS} characters of its own",
    }
    raise ManifestInvalid(reasons.get(answer.word, f"{place}: the chat template gives no text"), _COPY_AGAIN)


def _end_reason(status: int) -> str:
    """Return why the process ended, as the end of a sentence.

    status: exit status, as in subprocess.
    """
    if status == -signal.SIGXCPU:
        return f"takes more than {MAX_TEMPLATE_CPU_S} s of processor time"
    if status < 0:
        return f"ends the process that renders it with {signal_name(status)}"
    return f"ends the process that renders it with status {status}"


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing. A link, as in a cache of the hub, is followed.

    Raises ManifestInvalid.
    """
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return read_input(path, MAX_TEMPLATE_FILE_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise ManifestInvalid(f"`{path}` {error}", _COPY_AGAIN) from error

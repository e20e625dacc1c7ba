"""The process of a template: start it, send it variables, and limit its time and memory.

`template_rendering.py` renders, inside this process. A chat template turns messages into the text that a model was
trained on. It comes from the checkpoint. The bundle carries it, and it is not trusted.
It sees only the messages and the names of the special tokens. The sandbox of jinja2 keeps it from everything else.
A user's template of prompts sees the fields of an item.
Limits of the system bound the time and memory of each text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moec.manifests.errors import ExecutionError, InputError, ManifestInvalid, MissingDependency, OptionError
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

from ..bundle.opening import Bundle

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = TOKENIZER_CONFIG_NAME
# Most memory that rendering needs for each byte of the messages. They exist as JSON, as texts, in parts and joined.
_MEMORY_PER_MESSAGE_BYTE = 16
# Most times that a template may repeat the messages.
_TEXT_PER_MESSAGE_BYTE = 4
_COPY_AGAIN = "copy the bundle again"
_MAX_ANSWER_LINE = 64

Message = Mapping[str, Any]
"""`role` (system, user, assistant, ...), `content`, and what else a template knows, like `tool_calls`."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A word of `template_rendering.py: Answer`, and a text. An empty word: the process ended, and why."""

    word: str
    text: str


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


_Process = TypeVar("_Process", bound="_TemplateProcess")


class _TemplateProcess:
    """A process that renders one template, any number of times. Leaving the `with` block ends it.

    The process starts at once and imports jinja2. This costs no time if the caller has other work before `_ask`.

    process: the process. Its `returncode` is None until `close` has collected it.
    Raises ExecutionError if it cannot be started, MissingDependency without jinja2.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise ExecutionError("templates need a Python interpreter, `sys.executable` names none", "set it")
        script = Path(__file__).with_name("template_rendering.py")
        command = [sys.executable, "-I", "-S", str(script), *_package_folders("jinja2", "markupsafe")]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise ExecutionError(f"the process for the template cannot start: {error.strerror}") from error
        self._is_loaded = False

    def __enter__(self: _Process) -> _Process:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # data that was not sent is no longer needed
                if pipe is not None:
                    pipe.close()

    def _ask(self, kind: str, files: tuple[bytes | None, bytes | None], variables: Mapping[str, object]) -> _Answer:
        """Return the answer to a request.

        kind: `chat` or `prompt`.
        files: content of `tokenizer_config.json` and of the template. Only those of the first request count.
        """
        plain = json.dumps(variables)
        characters = MAX_TEMPLATE_TEXT_CHARACTERS + _TEXT_PER_MESSAGE_BYTE * len(plain)
        request = {
            "variables": variables,
            "memory_bytes": MAX_TEMPLATE_MEMORY_BYTES + _MEMORY_PER_MESSAGE_BYTE * len(plain),
            "cpu_s": MAX_TEMPLATE_CPU_S,
            "text_characters": characters,
        }
        sizes = [-1 if file is None else len(file) for file in files]
        first = {"kind": kind, "config_bytes": sizes[0], "template_bytes": sizes[1]}
        begin = () if self._is_loaded else (_line(first), *(file or b"" for file in files))
        self._is_loaded = True
        return self._exchange((*begin, _line(request)), 4 * characters)

    def _exchange(self, parts: Sequence[bytes], limit_bytes: int) -> _Answer:
        """Send a request and return its answer. The word is empty if the process has ended."""
        source, target = self.process.stdout, self.process.stdin
        assert source is not None and target is not None  # both are pipes
        try:
            for part in parts:
                target.write(part)
            target.flush()
        except BrokenPipeError:
            pass  # the process has ended; its status is read below
        word, _, size = source.readline(_MAX_ANSWER_LINE).partition(b" ")
        if size.strip().isdigit() and int(size) <= limit_bytes:
            data = source.read(int(size))
            if len(data) == int(size):
                return _Answer(word.decode("ascii", errors="replace"), data.decode("utf-8", errors="surrogatepass"))
        if size:  # an answer that is too long
            self.process.kill()
        return _Answer("", _end_reason(self.process.wait()))


class ChatRenderer(_TemplateProcess):
    """Renders the chat template of one folder. See `_TemplateProcess`."""

    def render(self, files: TemplateFiles, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text before the assistant's next message, with special tokens.

        files: the same in every call.
        tools: tools that the model may call, in the form of OpenAI.
        Raises OptionError if the bundle has no template.
        Raises ManifestInvalid for a damaged template, or one that needs more time or memory than the limits.
        Raises InputError if the template refuses the messages.
        """
        variables = {"messages": [dict(message) for message in messages], "tools": list(tools) or None}
        answer = self._ask("chat", (files.config, files.template), variables)
        return answer.text if answer.word == "text" else _refuse_chat(answer, files)


class PromptRenderer(_TemplateProcess):
    """Renders a user's template of prompts. See `_TemplateProcess`.

    path: the template, read at once.
    content: its bytes.
    Raises InputError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.content = read_input(path, MAX_TEMPLATE_FILE_BYTES)
        except UnreadableFile as error:
            raise InputError(f"`{path}` {error}", "give a Jinja template of a prompt, like `{{ question }}`") from error
        self._path = path
        super().__init__()

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the prompt of an item.

        variables: the fields of the item, and `shots`.
        Raises InputError for a template that is none, that names an unknown field, or that exceeds the limits.
        """
        answer = self._ask("prompt", (None, self.content), variables)
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
        reason = reasons.get(answer.word, answer.text)
        raise InputError(f"`{self._path}` {reason}", f"repair the template; the fields are {fields}")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _refuse_chat(answer: _Answer, files: TemplateFiles) -> NoReturn:
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
        "": f"the chat template {answer.text}",
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
        name = next((member.name for member in signal.Signals if member == -status), str(-status))
        return f"ends the process that renders it with {name}"
    return f"ends the process that renders it with status {status}"


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing. Raises ManifestInvalid."""
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return read_input(path, MAX_TEMPLATE_FILE_BYTES)
    except UnreadableFile as error:
        raise ManifestInvalid(f"`{path}` {error}", _COPY_AGAIN) from error


def _package_folders(*names: str) -> list[str]:
    """Return the folders that packages are imported from, without importing them. Raises MissingDependency."""
    folders = list[str]()
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            _refuse_without(name)
        folder = str(Path(spec.origin).parent.parent)
        if folder not in folders:
            folders.append(folder)
    return folders


def _refuse_without(name: str) -> NoReturn:
    raise MissingDependency(f"chat templates need the package `{name}`, which is not installed", f"pip install {name}")

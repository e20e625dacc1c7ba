"""The process of a chat template: start it, send it messages, and limit its time and memory.

`chat_template.py` renders, inside this process: it turns messages into the text that a model was trained on.
The template comes from the checkpoint. The bundle carries it, and it is not trusted.
It sees only the messages and the names of the special tokens. The sandbox of jinja2 keeps it from everything else.
Limits of the system bound the time and memory of the process.
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
from typing import NoReturn

from moec.manifests.errors import ExecutionError, InputError, ManifestInvalid, MissingDependency, OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import (
    MAX_TEMPLATE_CPU_S,
    MAX_TEMPLATE_FILE_BYTES,
    MAX_TEMPLATE_MEMORY_BYTES,
    MAX_TEMPLATE_TEXT_CHARACTERS,
)

from ..bundle.opening import Bundle

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
# Most memory that rendering needs for each byte of the messages. They exist as JSON, as texts, in parts and joined.
_MEMORY_PER_MESSAGE_BYTE = 16
# Most times that a template may repeat the messages.
_TEXT_PER_MESSAGE_BYTE = 4
_COPY_AGAIN = "copy the bundle again"

Message = Mapping[str, str]
"""`role` (system, user, assistant, ...) and `content`."""


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Files of a folder that define its chat template.

    folder: the folder, for messages.
    config: content of `tokenizer_config.json`, None without one.
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

    return TemplateFiles(bundle.path, read(CONFIG_NAME), read(TEMPLATE_NAME))


def folder_files(folder: Path) -> TemplateFiles:
    """Read the files of a folder that is not opened as a bundle. Raises ManifestInvalid."""
    return TemplateFiles(folder, _read(folder / CONFIG_NAME), _read(folder / TEMPLATE_NAME))


def render_chat(folder: Path, messages: Sequence[Message]) -> str:
    """Return the text before the assistant's next message, by the template of a folder.

    Raises the errors of ChatRenderer.
    """
    with ChatRenderer() as renderer:
        return renderer.render(folder_files(folder), messages)


class ChatRenderer:
    """A process that renders one chat template. Leaving the `with` block ends it.

    The process starts at once and imports jinja2. This costs no time if the caller has other work before `render`.

    process: the process. Its `returncode` is None until `close` or `render` has collected it.
    Raises ExecutionError if it cannot be started, MissingDependency without jinja2.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise ExecutionError("chat templates need a Python interpreter, `sys.executable` names none", "set it")
        script = Path(__file__).with_name("chat_template.py")
        command = [sys.executable, "-I", "-S", str(script), *_package_folders("jinja2", "markupsafe")]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise ExecutionError(f"the process for the chat template cannot start: {error.strerror}") from error

    def __enter__(self) -> ChatRenderer:
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

    def render(self, files: TemplateFiles, messages: Sequence[Message]) -> str:
        """Return the text before the assistant's next message, with special tokens. May be called once.

        Raises OptionError if the bundle has no template.
        Raises ManifestInvalid for a damaged template, or one that needs more time or memory than the limits.
        Raises InputError if the template refuses the messages.
        """
        config, template = files.config, files.template
        plain = json.dumps([dict(message) for message in messages])
        characters = MAX_TEMPLATE_TEXT_CHARACTERS + _TEXT_PER_MESSAGE_BYTE * len(plain)
        request = {
            "messages": json.loads(plain),
            "config_bytes": -1 if config is None else len(config),
            "template_bytes": -1 if template is None else len(template),
            "memory_bytes": MAX_TEMPLATE_MEMORY_BYTES + _MEMORY_PER_MESSAGE_BYTE * len(plain),
            "cpu_s": MAX_TEMPLATE_CPU_S,
            "text_characters": characters,
        }
        parts = (json.dumps(request).encode() + b"\n", config or b"", template or b"")
        return _text_of(self._ask(parts, 4 * characters), files.folder)

    def _ask(self, parts: Sequence[bytes], limit_bytes: int) -> bytes:
        """Return the answer to a request. Raises ManifestInvalid if the process ends without one."""
        source, target = self.process.stdout, self.process.stdin
        assert source is not None and target is not None  # both are pipes
        try:
            for part in parts:
                target.write(part)
            target.close()
        except BrokenPipeError:
            pass  # the process has ended; its status is checked below
        answer = source.read(limit_bytes + 1)
        if len(answer) > limit_bytes:
            self.process.kill()
        status = self.process.wait()
        if status != 0:
            raise ManifestInvalid(f"the chat template {_end_reason(status)}", _COPY_AGAIN)
        return answer


def _text_of(answer: bytes, folder: Path) -> str:
    """Return the text of an answer. Raises the error that its first word names."""
    word, _, rest = answer.partition(b"\n")
    text = rest.decode("utf-8", errors="surrogatepass")
    if word == b"text":
        return text
    if word == b"missing":
        raise OptionError(
            f"`{folder}` has no chat template", "drop `--chat` and write the prompt as the model reads it"
        )
    if word == b"refused":
        raise InputError(f"the chat template refuses these messages: {text}", "see the model's card")
    reasons = {
        b"no-json": f"`{folder / CONFIG_NAME}` is not JSON: {text}",
        b"damaged": f"`{folder}`: the chat template is damaged: {text}",
        b"endless": f"`{folder}`: the chat template has no end",
        b"memory": f"`{folder}`: the chat template needs more than {MAX_TEMPLATE_MEMORY_BYTES} bytes of memory",
        b"long": f"`{folder}`: the chat template makes too long a text, more than "
        f"{MAX_TEMPLATE_TEXT_CHARACTERS} characters of its own",
    }
    raise ManifestInvalid(reasons.get(word, f"`{folder}`: the chat template gives no text"), _COPY_AGAIN)


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

"""Options that change the prompts and the metric of a task, and the processes that render its templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..terminal.help_sections import add_options, section_option
from .paths import PATH, PLACE

if TYPE_CHECKING:
    from moec.evaluation.tasks.task_settings import TaskSettings
    from moec.runtime.text.template_process import ChatRenderer, PromptRenderer, TemplateFiles

F = TypeVar("F", bound=Callable[..., Any])
_task = section_option("Task")
_OPTIONS = (
    _task(
        "--chat",
        is_flag=True,
        help="Ask by the model's chat template. Solved examples are earlier turns, an answer ends with its turn.",
    ),
    _task("--system", metavar="TEXT", help="With --chat: the system message."),
    _task(
        "--prompt-template",
        type=PATH,
        metavar="FILE",
        help="A Jinja file that makes the prompt from the fields, or with --chat the user's message.",
    ),
    _task(
        "--metric",
        type=PLACE,
        metavar="NAME_OR_FOLDER",
        help="Score generated answers by exact_match, rouge1, rouge2, rougeL, or a metric of `evaluate`.",
    ),
    _task("--lower-is-better", is_flag=True, help="With --metric: lower values are better, as of `wer`."),
    _task(
        "--trust-metric-code", is_flag=True, help="Run the code of a metric that is not part of moec. Read it first."
    ),
)


def task_options(command: F) -> F:
    """Add the options. Their values become a TaskSettings by `task_settings`."""
    return add_options(command, _OPTIONS)


def task_settings(values: dict[str, Any]) -> TaskSettings:
    """Return the settings of the command line, and remove them from its values. Raises OptionError."""
    from moec.evaluation.tasks.task_settings import TaskSettings

    template = values.pop("prompt_template")
    return TaskSettings(
        chat=values.pop("chat"),
        system=values.pop("system"),
        prompt_template=None if template is None else str(template),
        metric=values.pop("metric"),
        lower_is_better=values.pop("lower_is_better"),
        trusts_metric_code=values.pop("trust_metric_code"),
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat template. See `evaluation/tasks/task_settings.py: ChatTemplate`."""

    files: TemplateFiles
    renderer: ChatRenderer

    @property
    def content(self) -> bytes:
        """The bytes of the files that define the template."""
        return (self.files.template or b"") + (self.files.config or b"")

    def render(self, messages: Sequence[Mapping[str, str]], more: Mapping[str, object] | None = None) -> str:
        """Return the text before the assistant's next message. more: more variables of the template."""
        return self.renderer.render(self.files, messages, more=more)


class TemplateProcesses:
    """The processes of the templates of one command. Leaving the `with` block ends them."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._chats: dict[Path, _Chat] = {}

    def __enter__(self) -> TemplateProcesses:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    def of_model(self, folder: Path) -> ModelTemplates:
        """Return the templates for the model or the bundle in a folder."""
        return ModelTemplates(self, folder)

    def chat(self, folder: Path) -> _Chat:
        """Return the chat template of a folder, which is rendered once to find its errors."""
        from moec.runtime.text.template_process import ChatRenderer, folder_files

        if folder not in self._chats:
            files = folder_files(folder)
            renderer = self._opened.enter_context(ChatRenderer())
            self._chats[folder] = _Chat(files, renderer)
            self._chats[folder].render([{"role": "user", "content": "a"}])
        return self._chats[folder]

    def prompt(self, path: Path) -> PromptRenderer:
        """Return a user's template of prompts."""
        from moec.runtime.text.template_process import PromptRenderer

        return self._opened.enter_context(PromptRenderer(path))


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """The templates for one model. See `evaluation/tasks/task_settings.py: Templates`."""

    processes: TemplateProcesses
    folder: Path

    def chat(self) -> _Chat:
        """Return the chat template of the model."""
        return self.processes.chat(self.folder)

    def prompt(self, path: Path) -> PromptRenderer:
        """Return the template in a file."""
        return self.processes.prompt(path)

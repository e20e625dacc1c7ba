"""Changes of a task: its prompts and its metric."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from moec.manifests.errors import OptionError
from moec.manifests.thinking import knows_thinking

from .answer_metrics import PERPLEXITY, answer_metric, check_direction
from .answer_text import AnswerText
from .base import Task
from .prompt_forms import ChatForm, PromptForm, TemplateForm


class PromptTemplate(Protocol):
    """A user's template of prompts."""

    @property
    def content(self) -> bytes:
        """The bytes of the template."""
        ...

    def render(self, variables: Mapping[str, object], /) -> str:
        """Return a prompt. variables: fields of an item, and `shots` with the fields of solved items."""
        ...


class ChatTemplate(Protocol):
    """The chat template of a model."""

    @property
    def content(self) -> bytes:
        """The bytes of the files that define the template."""
        ...

    def render(self, messages: Sequence[Mapping[str, str]], more: Mapping[str, object] | None = None, /) -> str:
        """Return the text before the assistant's next message, with special tokens.

        more: more variables of the template.
        """
        ...


class Templates(Protocol):
    """Opens the templates of prompts. What it opens stays open until the caller ends it."""

    def chat(self) -> ChatTemplate:
        """Return the chat template of the model. Raises OptionError without one."""
        ...

    def prompt(self, path: Path) -> PromptTemplate:
        """Return the template in a file. Raises InputError."""
        ...


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Changes of every task of a run.

    chat: prompts are messages in the model's chat template. Solved examples are earlier turns.
    system: the first message of a chat.
    prompt_template: path of a Jinja template of the prompt, or of a user's message.
    metric: name of the primary metric, see `answer_metrics.py`; None: the task's own.
    lower_is_better: the direction of `metric`.
    trusts_metric_code: whether the code of a metric may run that is not the project's own.
    Raises OptionError for a setting without effect.
    """

    chat: bool = False
    system: str | None = None
    prompt_template: str | None = None
    metric: str | None = None
    lower_is_better: bool = False
    trusts_metric_code: bool = False

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise OptionError("`--system` has no effect without `--chat`", "add `--chat`")
        if self.lower_is_better and self.metric is None:
            raise OptionError("`--lower-is-better` has no effect without `--metric`", "add `--metric`")

    @property
    def first_option(self) -> str:
        """The option that set the first of the changes."""
        return next(iter(self.to_plain()), "trust-metric-code").replace("_", "-")

    def to_plain(self) -> dict[str, str]:
        """Return what was set, for records. A file's content is in the settings of the task."""
        plain = {
            "chat": "true" if self.chat else None,
            "system": self.system,
            "prompt_template": None if self.prompt_template is None else Path(self.prompt_template).name,
            "metric": None if self.metric is None else Path(self.metric).name,
            "lower_is_better": "true" if self.lower_is_better else None,
        }
        return {name: value for name, value in plain.items() if value is not None}

    def apply(self, task: Task, templates: Callable[[], Templates] | None) -> Task:
        """Return the changed task.

        templates: opens the templates, which is done only if they are used.
        Raises OptionError where a change does not fit the task, and the errors of `templates`.
        """
        task = self._with_metric(task)
        if not self.chat and task.thinking is not None:
            raise OptionError(
                f"task `{task.name}` states `thinking`, which only a chat template switches",
                "add `--chat`, or leave `thinking` out of the file",
            )
        if not self.chat and self.prompt_template is None:
            return task
        if task.answer_field is None:
            name = "--chat" if self.chat else "--prompt-template"
            raise OptionError(f"task `{task.name}` scores plain text and has no prompt", f"leave out `{name}`")
        if templates is None:
            raise OptionError("templates of prompts need a model", "leave out `--chat` and `--prompt-template`")
        form, settings = self._form(templates(), task)
        stop = () if self.chat else task.stop  # an answer of a chat ends with its turn
        return replace(task, form=form, stop=stop, settings={**task.settings, **settings})

    def _form(self, templates: Templates, task: Task) -> tuple[PromptForm, dict[str, str]]:
        settings, form = dict[str, str](), None
        if self.prompt_template is not None:
            template = templates.prompt(Path(self.prompt_template))
            text = template.content.decode("utf-8", errors="replace").removesuffix("\n")
            separator = "" if text[-1:].isspace() else " "  # between the prompt and the answer
            form = TemplateForm(template.render, separator, b"shots" in template.content)
            settings["prompt_template_sha256"] = hashlib.sha256(template.content).hexdigest()
        if not self.chat:
            assert form is not None  # one of the two is asked for
            return form, settings
        chat, variables = templates.chat(), thinking_variables(task.thinking)
        settings["chat_template_sha256"] = hashlib.sha256(chat.content).hexdigest()
        if self.system is not None:
            settings["system"] = self.system
        if task.thinking is not None:
            question = [{"role": "user", "content": "a"}]
            if chat.render(question, thinking_variables(True)) == chat.render(question, thinking_variables(False)):
                raise OptionError(
                    f"task `{task.name}` states `thinking`, and the chat template of the model does not switch it",
                    "leave `thinking` out of the file",
                )
            settings["thinking"] = "on" if task.thinking else "off"

        def render(messages: Sequence[Mapping[str, str]]) -> str:
            return chat.render(messages, variables)

        return ChatForm(render, self.system, form, knows_thinking([chat.content])), settings

    def _with_metric(self, task: Task) -> Task:
        if self.metric is None:
            return task
        check_direction(self.metric, self.lower_is_better)
        if task.metric == self.metric:
            return task
        if self.metric in task.metrics:
            others = (name for name in task.metrics if name != self.metric)
            return replace(task, metrics=(self.metric, *others))
        if task.score is None or self.metric == PERPLEXITY:
            raise OptionError(
                f"task `{task.name}` is scored by {task.metric}, not by `{self.metric}`",
                "leave out `--metric`, or write a task file",
            )
        metric = answer_metric(
            self.metric,
            task.answer_text or AnswerText(),
            lower_is_better=self.lower_is_better,
            trusts_code=self.trusts_metric_code,
        )
        return replace(task, **metric)


def thinking_variables(is_on: bool | None) -> dict[str, bool]:
    """Return the variables by which published chat templates switch thinking; none to leave it to the template."""
    return {} if is_on is None else {"enable_thinking": is_on, "thinking": is_on}


NO_SETTINGS = TaskSettings()
"""Tasks as they are."""

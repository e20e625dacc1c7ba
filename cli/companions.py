"""Problems that the runtime would have with the files next to the weights of a model folder."""

from __future__ import annotations

from pathlib import Path

from moec.manifests.errors import CheckpointError, InputError, ManifestInvalid, MissingDependency
from moec.manifests.files.limits import MAX_CONFIG_BYTES

_MESSAGE = {"role": "user", "content": "a"}


def companion_problems(folder: Path) -> list[CheckpointError]:
    """Return the problems of the recommended sampling and of the chat template.

    A template that refuses one message may take others. Raises ExecutionError if its process cannot start.
    """
    from moec.manifests.files.input_file import read_input
    from moec.runtime.text.generation_defaults import GENERATION_NAME, sampling_in
    from moec.runtime.text.template_process import CONFIG_NAME, TEMPLATE_NAME, render_chat

    problems = list[CheckpointError]()
    generation = folder / GENERATION_NAME
    try:
        if generation.is_file():
            sampling_in(read_input(generation, MAX_CONFIG_BYTES, follow_links=True), generation)
    except ManifestInvalid as error:
        problems.append(CheckpointError(error.message, "repair the file, or remove it"))
    if not any((folder / name).is_file() for name in (TEMPLATE_NAME, CONFIG_NAME)):
        return problems
    try:
        render_chat(folder, [_MESSAGE])
    except ManifestInvalid as error:
        problems.append(CheckpointError(error.message, "repair the file, or remove it"))
    except (InputError, MissingDependency):  # no template, a template for other messages, or no jinja2
        pass
    return problems

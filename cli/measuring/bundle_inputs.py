"""Inputs of a measurement of a finished bundle: checkpoint and data, named or from the log of its compile."""

from __future__ import annotations

from pathlib import Path

from moec.manifests.errors import OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import LOG_JSON, MAX_LOG_BYTES
from moec.manifests.files.strict_json import load_strict_json

from ..terminal.compile_log import LOG_SUFFIX


def measurement_inputs(bundle: Path, model: str | None, data: str | None) -> tuple[str, str]:
    """Return the checkpoint and the data of a bundle's compile.

    bundle: the folder, as an absolute path.
    model, data: values of `--model` and `--data`. None: from the log next to the bundle.
    Raises OptionError if a path is neither given nor in the log.
    """
    try:
        log = load_strict_json(read_input(bundle.with_name(bundle.name + LOG_SUFFIX), MAX_LOG_BYTES), LOG_JSON)
    except (UnreadableFile, ValueError):
        log = None
    texts = {name: text for name, text in log.items() if isinstance(text, str)} if isinstance(log, dict) else {}
    model, data = model or texts.get("model"), data or texts.get("data")
    if model is None or data is None:
        missing = " and ".join(
            text
            for value, text in ((model, "the checkpoint (`--model`)"), (data, "the task data (`--data`)"))
            if value is None
        )
        raise OptionError(
            f"a measurement reads the inputs of the compile, and the log next to `{bundle}` does not name {missing}",
            "name the paths of the compile",
        )
    return model, data

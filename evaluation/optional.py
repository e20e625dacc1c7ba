"""The one place where packages of the extra `[eval]` are loaded."""

from __future__ import annotations

import importlib
from typing import Any

from moec.manifests.errors import MissingDependency


def load(module: str, purpose: str) -> Any:
    """Import `module` or say which extra brings it. Raises MissingDependency."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise MissingDependency(
                f"`{package}` needs the package `{error.name}`, which is not installed", "pip install 'moec[eval]'"
            ) from error
        raise MissingDependency(
            f"{purpose} needs the package `{package}`, which is not installed", "pip install 'moec[eval]'"
        ) from error

"""Load packages of the extras `[eval]` and `[lm-eval]`."""

from __future__ import annotations

import importlib
from typing import Any

from moec.manifests.errors import MissingDependency


def load(module: str, purpose: str, extra: str = "eval") -> Any:
    """Import `module`. Raises MissingDependency with the extra that contains it."""
    remedy = f"pip install 'moec[{extra}]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise MissingDependency(
                f"`{package}` needs the package `{error.name}`, which is not installed", remedy
            ) from error
        raise MissingDependency(f"{purpose} needs the package `{package}`, which is not installed", remedy) from error

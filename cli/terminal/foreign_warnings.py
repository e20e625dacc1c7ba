"""Warnings and advice of other packages: for people who work on moec, hidden from those who use it.

MOEC_WARNINGS=1 shows them. Warnings that modules of moec raise themselves are always shown.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

VARIABLE = "MOEC_WARNINGS"
# Packages that print their advice past `warnings` and `logging`, and what keeps each quiet.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "EVALUATE_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_WARNING_MODULES = ("warnings", "_py_warnings")
_show_warning = warnings.showwarning


def hide_foreign_warnings() -> None:
    """Show no warning or log line of another package from now on; with MOEC_WARNINGS=1 every one of them.

    What the user has set for one of these packages stays. Call before the packages are imported.
    """
    if os.environ.get(VARIABLE) == "1":
        if not sys.warnoptions:
            warnings.simplefilter("default")
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.lastResort = logging.NullHandler()  # what prints the lines of loggers that nobody has set up
    warnings.showwarning = _show_own


def _show_own(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Pass on what a function of moec warns of itself.

    The place that a warning names does not tell: other packages warn in the name of their caller.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _WARNING_MODULES:
        frame = frame.f_back
    is_own = str(frame.f_globals.get("__name__", "")).startswith("moec.")
    if is_own and "warn" in frame.f_code.co_names:  # without that name, an extension that it has called warns
        _show_warning(message, category, filename, lineno, file, line)

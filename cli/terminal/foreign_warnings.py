"""Warnings and advice of other packages. They are for developers of moec, so they are hidden by default.

MOEC_WARNINGS=1 shows them. Warnings that modules of moec raise themselves are always shown.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

VARIABLE = "MOEC_WARNINGS"
# Packages that print advice without `warnings` and `logging`: variable and value that turn it off.
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
    """Hide all warnings and log lines of other packages. With MOEC_WARNINGS=1, show all of them.

    Settings that the user made for one of these packages stay. Call before the packages are imported.
    """
    if os.environ.get(VARIABLE) == "1":
        if not sys.warnoptions:
            warnings.simplefilter("default")
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.lastResort = logging.NullHandler()  # handles lines of loggers without a handler
    warnings.showwarning = _show_own


def _show_own(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning if a function of moec raised it.

    The file name of a warning does not tell that, because other packages warn in the name of their caller.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _WARNING_MODULES:
        frame = frame.f_back
    is_own = str(frame.f_globals.get("__name__", "")).startswith("moec.")
    if is_own and "warn" in frame.f_code.co_names:  # otherwise an extension that it called warns
        _show_warning(message, category, filename, lineno, file, line)

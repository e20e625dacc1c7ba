"""Files of the folder `page`, which the wheel carries: the style sheet and the script."""

from __future__ import annotations

from importlib import resources


def page_file(name: str) -> str:
    """Return the text of a file."""
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")

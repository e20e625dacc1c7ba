"""Files of the folder `page`, which the wheel carries, and pictures as SVG files with its style sheet."""

from __future__ import annotations

from importlib import resources


def page_file(name: str) -> str:
    """Return the text of a file of the folder `page`."""
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def svg_file(picture: str) -> str:
    """Return the file of an SVG element. It needs no other file, and runs no script.

    picture: an element that begins with `<svg class="chart"`.
    """
    named = picture.replace('<svg class="chart"', '<svg xmlns="http://www.w3.org/2000/svg" class="chart"', 1)
    background = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return named.replace(">", f"><style>{page_file('report.css')}</style>{background}", 1) + "\n"

"""A picture as an SVG file of its own: the style sheet of the page, and a background for light and dark."""

from __future__ import annotations

from ..page_files import page_file


def svg_file(picture: str) -> str:
    """Return the file of an SVG element. It needs no other file, and runs no script.

    picture: an element that begins with `<svg class="chart"`.
    """
    named = picture.replace('<svg class="chart"', '<svg xmlns="http://www.w3.org/2000/svg" class="chart"', 1)
    background = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return named.replace(">", f"><style>{page_file('report.css')}</style>{background}", 1) + "\n"

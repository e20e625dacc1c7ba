"""Numbers as people read them, parts of HTML that several figures share, and files of the folder `page`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_unit(size_bytes: float) -> float:
    """Return the bytes of the unit that `size_text` takes."""
    return 1024.0 ** (0 if size_bytes < 1024 else min(len(_UNITS) - 1, int(math.log(size_bytes, 1024))))


def size_text(size_bytes: float) -> str:
    """Return a size in the largest fitting unit, with three digits."""
    unit = size_unit(size_bytes)
    name, value = _UNITS[round(math.log(unit, 1024))], size_bytes / unit
    return f"{value:.0f} {name}" if unit == 1 or value >= 100 else f"{value:.3g} {name}"


def share_text(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def short_share(share: float) -> str:
    """Return a share in percent for a tick, without superfluous digits."""
    return f"{100 * share:g} %" if abs(share) < 1e-12 or abs(share) >= 1e-5 else f"{100 * share:.0e} %"


def nats_text(nats: float) -> str:
    """Return a KL with three digits."""
    return f"{nats:.3g}"


def tick_share(share: float) -> str:
    """Return a share in percent, rounded to what a tick needs."""
    return f"{round(100 * share, 6):g} %"


def number(value: object) -> float:
    """Return a value of quality.json that must be a finite number. Raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"expected a finite number, found {value!r}"[:120])
    return float(value)


def section(anchor: str, title: str, *parts: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def note(text: str) -> str:
    """Return a line that says why a figure is missing."""
    return f'<p class="missing">{escape(text)}</p>'


def figure(svg: str, caption: str) -> str:
    """Return a picture with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: str = "") -> str:
    """Return a table. The first column is text, the others are numbers. Cells are plain text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{classes}">{content}</table></div>'


def page_file(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def svg_file(picture: str) -> str:
    """Return the file of an SVG element. It needs no other file, and runs no script.

    picture: an element that begins with `<svg class="chart"`.
    """
    named = picture.replace('<svg class="chart"', '<svg xmlns="http://www.w3.org/2000/svg" class="chart"', 1)
    background = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return named.replace(">", f"><style>{page_file('report.css')}</style>{background}", 1) + "\n"

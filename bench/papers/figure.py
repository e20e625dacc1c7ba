"""A figure of a paper, and what measuring it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from .models import Model

if TYPE_CHECKING:
    from .inputs import Inputs

Paper = Literal["edgemoe", "hobbit", "twiddler", "mobile"]
Verdict = Literal["same", "partly", "different"]
Origin = Literal["Measured", "Simulated", "Measured and simulated"]
PAPERS: dict[Paper, str] = {"edgemoe": "EdgeMoE", "hobbit": "HOBBIT", "twiddler": "Twiddler", "mobile": "MoBiLE"}
DIGITS = 6
"""Significant digits of a stored value."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    kind: `lines` draws `points`, `bars` draws `bars`, `map` draws `rows`.
    title: text above the axes.
    x_label, y_label: titles of the axes, with units. A map has layers upwards and experts to the right.
    points: points (x, y) of each line, by name.
    groups: names of the groups of bars.
    bars: heights of each kind of bar, one per group, by name.
    rows: values of a map, [L][E].
    is_log: whether the vertical axis is logarithmic.
    """

    kind: Literal["lines", "bars", "map"]
    title: str
    x_label: str
    y_label: str
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    groups: Sequence[str] = ()
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rows: Sequence[Sequence[float]] = ()
    is_log: bool = False


@dataclass(frozen=True)
class Measured:
    """Result of a measurement.

    panels: pairs of axes, from left to right.
    found: sentences with the numbers, Markdown. Each is an item of a list.
    verdict: whether the paper's finding holds on all models.
    natural: whether it holds on the natural example; None if that is not measured.
    """

    panels: Sequence[Panel]
    found: Sequence[str]
    verdict: Verdict
    natural: Verdict | None = None


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper that is measured here.

    name: file name without suffix; it begins with the paper's.
    paper: key of PAPERS.
    source: place in the paper.
    title: heading on the page.
    reported: sentences on the paper's result, Markdown.
    models: models that are measured here. Without one of them the published result is kept.
    how: sentences on the measurement here, Markdown.
    why: sentences on why the result is equal or not, Markdown.
    measure: returns the result.
    on_natural: sentences on the natural example, Markdown; empty if it is not measured.
    origin: first word of its caption, by what its numbers come from.
    throttles: whether it limits reads of storage. Without `--with-throttle` its published result is kept.
    needs: returns what this machine lacks for it; empty if nothing. It may have no published result then.
    """

    name: str
    paper: Paper
    source: str
    title: str
    reported: str
    models: tuple[Model, ...]
    how: str
    why: str
    measure: Callable[[Inputs], Measured]
    on_natural: str = ""
    origin: Origin = "Measured"
    throttles: bool = False
    needs: Callable[[], str] | None = None


@dataclass(frozen=True)
class NotMeasured:
    """A figure or table of a paper that is not measured here.

    paper: key of PAPERS.
    source: place in the paper.
    title: what it shows.
    reason: why it is not measured, Markdown.
    """

    paper: Paper
    source: str
    title: str
    reason: str


def to_record(name: str, measured: Measured) -> str:
    """Return a result as JSON text."""
    return json.dumps({"figure": name, **_rounded(asdict(measured))}, indent=1) + "\n"


def from_record(text: str) -> Measured:
    """Return the result of a JSON text of `to_record`. Raises TypeError for other fields."""
    values = json.loads(text)
    panels = [Panel(**{each.name: panel[each.name] for each in fields(Panel)}) for panel in values["panels"]]
    return Measured(panels, values["found"], values["verdict"], values.get("natural"))


def judged(values: Sequence[float], same: float, partly: float) -> Verdict:
    """Return the verdict on values that are larger the better the finding holds. The least one decides.

    same, partly: least value of each verdict.
    """
    least = min(values)
    return "same" if least >= same else "partly" if least >= partly else "different"


def of_all(verdicts: Collection[Verdict]) -> Verdict:
    """Return the verdict of all models: theirs if they have the same, else `partly`."""
    return next(iter(verdicts)) if len(set(verdicts)) == 1 else "partly"


def over_layers(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return one value of each layer as the points of a line."""
    return [(float(layer), float(value)) for layer, value in enumerate(values)]


def percent(share: float, digits: int = 0) -> str:
    """Return a share as text."""
    return f"{100 * share:.{digits}f} %"


def significant(value: float, digits: int = 3) -> str:
    """Return a value with some significant digits as text, without an exponent if it is under a million."""
    return f"{float(f'{value:.{digits}g}'):,g}"


def _rounded(value: Any) -> Any:
    """Return plain values whose floats have DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value

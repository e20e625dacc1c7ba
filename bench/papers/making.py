"""Measure figures, draw them, and write the pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .drawing import draw
from .figure import PAPERS, Figure, Measured, from_record, to_record
from .inputs import Inputs, complete_file
from .page import page
from .registry import FIGURES, NOT_MEASURED


def make(figures: Sequence[Figure], inputs: Inputs, output: Path, again: bool, say: Callable[[str], object]) -> None:
    """Measure figures that have no result yet. Draw all of them, and write the pages of the papers.

    output: folder of the pages and of their numbers. Pictures go to its folder `figures`.
    again: measure also what has a result.
    """
    for figure in figures:
        kept = inputs.folder / "figures" / f"{figure.name}.json"
        lacking = _lacking(figure, inputs)
        if lacking:
            say(f"{figure.name}: the published result is kept; {lacking}")
            continue
        if again or not kept.exists():
            say(f"measuring {figure.name}")
            began, compiled_s = time.monotonic(), inputs.compiling_s
            with complete_file(kept) as partial:
                partial.write_text(to_record(figure.name, figure.measure(inputs)), encoding="utf-8")
            compiled_s = inputs.compiling_s - compiled_s
            say(f"{figure.name} took {time.monotonic() - began - compiled_s:.0f} s, and {compiled_s:.0f} s for bundles")
        publish(figure, kept.read_text(encoding="utf-8"), output)
        say(f"{figure.name}: {output / 'figures' / figure.name}.svg")
    write_pages(output)


def _lacking(figure: Figure, inputs: Inputs) -> str:
    """Return what a measurement needs that is not here; empty if nothing is missing."""
    absent = [model for model in figure.models if not model.is_there()]
    if absent:
        return f"`{absent[0].made_by}` makes the model that it needs"
    if figure.throttles and not inputs.throttles:
        return "`--with-throttle` measures it"
    return "" if figure.needs is None else figure.needs()


def publish(figure: Figure, record: str, output: Path) -> None:
    """Write the numbers of a figure into the file of its paper, and its picture."""
    (output / "figures").mkdir(parents=True, exist_ok=True)
    records = {**_records(figure.paper, output), figure.name: json.loads(record)}
    lines = [json.dumps(records[name], separators=(",", ":")) + "\n" for name in sorted(records)]
    (output / f"{figure.paper}.jsonl").write_text("".join(lines), encoding="utf-8")
    (output / "figures" / f"{figure.name}.svg").write_bytes(draw(figure.title, from_record(record)))


def write_pages(output: Path) -> None:
    """Write the page of each paper from the numbers that lie in the folder."""
    output.mkdir(parents=True, exist_ok=True)
    for paper in PAPERS:
        own = [figure for figure in FIGURES if figure.paper == paper]
        missing = [each for each in NOT_MEASURED if each.paper == paper]
        text = page(paper, own, published(own, output), missing)
        (output / f"{paper}.md").write_text(text, encoding="utf-8")


def published(figures: Sequence[Figure], output: Path) -> dict[str, Measured]:
    """Return the results of figures of one paper that have one, by name."""
    records = {
        name: record for paper in {each.paper for each in figures} for name, record in _records(paper, output).items()
    }
    return {figure.name: from_record(json.dumps(records[figure.name])) for figure in figures if figure.name in records}


def _records(paper: str, output: Path) -> dict[str, Any]:
    """Return the published numbers of a paper's figures, by name."""
    path = output / f"{paper}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["figure"]: record for record in map(json.loads, lines)}

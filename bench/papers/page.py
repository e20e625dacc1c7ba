"""The page of a paper: what it reports, what is measured here, and whether the finding is the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import compress
from textwrap import indent, wrap

from .figure import PAPERS, Figure, Measured, NotMeasured, Paper
from .models import DESCRIBED, MODELS, NATURAL, Model

WIDTH = 110
VERDICTS = {"same": "same", "partly": "partly the same", "different": "different"}
COMMANDS: dict[Paper, str] = {
    "edgemoe": "`moec compile MODEL --as edgemoe --loss 2% --data DATA` searches as EdgeMoE. "
    "`moec run BUNDLE --as edgemoe` runs as EdgeMoE.",
    "hobbit": "`moec compile MODEL --as hobbit --loss 2% --data DATA` adds low versions. "
    "`moec run BUNDLE --as hobbit` runs as HOBBIT.",
    "twiddler": "`moec run BUNDLE --as twiddler` runs as Twiddler.",
    "mobile": "`moec run BUNDLE --as mobile` runs as MoBiLE.",
}
INTRODUCTIONS: dict[Paper, str] = {
    "edgemoe": "EdgeMoE chooses a bitwidth for every expert, keeps some experts in a buffer, and reads the likeliest "
    "next experts ahead. Its models are Switch Transformers, GPTSAN and MiniCPM-MoE. Its devices are a Jetson TX2, a "
    "Raspberry Pi 4B and a phone.",
    "hobbit": "HOBBIT stores each expert in a high and a low precision. A missed expert of low weight is read in "
    "its low version or skipped. Routers of later layers foresee experts, and a cache policy combines four "
    "records. Its models are Mixtral-8x7B and Phi-3.5-MoE.",
    "twiddler": "Twiddler (also Fiddler) places popular experts on the GPU. It computes the other ones on the CPU, or "
    "copies them, whichever takes less time. Its model is Mixtral-8x7B.",
    "mobile": "MoBiLE decodes with half of the experts per token. If the little model is not confident, the token is "
    "computed again with all experts. Its models are Qwen1.5-MoE and OLMoE.",
}
NOTE = (
    "`make papers` measures and draws these figures, `python -m bench.papers NAME` one of them. The numbers of a "
    "picture are in the line `NAME` of the `.jsonl` file next to this page. The models are small: a figure shows "
    "whether a mechanism behaves as published, not how large the effect is on the paper's models. Simulated times "
    "follow from routing traces and the rates of a device profile. Computing takes the bytes of the weights over the "
    "memory rate. In the head of a table, … stands for a number of each cell. Times of this machine are quotients of "
    "two ways that took turns, or times with limited storage (`--with-throttle`, as root)."
)
NOTE_PAPER: Paper = "edgemoe"
"""Its page has the note and the models, the others a link."""
ON_NATURAL = f"`{NATURAL.made_by}` makes the natural example, which is not in the tree. Without it, its results stay."
LEAST_ROWS = 3
"""Sentences of one form that become a table."""
NUMBER = re.compile(r"-?\d[\d.,]*(?:e-\d+)?(?<![.,])")


def page(
    paper: Paper, figures: Sequence[Figure], measured: Mapping[str, Measured], missing: Sequence[NotMeasured]
) -> str:
    """Return the page of a paper as Markdown.

    figures: its figures, in the order of the page.
    measured: results by name. A figure without a result is listed as not measured yet.
    missing: what is not measured here.
    """
    parts = [f"# The figures of {PAPERS[paper]}, measured here", COMMANDS[paper], _paragraph(INTRODUCTIONS[paper])]
    has_natural = any(found.natural is not None for found in measured.values())
    if paper == NOTE_PAPER:
        parts += [_paragraph(NOTE), _models(), *([_paragraph(ON_NATURAL)] if has_natural else [])]
    else:
        parts += [f"[{PAPERS[NOTE_PAPER]}]({NOTE_PAPER}.md) says how the figures are made, and describes the models."]
    parts += [_summary(figures, measured, has_natural)]
    parts += [part for figure in figures if figure.name in measured for part in _section(figure, measured[figure.name])]
    parts += ["## Not measured", _missing(missing)] if missing else []
    return "\n\n".join(parts) + "\n"


def _models() -> str:
    """Return a list of the models of all figures."""
    return "\n".join(_item(f"{m.name.capitalize()}: {m.described}.{_routed(m) * (m in MODELS)}") for m in DESCRIBED)


def _routed(model: Model) -> str:
    return f" Routes: {model.train_tokens:,} train and {model.test_tokens:,} held-out tokens of {model.texts}."


def _summary(figures: Sequence[Figure], measured: Mapping[str, Measured], has_natural: bool) -> str:
    header = ["in the paper", "figure", "finding here", *(["on natural weights"] if has_natural else [])]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for figure in figures:
        found = measured.get(figure.name)
        verdict = "not measured yet" if found is None else VERDICTS[found.verdict]
        title = figure.title if found is None else f"[{figure.title}](#{anchor(figure.title)})"
        natural = "" if found is None or found.natural is None else VERDICTS[found.natural]
        lines.append(f"| {figure.source} | {title} | {verdict} |{f' {natural} |' if has_natural else ''}")
    return "\n".join(lines)


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return "-".join(kept.split())


def _section(figure: Figure, measured: Measured) -> list[str]:
    models = ", ".join(model.name for model in figure.models)
    sentences = [_shortened(sentence) for sentence in measured.found]
    groups = [group for group in _alike(sentences) if len(group) >= LEAST_ROWS]
    listed = [sentence for sentence in sentences if all(sentence not in group for group in groups)]
    items = [
        _item(f"**{figure.source}.** {figure.reported}"),
        _item(f"**{figure.origin} ({models}).** {figure.how}"),
        *(indent(_item(f"{sentence}."), "  ") for sentence in listed),
        _item(f"**Finding.** {figure.why}"),
    ]
    if measured.natural is not None:
        items.append(_item(f"**Natural weights.** {figure.on_natural}"))
    return [
        f"## {figure.title}",
        f"![{figure.source}](figures/{figure.name}.svg)",
        "\n".join(items),
        *map(_table, groups),
    ]


def _shortened(sentence: str) -> str:
    """Return a sentence with the names of models instead of their labels."""
    for model in DESCRIBED:
        sentence = sentence.replace(model.label, model.name)
    return sentence


def _alike(sentences: Sequence[str]) -> list[list[str]]:
    """Return sentences in groups whose texts after the first colon differ in numbers alone."""
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(NUMBER.sub("…", sentence.partition(": ")[2]), []).append(sentence)
    return [group for form, group in groups.items() if form]


def _table(group: Sequence[str]) -> str:
    """Return sentences `ROW: NUMBERS`, or `COLUMN, ROW: NUMBERS`, as a table.

    A number that all sentences have at the same place is part of the head.
    """
    keys, values = zip(*(sentence.split(": ", 1) for sentence in group), strict=True)
    numbers = [NUMBER.findall(value) for value in values]
    changes = [len(set(column)) > 1 for column in zip(*numbers, strict=True)]
    heads = iter("…" if varies else number for number, varies in zip(numbers[0], changes, strict=True))
    form = NUMBER.sub(lambda _: next(heads), values[0])
    cells = {key: ", ".join(compress(line, changes)) for key, line in zip(keys, numbers, strict=True)}
    columns = list(dict.fromkeys(key.partition(", ")[0] for key in keys))
    rows = list(dict.fromkeys(key.partition(", ")[2] for key in keys))
    if len(rows) == 1 and rows[0]:
        return _rows(f"{rows[0]}: {form}", dict(zip(columns, cells.values(), strict=True)))
    if any(f"{column}, {row}" not in cells for column in columns for row in rows):
        return _rows(form, cells)
    lines = (f"| {row} | {' | '.join(cells[f'{column}, {row}'] for column in columns)} |" for row in rows)
    return "\n".join([f"| {form} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *lines])


def _rows(head: str, cells: Mapping[str, str]) -> str:
    """Return a table of two columns."""
    return "\n".join([f"| | {head} |", "|---|---|", *(f"| {key} | {cell} |" for key, cell in cells.items())])


def _missing(missing: Sequence[NotMeasured]) -> str:
    rows = [f"| {each.source} | {each.title} | {each.reason} |" for each in missing]
    return "\n".join(["| in the paper | what it shows | reason |", "|---|---|---|", *rows])


def _paragraph(text: str) -> str:
    return "\n".join(wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _item(text: str) -> str:
    lines = wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "* " + "\n  ".join(lines)

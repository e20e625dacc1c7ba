"""The page of a paper: what it reports, what is measured here, and whether the finding is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent, wrap

from .figure import PAPERS, Figure, Measured, NotMeasured, Paper
from .models import DESCRIBED, NATURAL, RANDOM, Model, named

WIDTH = 110
VERDICTS = {"same": "same", "partly": "partly the same", "different": "different"}
COMMANDS: dict[Paper, str] = {
    "edgemoe": "`moec compile MODEL --as edgemoe` searches as EdgeMoE, and `moec run BUNDLE --as edgemoe` runs as it.",
    "hobbit": "`moec compile MODEL --as hobbit` adds low versions, and `moec run BUNDLE --as hobbit` runs as HOBBIT.",
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
    "picture are in the line `NAME` of the `.jsonl` file next to this page. The models here are small. A figure "
    "shows whether a mechanism behaves as published, not how large the effect is on the paper's models. Simulated "
    "times follow from routing traces and the rates of a device profile. Few figures hold times of this machine: "
    "quotients of two ways that took turns, and times with limited storage. `--with-throttle` measures the latter, "
    "as root."
)
NOTE_PAPER: Paper = "edgemoe"
"""Its page has the note, the others a link."""
ON_NATURAL = (
    f"The last column says what holds on natural weights. `{NATURAL.made_by}` makes the natural example, which is not "
    "in the tree. Without it, `make papers` keeps the published result of a figure that needs it."
)


def page(
    paper: Paper, figures: Sequence[Figure], measured: Mapping[str, Measured], missing: Sequence[NotMeasured]
) -> str:
    """Return the page of a paper as Markdown.

    figures: its figures, in the order of the page.
    measured: results by name. A figure without a result is listed as not measured yet.
    missing: what is not measured here.
    """
    name = PAPERS[paper]
    parts = [f"# The figures of {name}, measured here", COMMANDS[paper], _paragraph(INTRODUCTIONS[paper])]
    has_natural = any(found.natural is not None for found in measured.values())
    note = NOTE if paper == NOTE_PAPER else f"[{PAPERS[NOTE_PAPER]}]({NOTE_PAPER}.md) says how the figures are made."
    parts += [_paragraph(note), _models(figures, has_natural)]
    parts += [_paragraph(ON_NATURAL)] if has_natural and paper == NOTE_PAPER else []
    parts += [_summary(figures, measured, has_natural)]
    parts += [part for figure in figures if figure.name in measured for part in _section(figure, measured[figure.name])]
    parts += ["## Not measured", _missing(missing)] if missing else []
    return "\n\n".join(parts) + "\n"


def _models(figures: Sequence[Figure], has_routes: bool) -> str:
    """Return a list of the models of the figures. has_routes: whether it says how many tokens were routed."""
    used = [model for model in DESCRIBED if any(model in figure.models for figure in figures)]
    return "\n".join(
        _item(f"{named([m]).capitalize()}: {m.described}.{_routed(m) * (has_routes and m is not RANDOM)}") for m in used
    )


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
    picture = f"![{figure.title}](figures/{figure.name}.svg)"
    caption = _paragraph(f"*{figure.origin} on {named(figure.models)}.*")
    told = [
        _item(f"**In the paper ({figure.source}).** {figure.reported}"),
        _item(f"**Measured here.** {figure.how}"),
        *(indent(_item(f"{sentence}."), "  ") for sentence in measured.found),
        _item(f"**Finding: {VERDICTS[measured.verdict]}.** {figure.why}"),
    ]
    if measured.natural is not None:
        told.append(_item(f"**On natural weights: {VERDICTS[measured.natural]}.** {figure.on_natural}"))
    return [f"## {figure.title}", picture, caption, "\n".join(told)]


def _missing(missing: Sequence[NotMeasured]) -> str:
    rows = [f"| {each.source} | {each.title} | {each.reason} |" for each in missing]
    return "\n".join(["| in the paper | what it shows | reason |", "|---|---|---|", *rows])


def _paragraph(text: str) -> str:
    return "\n".join(wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _item(text: str) -> str:
    lines = wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "* " + "\n  ".join(lines)

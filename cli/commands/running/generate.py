"""`moec generate`: continue the prompts of a file, and write the continuations to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import DataError, OptionError

from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import say_decisions
from ...options.paths import bundle_argument, file_option, output_option, slots_option, write_json_lines
from ...options.runtime_options import build_options, runtime_options
from ...terminal import output
from ...terminal.help_sections import SectionCommand, SectionOption
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.evaluation.text_files import Rows

DEFAULT_SLOTS = 32
# What ends the body of a function in HumanEval. Source: Evaluating Large Language Models Trained on Code, section 2.1.
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


class OutputOption(SectionOption):
    """An option that also has the name `--out` of earlier versions. The help text does not show it."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add the option under all of its names."""
        super().add_to_parser(parser, ctx)
        parser.add_option(self, ["--out"], dest=self.name, action="store")


@click.command("generate", cls=SectionCommand, short_help="Continue every prompt of a file, many at once.")
@bundle_argument
@file_option("--prompts", required=True, help="JSONL file with a prompt in each object.")
@output_option(
    "-o",
    "--output",
    "out",
    cls=OutputOption,
    required=True,
    help="JSONL file to write: `completion`, and `task_id` if the prompt has one.",
)
@click.option("--field", default="prompt", show_default=True, metavar="NAME", help="Field of the prompt.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, metavar="N", help="Stop after N tokens.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--code", is_flag=True, help="End a continuation at the end of a Python function, as HumanEval does.")
@slots_option
@runtime_options
def generate_command(
    bundle: Path,
    prompts: Path,
    out: Path,
    field: str,
    max_new_tokens: int,
    stop: tuple[str, ...],
    code: bool,
    slots: int | None,
    **values: Any,
) -> None:
    """Continue every prompt of a JSONL file greedily. Write a line for each, in the same order.

    A continuation does not depend on the other prompts. Exceptions are lossy modes that depend on the cache, which all
    prompts share. The problems of HumanEval can be used as published, and its checker reads the output. The checker
    runs the code; moec does not.

    \b
    moec generate mixtral-moec --prompts questions.jsonl -o answers.jsonl --stop $'\\n\\n'
    moec generate mixtral-moec --prompts HumanEval.jsonl -o samples.jsonl --code --max-new-tokens 512
    """
    from moec.evaluation.engine import GenerationRequest, in_order
    from moec.evaluation.text_files import read_jsonl

    from ...measuring.text_engines import bundle_engine

    if max_new_tokens < 1:
        raise OptionError(f"`--max-new-tokens` must be at least 1, found {max_new_tokens}", "leave it out for 256")
    named_texts = _named_texts(read_jsonl(prompts), field)
    ends = (*stop, *(CODE_STOPS if code else ()))
    requests = [GenerationRequest(text, None, max_new_tokens, ends) for _, text in named_texts]
    options = build_options(values, DEFAULT_SLOTS if slots is None else slots, bundle)
    with bundle_engine(bundle, options, values["kernels"], shrinks=slots is None) as engine:
        output.say(engine.engine.mode)
        say_mode_cost(bundle, engine.engine)
        with ProgressBar(f"{len(requests)} prompts") as progress:
            generations = in_order(engine.generate, requests, progress)
        say_decisions(engine.engine)
    lines = []
    for (name, _), generation in zip(named_texts, generations, strict=True):
        cuts = [at for at in (generation.text.find(end) for end in ends) if at >= 0]
        lines.append({**name, "completion": generation.text[: min(cuts, default=len(generation.text))]})
    write_json_lines(out, lines)
    output.say(f"{sum(generation.tokens for generation in generations)} tokens in `{out}`")


def _named_texts(rows: Rows, field: str) -> list[tuple[dict[str, object], str]]:
    """Return the prompts, each with its `task_id` if it has one.

    Raises DataError for an object without a prompt, or with a `task_id` that JSON cannot hold.
    """
    prompts = list[tuple[dict[str, object], str]]()
    for place, row in rows.read((field, "task_id")):
        text = row.get(field)
        if not isinstance(text, str) or not text:
            present = ", ".join(f"`{name}`" for name in sorted(row)[:10]) or "none"
            raise DataError(
                f"{place}: expected a text in the field `{field}`, found the fields {present}",
                "name the field of the prompt with `--field`",
            )
        name = {key: value for key, value in row.items() if key == "task_id"}
        try:
            json.dumps(name, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # also what UTF-8 cannot hold
            raise DataError(
                f"{place}: `task_id` holds NaN, an infinity or half a surrogate pair, which JSON does not have",
                "correct it or leave it out",
            ) from error
        prompts.append((name, text))
    return prompts

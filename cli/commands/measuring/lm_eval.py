"""`moec lm-eval`: tasks of lm-evaluation-harness on a bundle or a checkpoint, inside this process."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import InputError, OptionError
from moec.manifests.files.output_file import write_output

from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import say_decisions
from ...options.opening import accelerator_facts, bundle_folder, is_bundle, mode_facts
from ...options.paths import (
    PATH,
    json_option,
    output_option,
    per_item_option,
    slots_option,
    sound_json,
    write_json_lines,
)
from ...options.runtime_options import build_options, runtime_options
from ...options.task_options import TemplateProcesses
from ...terminal import output
from ...terminal.help_sections import SectionCommand
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.evaluation.harness.run import HarnessSettings
    from moec.runtime.options.runtime import RuntimeOptions

    from ...measuring.harness_engine import HarnessBundle
    from ...measuring.text_engines import BundleEngine

DEFAULT_SLOTS = 32
_ENVIRONMENT = {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "TQDM_DISABLE": "1", "DISABLE_MULTIPROC": "1"}
"""No request that counts loads of local files, no progress bars of other packages, no copies of this process."""


@click.command("lm-eval", cls=SectionCommand, short_help="Run tasks of lm-evaluation-harness on a model.")
@click.argument("model", metavar="BUNDLE_OR_MODEL_DIR", type=PATH)
@click.option("--tasks", required=True, metavar="NAME,NAME", help="Tasks, groups, or task files, by commas.")
@click.option("--include-path", type=PATH, metavar="FOLDER", help="A folder of task files. They come first.")
@click.option("--limit", type=int, metavar="N", help="Take the first N items of each task.  [default: all]")
@click.option(
    "--num-fewshot", type=int, metavar="N", help="Solved examples before each item.  [default: as each task says]"
)
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of examples and of sampled answers.")
@slots_option
@click.option(
    "--apply-chat-template", is_flag=True, help="Ask by the model's chat template. Solved examples are earlier turns."
)
@click.option("--system", metavar="TEXT", help="With --apply-chat-template: the system message.")
@click.option("--gen-kwargs", metavar="NAME=VALUE,...", help="Settings of generation tasks, like `max_gen_toks=64`.")
@output_option("-o", "--output", "out", help="JSON file to write: all results, as `--json` prints them.")
@per_item_option
@json_option
@runtime_options
def lm_eval_command(
    model: Path,
    tasks: str,
    include_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    seed: int,
    slots: int | None,
    apply_chat_template: bool,
    system: str | None,
    gen_kwargs: str | None,
    out: Path | None,
    per_item: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Run tasks of lm-evaluation-harness (extra `[lm-eval]`) on a bundle or a model folder, without a server.

    Prompts, windows and metrics are those of the harness, so the scores compare with published ones. Each context is
    computed once for all of its answers. The budget counts the harness, too: it takes about 150 MiB, and its tasks
    more. Nothing is downloaded for task files with local data. A task file can name Python code, which runs: read
    task files of others first.

    A model folder is the baseline of its bundles. It is first written as a temporary bundle with its own 16-bit
    weights, as by `moec eval`.

    \b
    moec lm-eval mixtral-moec --tasks arc_easy,hellaswag --num-fewshot 5 --memory 4GiB -o scores.json
    moec lm-eval mixtral-moec --tasks my_choices --include-path tasks --limit 100 --json
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from moec.evaluation.harness.run import HarnessSettings, load_tasks, parse_gen_kwargs, run_tasks, score_rows
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.memory.budget import plan_memory, require_memory_for_manifest

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise OptionError("`--tasks` names no task", "name one, like `--tasks arc_easy`")
    settings = HarnessSettings(
        limit, num_fewshot, seed, apply_chat_template, system, parse_gen_kwargs(gen_kwargs), per_item is not None
    )
    if not model.is_dir():
        bundle_folder(model)  # refuses it, with the remedy for an archive
    has_bundle = is_bundle(model)
    options = build_options(values, DEFAULT_SLOTS if slots is None else slots, model if has_bundle else None)
    if has_bundle:  # a budget that is too small is refused before tasks are loaded
        folder = bundle_folder(model)
        require_memory_for_manifest(folder, options)
        with open_bundle(folder) as opened:
            plan_memory(opened.manifest, options if slots is not None else replace(options, slots=1))
    elif not (model / "config.json").is_file():
        raise InputError(f"`{model}` holds neither a bundle nor a model", "name a bundle or a model folder")
    run = _Run(model, has_bundle, options, values["kernels"], shrinks=slots is None)
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load_tasks(names, include_path, output.say)
    from moec.evaluation.harness.language_model import BundleLM

    with run, TemplateProcesses() as processes:
        try:
            chat = processes.chat(model) if apply_chat_template else None
        except OptionError as error:
            raise OptionError(error.message, "leave out `--apply-chat-template`") from error
        language_model = BundleLM(run.open, chat, ProgressBar, seed)
        with contextlib.redirect_stdout(sys.stderr):
            results = run_tasks(loaded, language_model, settings)
        if language_model.shortened:
            output.say(f"{language_model.shortened} requests lost the beginning of their context, which did not fit")
        results["config"] = run.facts(settings) | {"shortened_requests": language_model.shortened}
    write_results(results, out, per_item)
    if as_json:
        output.data_json(results)
        return
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row] for row in score_rows(results)]
    output.data(output.table(cells, ("task", "filter", "n-shot", "metric", "value", "standard error")))


def write_results(results: dict[str, Any], out: Path | None, per_item: Path | None) -> None:
    """Write the files that were asked for. Items leave the results."""
    items = results.pop("samples", {})
    if per_item is not None:
        write_json_lines(per_item, ({"task": name, **row} for name, rows in items.items() for row in rows))
    if out is not None:
        write_output(out, sound_json(results, indent=1))


class _Run:
    """The model of one run, opened when the first request is computed. Leaving the `with` block closes it."""

    def __init__(
        self, model: Path, has_bundle: bool, options: RuntimeOptions, kernels: str | None, shrinks: bool
    ) -> None:
        """shrinks: as in `bundle_engine`."""
        self._model, self._has_bundle = model, has_bundle
        self._options, self._kernels, self._shrinks = options, kernels, shrinks
        self._stack = ExitStack()
        self._used: tuple[BundleEngine, HarnessBundle] | None = None

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def open(self) -> HarnessBundle:
        """Open the bundle or the checkpoint. Raises the errors of `checkpoint_engine`."""
        from ...measuring.harness_engine import HarnessBundle
        from ...measuring.text_engines import bundle_engine, checkpoint_engine

        opening = bundle_engine if self._has_bundle else checkpoint_engine
        running = self._stack.enter_context(opening(self._model, self._options, self._kernels, shrinks=self._shrinks))
        output.say(running.engine.mode)
        if self._has_bundle:
            say_mode_cost(self._model, running.engine)
        harness = HarnessBundle(running.engine)
        self._used = running, harness
        return harness

    def facts(self, settings: HarnessSettings) -> dict[str, Any]:
        """Return what the results tell about model, budget and run."""
        from importlib.metadata import version

        from moec.runtime.trace.statistics import peak_memory_bytes
        from moec.runtime.tuning.tune_file import bundle_sha256

        name, kind = self._model.resolve().name, "bundle" if self._has_bundle else "checkpoint"
        facts: dict[str, Any] = {"model": "moec", kind: name}
        facts |= {"manifest_sha256": bundle_sha256(self._model)} if self._has_bundle else {}
        facts |= {"lm_eval": version("lm_eval"), **settings.to_plain()}
        if self._used is None:
            return facts
        engine, harness = self._used[0].engine, self._used[1]
        say_decisions(engine)
        facts |= {"slots": engine.options.slots, "memory": engine.memory.to_plain(), **mode_facts(engine)}
        facts |= {"peak_memory_bytes": peak_memory_bytes(), "bytes_read": engine.cache.stats.bytes_read}
        facts["hit_rate"] = engine.cache.stats.hit_rate
        facts |= {"requests": harness.hit_rates}
        counts = engine.mode_counts
        return facts | ({} if counts is None else {"decisions": counts.to_plain()}) | accelerator_facts(engine)

"""`moec eval`: the score of a bundle or a checkpoint on a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import InputError, OptionError

from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import mode_sweep_option
from ...options.opening import accelerator_facts, bundle_folder, is_bundle, mode_facts
from ...options.paths import (
    PATH,
    PLACE,
    item_seed_option,
    json_option,
    limit_option,
    long_items_option,
    per_item_option,
    shots_option,
    slots_option,
    write_json_lines,
)
from ...options.profile_defaults import say_device
from ...options.runtime_options import build_options, runtime_options
from ...options.task_options import TemplateProcesses, task_options, task_settings
from ...terminal import output
from ...terminal.help_sections import SectionCommand
from ...terminal.progress_bar import ProgressBar
from ...terminal.run_statistics import decisions_text

if TYPE_CHECKING:
    from moec.evaluation.data import ItemSet
    from moec.evaluation.results import EvaluationResult
    from moec.evaluation.tasks import Item

DEFAULT_SLOTS = 32


@click.command("eval", cls=SectionCommand, shown=("", "Task"), short_help="Score a bundle or a checkpoint on a task.")
@click.argument("model", metavar="BUNDLE_OR_MODEL_DIR", type=PATH)
@click.option(
    "--data",
    "source",
    type=PLACE,
    required=True,
    metavar="DATA",
    help="Task items: a file, a folder with files of splits, or a hub name.",
)
@click.option(
    "--task", metavar="NAME_OR_FILE", help="gsm8k, perplexity, mmlu, ..., or a TOML file.  [default: by the fields]"
)
@click.option(
    "--split", metavar="NAME", help="train, validation or test.  [default: test; a single file is taken whole]"
)
@shots_option
@limit_option
@item_seed_option
@slots_option
@long_items_option
@task_options
@per_item_option
@mode_sweep_option
@json_option
@runtime_options
def eval_command(
    model: Path,
    source: str,
    task: str | None,
    split: str | None,
    shots: int,
    limit: int | None,
    seed: int,
    slots: int | None,
    long_items: str,
    per_item: Path | None,
    modes: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Evaluate a bundle or a model folder with the runtime: same prompts, greedy decoding, same scores.

    The loss of a bundle is relative to its checkpoint. Evaluate both to check the promise of a bundle.

    A model folder is first written as a bundle with its own 16-bit weights. That bundle takes 2 bytes per weight in the
    folder for temporary files, which `TMPDIR` names. It is removed afterwards.

    \b
    moec eval mixtral-moec --data data/gsm8k --json
    moec eval mixtral      --data data/gsm8k --limit 500 --per-item reference.jsonl
    moec eval mixtral-moec --data data/gsm8k --limit 500 --modes sweep --expert-cache 25%
    """
    from moec.evaluation.data import load_items
    from moec.evaluation.tasks import find_task

    if not model.is_dir():
        raise InputError(f"`{model}` is not a folder, expected a bundle or a model", "name the folder")
    settings = task_settings(values)
    with TemplateProcesses() as processes:
        named = None if task is None else find_task(task, settings.trusts_metric_code)
        change = partial(settings.apply, templates=lambda: processes.of_model(model))
        items, examples = load_items(source, named, split, shots, seed, change)
        items = items.limit(limit, seed)
        if modes is not None:
            for name, value in (("slots", slots), ("per-item", per_item)):
                if value is not None:
                    raise OptionError(f"`--{name}` has no effect with `--modes`", "leave it out")
            _sweep(model, modes, items, examples, long_items, values, as_json)
            return
        result, facts = _evaluate(model, slots, values, items, examples, long_items)
    if per_item is not None:
        rows = result.to_json(per_item=True)["items"]
        write_json_lines(per_item, rows if isinstance(rows, list) else [])
    if as_json:
        output.data_json({**result.to_json(), "skipped": items.skipped, **facts})
        return
    low, high = result.interval95
    is_bounded = math.isfinite(low) and math.isfinite(high)
    interval = f"95 % interval {low:.4f} to {high:.4f}" if is_bounded else "too few items for an interval"
    thinking = items.task.settings.get("thinking")
    answers = f"{result.cut} of {result.n} were cut at {result.max_new_tokens} tokens"
    answers += f", thinking {thinking}" if thinking else ""
    pairs: list[tuple[str, object]] = [
        (result.metric, f"{result.value:.4f} ({interval}, {result.n} items of {result.task})"),
        *((name, f"{value:.4f}") for name, value in result.other_metrics.items()),
        *([("answers", answers)] if result.max_new_tokens else []),
        ("time", f"{result.seconds:.1f} s, {result.tokens_per_s:.1f} tokens/s"),
    ]
    output.data(output.facts(pairs))


def _evaluate(
    model: Path, slots: int | None, values: dict[str, Any], items: ItemSet, shots: Sequence[Item], long_items: str
) -> tuple[EvaluationResult, dict[str, Any]]:
    """Evaluate a bundle or a checkpoint. Return the result, and the facts of the run for the JSON output."""
    from moec.evaluation.run import evaluate
    from moec.runtime.trace.statistics import peak_memory_bytes

    from ...measuring.text_engines import bundle_engine, checkpoint_engine

    has_bundle, count = is_bundle(model), DEFAULT_SLOTS if slots is None else slots
    options = build_options(values, count, model if has_bundle else None)
    opening = bundle_engine if has_bundle else checkpoint_engine
    with opening(model, options, values["kernels"], shrinks=slots is None) as running:
        engine = running.engine
        output.say(engine.mode)
        if has_bundle:
            say_mode_cost(model, engine)
        output.say(f"items: {len(items)} of `{items.source}`")
        fitted = running.fit_items(items.task, items.items, shots, long_items)
        for sentence in fitted.changes(engine.memory.context):
            output.say(sentence)
        with ProgressBar(f"{items.task.name}, {len(fitted.items)} items") as progress:
            result = evaluate(items.task, fitted.items, running, shots=shots, progress=progress)
        stats, counts = engine.cache.stats, engine.mode_counts
        facts: dict[str, Any] = {"engine": "runtime", "slots": engine.options.slots}
        facts |= {"peak_memory_bytes": peak_memory_bytes()} | mode_facts(engine)
        facts |= {"hit_rate": stats.hit_rate, "bytes_read": stats.bytes_read}
        facts |= {} if counts is None else {"decisions": counts.to_plain()}
        facts |= accelerator_facts(engine)
        facts |= {"settings": dict(items.task.settings)} if items.task.settings else {}
        facts["long_items"] = {"shortened": len(fitted.shortened), "left_out": len(fitted.left_out)}
        if counts is not None:
            output.say(f"decisions: {decisions_text(facts['decisions'])}")
    return result, facts


def _sweep(
    model: Path,
    modes: str,
    items: ItemSet,
    shots: Sequence[Item],
    long_items: str,
    values: dict[str, Any],
    as_json: bool,
) -> None:
    """Measure lossy modes. Print the table, and write the record next to the bundle."""
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.tuning.mode_records import calibrated_deciles, check_record, record_path, write_record

    from ...lossy_modes.mode_sweep import QualitySweep, quality_page, settings_of, sweep_options

    output.say(f"items: {len(items)} of `{items.source}`")
    folder, path = bundle_folder(model), record_path(model)
    check_record(model)
    options = sweep_options(build_options(values, bundle=model))
    opened = open_bundle(folder)
    say_device(opened, options)
    settings = settings_of(modes, opened.manifest, calibrated_deciles(folder), options)
    sweep = QualitySweep(model, options, values["kernels"], items.task, items.items, shots).fitted(long_items)
    record = sweep.run(settings, keep=partial(write_record, model))
    output.data_json(record) if as_json else output.data(quality_page(record))
    output.say(f"kept in `{path}`")

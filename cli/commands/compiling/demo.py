"""`moec demo`: compile, certify and run the shipped examples, with tables at the end."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import ExecutionError, InputError
from moec.manifests.files.output_file import check_folder, made_folders

from ...bundle_check import own_command
from ...options.paths import PATH
from ...terminal import output
from ...terminal.compile_log import CompileLog
from ...terminal.compile_result import LONGEST_SUFFIX
from ...terminal.progress_bar import ProgressBar
from ...terminal.report import comparison_table, loss_table, plan_heat_map, verdict_line
from ..bundles.report import draw_card
from .compile import write_beside
from .partial_bundle import open_partial

if TYPE_CHECKING:
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.plan import CompileResult

HALF = "50%"
# Items for the speed and the hit rate of the bundle with half of its experts in memory.
STREAMED_ITEMS = 500
BENCH_TOKENS = 128
# The example with an encoder: fixed bitwidths and few dialogues, so that a row takes seconds.
SECOND_MODEL, SECOND_TASK = "switch_model", "samsum"
SECOND_BITS = (16, 4, 2)
SECOND_ITEMS = 300


@click.command("demo", short_help="Compile, certify and run the shipped example.")
@click.option(
    "--example",
    type=PATH,
    default=Path("examples"),
    show_default=True,
    help="Folder with `model/`, `data/`, and `switch_model/` for the last table.",
)
@click.option("--task", default="gsm8k", show_default=True, help="Task of the example: gsm8k or samsum.")
@click.option("--loss", default="2%", show_default=True, help="Target: relative loss.")
@click.option(
    "-o",
    "--output",
    "target_path",
    type=PATH,
    default=Path("build/demo/example-moec"),
    show_default=True,
    help="Bundle folder.",
)
def demo_command(example: Path, task: str, loss: str, target_path: Path) -> None:
    """Compile the example model to a loss target, certify it, and run it with half of its experts in memory.

    Nothing is computed beforehand. The demo calibrates, searches, compares with the best uniform format and with
    EdgeMoE's search, and evaluates held-out items. An example with an encoder follows, at fixed bitwidths.

    \b
    moec demo
    moec demo --task samsum --loss 5%
    """
    if not (example / "model" / "config.json").is_file():
        raise InputError(
            f"`{example}` has no `model/config.json`", "run it in the project's folder, or give `--example`"
        )
    started = time.monotonic()
    check_folder(target_path, LONGEST_SUFFIX)
    with made_folders(target_path):
        result = compile_to_loss(example, task, loss, target_path)
    output.say(f"running the bundle with room for {HALF} of its experts")
    # `moec bench` in a new process, so that its peak memory is that of the runtime only.
    options = ("--expert-cache", HALF, "--tokens", str(BENCH_TOKENS), "--json")
    command = own_command("moec.cli.main", "bench", str(target_path), *options)
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise ExecutionError(f"`moec bench` ended with {finished.returncode}: {finished.stderr.strip()[-500:]}")
    bench = json.loads(finished.stdout)
    streamed = _evaluate_streamed(target_path, example / "data" / task / "test.jsonl", task, STREAMED_ITEMS)
    second = second_example(example, target_path.parent) if (example / SECOND_MODEL).is_dir() else ""
    quality, measured, size = result.quality, bench["measured"], output.human_bytes
    # The main result comes last, because that is what stays on the screen.
    for table in (plan_heat_map(quality), second, comparison_table(quality)):
        output.data(f"{table}\n" if table else "")
    low, high = streamed["interval95"]
    rows = [
        ("bundle", str(target_path)),
        ("room for half of the experts", bench["mode"]),
        ("decode", f"{measured['tokens_per_s']:.0f} tokens/s, one sequence"),
        ("hit rate", output.human_share(measured["hit_rate"])),
        ("read per token", size(measured["bytes_read_per_token"])),
        ("peak memory", size(measured["peak_memory_bytes"])),
        (
            f"{streamed['metric']} so, {streamed['n']} items",
            f"{streamed['value']:.4f} ({low:.4f} to {high:.4f}), {streamed['evictions']} evictions",
        ),
        ("report", f"{target_path / 'quality.json'} and {target_path}.report.html"),
        ("time", output.human_seconds(time.monotonic() - started)),
    ]
    output.data(f"{output.facts(rows)}\n")
    output.data(loss_table(quality))
    output.data(verdict_line(quality))


def compile_to_loss(example: Path, task: str, loss: str, target_path: Path) -> CompileResult:
    """Compile and certify the example model, and write log and report next to the bundle."""
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.targets import choose_target

    target = choose_target(loss, None, None, None, None)
    options = CompileOptions(target=target, data=str(example / "data"), tasks=(task,))
    result, log = _compile(example / "model", options, target_path)
    write_beside(result, log)
    return result


def _compile(model: Path, options: CompileOptions, target_path: Path) -> tuple[CompileResult, CompileLog]:
    from moec.compiler.pipeline import compile_checkpoint
    from moec.compiler.request.options import Talk
    from moec.compiler.request.request import CompileRequest
    from moec.profiles.loading import load_profile

    log = CompileLog(target_path, has_resume=False)
    request = CompileRequest(
        source=str(model),
        output=target_path,
        options=options,
        profile=load_profile("host", target_path.parent),
        open_runtime=open_partial,
        talk=Talk(log.note, log.progress),
        overwrite=True,
        draw_card=draw_card,
    )
    with log:
        result = compile_checkpoint(request)
    return result, log


def second_example(example: Path, folder: Path) -> str:
    """Return the table of the example with an encoder: fixed bitwidths, half of the experts in memory.

    folder: parent of the bundles.
    """
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.targets import Target

    data = example / "data" / SECOND_TASK / "test.jsonl"
    rows = []
    for bits in SECOND_BITS:
        bundle = folder / f"switch-{bits}-bits-moec"
        options = CompileOptions(target=Target("uniform", bits), dense_bits=16)
        result, _ = _compile(example / SECOND_MODEL, options, bundle)
        streamed = _evaluate_streamed(bundle, data, SECOND_TASK, SECOND_ITEMS)
        low, high = streamed["interval95"]
        size = output.human_bytes(result.quality["sizes"]["expert_packed_bytes"])
        score, rate = f"{streamed['value']:.4f} ({low:.4f} to {high:.4f})", output.human_share(streamed["hit_rate"])
        rows.append([f"{bits} bits", size, score, rate, str(streamed["evictions"])])
    metric = f"{streamed['metric']}, {streamed['n']} dialogues (95 %)"
    return output.table(rows, ["encoder and decoder", "routed experts", metric, "hit rate", "evictions"])


def _evaluate_streamed(bundle: Path, data: Path, task: str, count: int) -> dict[str, Any]:
    """Evaluate held-out items with half of the experts in memory."""
    from moec.evaluation.data import load_items
    from moec.evaluation.run import evaluate
    from moec.runtime.options.runtime import RuntimeOptions

    from ...measuring.text_engines import bundle_engine

    items, _ = load_items(data, task)
    chosen = items.limit(count)
    with (
        bundle_engine(bundle, RuntimeOptions(expert_cache=HALF, slots=32), shrinks=True) as engine,
        ProgressBar(f"{len(chosen.items)} held-out items, half of the experts in memory") as progress,
    ):
        result = evaluate(items.task, chosen.items, engine, progress=progress)
        stats = engine.engine.cache.stats
        return {**result.to_json(), "evictions": stats.evictions, "hit_rate": stats.hit_rate}

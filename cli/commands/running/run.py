"""`moec run`: continue a prompt, print the text as it is decoded, and the statistics of the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError
from moec.manifests.files.output_file import STDOUT

from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import say_decisions
from ...options.opening import accelerator_facts, mode_facts, open_engine
from ...options.paths import OUTPUT_FILE, bundle_argument, json_option
from ...options.prompts import RunPrompt
from ...options.runtime_options import build_options, runtime_options
from ...options.sampling_options import sampling_options
from ...simulation.traces import check_traceable, written_trace
from ...terminal import output
from ...terminal.help_sections import SectionCommand, section_option
from ...terminal.run_statistics import statistics_block

if TYPE_CHECKING:
    from moec.runtime.engine.beam import BeamOptions
    from moec.runtime.engine.engine import Engine
    from moec.runtime.text.sampling import SamplingOptions
    from moec.runtime.trace.statistics import RunStatistics


generation = section_option("Generation")


@click.command("run", cls=SectionCommand, short_help="Continue a prompt within a memory budget.")
@bundle_argument
@click.option("--prompt", required=True, metavar="TEXT", help="The text to continue; `-` reads it from stdin.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, metavar="N", help="Stop after N tokens.")
@sampling_options
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@click.option("--system", metavar="TEXT", help="With `--chat`: a system message before the prompt.")
@generation("--beams", type=int, default=1, show_default=True, metavar="N", help="Beam search of this width.")
@generation(
    "--length-penalty", type=float, default=1.0, show_default=True, help="With `--beams`: above 0 favours long answers."
)
@json_option
@generation(
    "--trace-out",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write the experts that each token uses, for `merge-traces`. The file has no text; treat it like text.",
)
@runtime_options
def run_command(
    bundle: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    beams: int,
    length_penalty: float,
    seed: int,
    as_json: bool,
    trace_out: Path | None,
    **values: Any,
) -> None:
    """Continue a prompt with the bundle in folder BUNDLE.

    The text goes to stdout as it is decoded. The mode goes to stderr, and so do the statistics at the end. Caching,
    prefetching and reading of experts never change the text. Exceptions are modes marked LOSSY that depend on the
    cache. On the device that a bundle is for, its profile sets defaults of --memory, --threads, --io and the readers.

    \b
    moec run mixtral-moec --prompt $'Question: What is 2 + 3?\\nAnswer:' --memory 2GiB
    echo "Once upon a time" | moec run mixtral-moec --prompt - --temperature 0.8 --seed 1
    """
    with RunPrompt(prompt, chat, system) as chosen:  # first, so that its process imports in parallel with this one
        from moec.runtime.engine.beam import BeamOptions
        from moec.runtime.text.sampling import SamplingOptions

        sampling, search = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed), None
        beam_options = BeamOptions(beams, length_penalty)
        if beams != 1:
            if temperature or repetition_penalty != 1.0 or stop:
                raise OptionError(
                    "`--beams` finds the most probable answer, without sampling, penalty or stop text",
                    "drop one of them",
                )
            search = beam_options
        elif length_penalty != 1.0:
            raise OptionError("`--length-penalty` has no effect with one beam", "set `--beams`")
        options = build_options(values, beams, bundle)
        if trace_out is not None:
            check_traceable(options)
            if search is not None:
                raise OptionError(
                    "a routing trace is of one text, `--beams` decodes several", "leave out one of the two"
                )
            if trace_out == STDOUT:
                raise OptionError("standard output has the text, so it cannot take the trace", "name a file")
        engine_of_prompt = open_engine(bundle, options, values["kernels"], lambda opened: chosen.read(opened, options))
    with engine_of_prompt as engine:
        output.say(engine.mode)
        say_mode_cost(bundle, engine)
        tokens = engine.encode(chosen.text, chosen.adds_special_tokens)
        if search is not None:
            _print_beams(engine, tokens, max_new_tokens, search, as_json)
            return
        with written_trace(trace_out, engine, len(tokens)):
            facts, statistics = _generate(engine, tokens, max_new_tokens, sampling, stop, shows_text=not as_json)
        if as_json:
            output.data_json(facts)
            return
        output.say(statistics_block(statistics, facts.get("decisions")))
        if engine.accelerator is not None:
            output.say(f"experts computed: {engine.accelerator.counts.to_text()}")


def _print_beams(engine: Engine, tokens: list[int], max_new_tokens: int, options: BeamOptions, as_json: bool) -> None:
    from moec.runtime.engine.beam import beam_search

    ends, beams = engine.bundle.manifest.model.eos_token_ids, list[dict[str, Any]]()
    for beam in beam_search(engine, tokens, max_new_tokens, options):
        text = engine.tokenizer.decode([token for token in beam.tokens if token not in ends])
        beams.append({"text": text, "token_ids": list(beam.tokens), "score": beam.score})
    if not as_json:
        output.generated(beams[0]["text"] + "\n")
        output.say("\n".join(f"beam {at}: {beam['score']:.4f}" for at, beam in enumerate(beams, 1)))
        say_decisions(engine)
        return
    facts = {"beams": beams, **mode_facts(engine), "memory": engine.memory.to_plain()}
    facts |= {} if engine.mode_counts is None else {"decisions": engine.mode_counts.to_plain()}
    output.data_json({**facts, **accelerator_facts(engine)})


def _generate(
    engine: Engine,
    tokens: list[int],
    max_new_tokens: int,
    sampling: SamplingOptions,
    stop: tuple[str, ...],
    shows_text: bool,
) -> tuple[dict[str, Any], RunStatistics]:
    """Decode, and print the text if shows_text is set. Return the values of `--json` and the statistics."""
    from moec.runtime.trace.statistics import RunRecorder

    recorder, pieces, ids, reason = RunRecorder(len(tokens)), list[str](), list[int](), None
    for step in engine.generate(tokens, max_new_tokens, sampling, stop):
        recorder.add(step.elapsed_ns, step.cache)
        pieces.append(step.text)
        ids.append(step.token_id)
        reason = step.finish_reason
        if shows_text and step.text:
            output.generated(step.text)
    if shows_text:
        output.data("")
    statistics = recorder.finish(engine.model.prefetch_quality.recall)
    values = {
        "text": "".join(pieces),
        "token_ids": ids,
        "finish_reason": reason,
        **mode_facts(engine),
        "memory": engine.memory.to_plain(),
        "statistics": statistics.to_plain(),
        **({} if engine.mode_counts is None else {"decisions": engine.mode_counts.to_plain()}),
        **accelerator_facts(engine),
    }
    return values, statistics

"""Command lines that give every option, and where a test finds their values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moec.cli.commands.bundles.report import draw_card
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.commands.running.generate import CODE_STOPS
from moec.cli.lossy_modes.mode_sweep import ModesMeasurement
from moec.cli.simulation.compile_eviction import fit_to_texts
from moec.compiler.request.targets import Target
from moec.runtime.expert_cache.policies import MultidimensionalScore
from moec.runtime.options.runtime import parse_weights

MODES = "big-little gamma=0.5"


class Given(NamedTuple):
    """One parameter of a command line.

    words: words on the command line. `{folder}` is replaced by the folder of the test's files.
    way: path to the value in the arguments of the seam. Empty: the value is not followed.
    """

    words: str
    way: str
    value: Any


@dataclass(frozen=True)
class Line:
    """One call of a command.

    more: further words that the call needs.
    """

    command: str
    seam: str
    given: dict[str, Given]
    more: str = ""


ENGINE = "moec.runtime.engine.engine.Engine"
WEIGHTS = "0.1,0.5,0,0.4"
PROCESSOR = str(min(os.sched_getaffinity(0)))

RUNTIME = {
    "memory": Given("--memory 64GiB", "options.memory", "64GiB"),
    "expert_cache": Given("--expert-cache 40%", "options.expert_cache", "40%"),
    "context": Given("--context 77", "options.context", 77),
    "policy": Given("--set policy=hobbit", "options.policy", "hobbit"),
    "policy_weights": Given(f"--set policy-weights={WEIGHTS}", "options.policy_weights", WEIGHTS),
    "prefetch": Given("--set prefetch=path", "options.prefetch", "path"),
    "prefetch_layers": Given("--set prefetch-layers=3", "options.prefetch_layers", 3),
    "prefetch_experts": Given("--set prefetch-experts=5", "options.prefetch_experts", 5),
    "prefetch_rule": Given("--set prefetch-rule=until-routed", "options.prefetch_rule", "until-routed"),
    "reader_cpus": Given(f"--set reader-cpus={PROCESSOR}", "options.reader_cpus", PROCESSOR),
    "io": Given("--io buffered", "options.io", "buffered"),
    "kv": Given("--kv float16", "options.kv", "float16"),
    "readers": Given("--set readers=6", "options.readers", 6),
    "threads": Given("--threads 7", "options.threads", 7),
    "kernels": Given("--set kernels=scalar", "kernels", "scalar"),
    "verify": Given("--set verify=no", "options.verify", False),
    "learned_routers": Given("--set learned-routers=no", "options.learned_routers", False),
    "cache_state": Given("--set cache-state=cold", "options.cache_state", "cold"),
}
LOSSY = {"lossy": Given("--lossy 'big-little gamma=0.6,k=2'", "options.lossy", "big-little gamma=0.6,k=2")}
ACCELERATOR = {
    "accelerator": Given("--accelerator torch-cpu", "options.accelerator", "torch-cpu"),
    "accelerator_memory": Given("--accelerator-memory 9MiB", "options.accelerator_memory", "9MiB"),
    "cooperation": Given("--set cooperation=gpu", "options.cooperation", "gpu"),
    "accelerator_dense": Given("--set accelerator-dense=host", "options.accelerator_dense", "host"),
}
ALL = {**RUNTIME, **LOSSY, **ACCELERATOR}
SLOTS = {"slots": Given("--slots 5", "options.slots", 5)}


def as_mobile(command: str, more: str) -> Line:
    """Return the line that shows the effect of `--as`."""
    return Line(command, ENGINE, {"preset": Given("--as mobile", "options.lossy", "big-little gamma=0.7,k=K/2")}, more)


RUNS = {
    "run": Line("run", ENGINE, {**ALL, "beams": Given("--beams 3", "options.slots", 3)}, "--prompt x"),
    "run, sampling": Line(
        "run",
        "moec.runtime.engine.engine.Engine.generate",
        {
            "max_new_tokens": Given("--max-new-tokens 9", "max_new_tokens", 9),
            "temperature": Given("--temperature 0.7", "sampling.temperature", 0.7),
            "top_k": Given("--top-k 11", "sampling.top_k", 11),
            "top_p": Given("--top-p 0.6", "sampling.top_p", 0.6),
            "min_p": Given("--min-p 0.2", "sampling.min_p", 0.2),
            "repetition_penalty": Given("--repetition-penalty 1.3", "sampling.repetition_penalty", 1.3),
            "seed": Given("--seed 4", "sampling.seed", 4),
            "stop": Given("--stop yes --stop no", "stop", ("yes", "no")),
        },
        "--prompt x",
    ),
    "run, beams": Line(
        "run",
        "moec.runtime.engine.beam.beam_search",
        {
            "beams": Given("--beams 3", "options.beams", 3),
            "length_penalty": Given("--length-penalty 0.5", "options.length_penalty", 0.5),
            "max_new_tokens": Given("--max-new-tokens 9", "max_new_tokens", 9),
        },
        "--prompt x",
    ),
    "chat": Line("chat", ENGINE, ALL),
    "chat, answers": Line(
        "chat",
        "moec.cli.chat.session.ChatSession.__init__",
        {
            "max_new_tokens": Given("--max-new-tokens 9", "options.max_new_tokens", 9),
            "temperature": Given("--temperature 0.7", "options.sampling.temperature", 0.7),
            "top_k": Given("--top-k 11", "options.sampling.top_k", 11),
            "top_p": Given("--top-p 0.6", "options.sampling.top_p", 0.6),
            "min_p": Given("--min-p 0.2", "options.sampling.min_p", 0.2),
            "repetition_penalty": Given("--repetition-penalty 1.3", "options.sampling.repetition_penalty", 1.3),
            "seed": Given("--seed 4", "options.sampling.seed", 4),
            "stop": Given("--stop yes --stop no", "options.stop", ("yes", "no")),
        },
    ),
    "generate": Line("generate", ENGINE, {**ALL, **SLOTS}, "--prompts {folder}/prompts.jsonl --field asked -o out"),
    "generate, requests": Line(
        "generate",
        "moec.cli.measuring.text_engines.BundleEngine.generate",
        {
            "prompts": Given("--prompts {folder}/prompts.jsonl", "requests.0.prompt", "once"),
            "field": Given("--field asked", "requests.0.prompt", "once"),
            "max_new_tokens": Given("--max-new-tokens 9", "requests.0.max_new_tokens", 9),
            "stop": Given("--stop yes", "requests.0.stop.0", "yes"),
            "code": Given("--code", "requests.0.stop.1", CODE_STOPS[0]),
        },
        "-o out",
    ),
    "eval": Line("eval", ENGINE, {**ALL, **SLOTS}, "--data {folder}/texts.jsonl"),
    "eval, items": Line(
        "eval",
        "moec.evaluation.data.load_items",
        {
            "source": Given("--data {folder}/texts.jsonl", "source", "{folder}/texts.jsonl"),
            "task": Given("--task perplexity", "task.name", "perplexity"),
            "split": Given("--split validation", "split", "validation"),
            "shots": Given("--shots 3", "shots", 3),
            "seed": Given("--seed 4", "seed", 4),
        },
    ),
    "eval, limit": Line(
        "eval",
        "moec.evaluation.data.ItemSet.limit",
        {"limit": Given("--limit 2", "count", 2), "seed": Given("--seed 4", "seed", 4)},
        "--data {folder}/texts.jsonl",
    ),
    "eval, task": Line(
        "eval",
        "moec.evaluation.tasks.task_settings.TaskSettings.apply",
        {
            "chat": Given("--chat", "self.chat", True),
            "system": Given("--system kind", "self.system", "kind"),
            "prompt_template": Given("--prompt-template a.jinja", "self.prompt_template", "a.jinja"),
            "metric": Given("--metric wer", "self.metric", "wer"),
            "lower_is_better": Given("--lower-is-better", "self.lower_is_better", True),
            "trust_metric_code": Given("--trust-metric-code", "self.trusts_metric_code", True),
        },
        "--data {folder}/texts.jsonl",
    ),
    "eval, long items": Line(
        "eval",
        "moec.cli.measuring.text_engines.fit_items",
        {"long_items": Given("--long-items skip", "policy", "skip")},
        "--data {folder}/texts.jsonl",
    ),
    "eval, modes": Line(
        "eval",
        "moec.cli.lossy_modes.mode_sweep.settings_of",
        {"modes": Given(f"--modes '{MODES}'", "text", MODES)},
        "--data {folder}/texts.jsonl",
    ),
    "bench": Line("bench", ENGINE, ALL, "--text {folder}/text.txt --tokens 4 --prompt-tokens 3"),
    "bench, prompt": Line(
        "bench",
        "moec.cli.commands.measuring.bench.continuation",
        {"prompt": Given("--prompt once", "prompt", "once"), "tokens": Given("--tokens 9", "tokens", 9)},
    ),
    "bench, text": Line(
        "bench",
        "moec.cli.commands.measuring.bench.sequence_of",
        {
            "text_path": Given("--text {folder}/text.txt", "path", Path("{folder}/text.txt")),
            "prompt_tokens": Given("--prompt-tokens 3", "prompt_tokens", 3),
            "tokens": Given("--tokens 9", "tokens", 9),
        },
    ),
    "bench, modes": Line(
        "bench",
        "moec.cli.commands.measuring.bench.speed_sweep",
        {"modes": Given(f"--modes '{MODES}'", "modes", MODES)},
        "--text {folder}/text.txt --tokens 4 --prompt-tokens 3",
    ),
    "run, as": as_mobile("run", "--prompt x"),
    "chat, as": as_mobile("chat", ""),
    "generate, as": as_mobile("generate", "--prompts {folder}/prompts.jsonl --field asked -o out"),
    "eval, as": as_mobile("eval", "--data {folder}/texts.jsonl"),
    "bench, as": as_mobile("bench", "--text {folder}/text.txt --tokens 4 --prompt-tokens 3"),
    "tune": Line("tune", ENGINE, RUNTIME, "--text {folder}/text.txt --tokens 4"),
    "tune, text": Line(
        "tune",
        "moec.cli.commands.measuring.tune.sequence_of",
        {
            "text_path": Given("--text {folder}/text.txt", "path", Path("{folder}/text.txt")),
            "tokens": Given("--tokens 9", "tokens", 9),
        },
    ),
    "tune, traces": Line(
        "tune",
        "moec.cli.commands.measuring.tune.fit_policy",
        {
            "training": Given("--trace {folder}/run.trace", "training", (Path("{folder}/run.trace"),)),
            "held_out": Given("--held-out {folder}/text.txt", "held_out", (Path("{folder}/text.txt"),)),
            "modes": Given(f"--modes '{MODES}'", "modes", MODES),
        },
    ),
    "simulate": Line(
        "simulate",
        "moec.cli.commands.measuring.simulate.Simulation",
        {
            "profile": Given("--profile laptop", "rates.compute_scale", 8 / 40),
            "prefetch": Given("--set prefetch=popularity", "prefetch", "popularity"),
            "readers": Given("--set readers=6", "rates.readers", 6),
            "read_rate": Given("--read-rate 90MB", "rates.storage_bytes_per_s", 90_000_000),
            "read_latency": Given("--read-latency 8ms", "rates.storage_latency_ns", 8_000_000),
            "accelerator": Given(
                "--accelerator memory=1GiB,expert=600us,token=2us,link=12GB", "shared.latency.device_fixed_ns", 600_000
            ),
            "cooperation": Given("--set cooperation=gpu", "shared.cooperation", "gpu"),
            "cache_state": Given("--set cache-state=cold", "replayed.warm", []),
        },
        "--trace {folder}/run.trace",
    ),
    "simulate, rule": Line(
        "simulate",
        "moec.cli.commands.measuring.simulate.Simulation",
        {"prefetch_rule": Given("--set prefetch-rule=first-miss", "trace.header.prefetch_rule", "first-miss")},
        "--trace {folder}/run.trace",
    ),
    "simulate, rows": Line(
        "simulate",
        "moec.cli.simulation.predictions.Simulation.rows",
        {
            "caches": Given("--expert-cache 400000", "capacities", [400_000]),
            "policy": Given("--set policy=hobbit-printed", "policies.hobbit-printed.as_printed", True),
            "policy_weights": Given(
                f"--set policy-weights={WEIGHTS}",
                "policies.hobbit-printed",
                MultidimensionalScore(parse_weights(WEIGHTS), as_printed=True),
            ),
            "modes": Given(f"--modes '{MODES}'", "settings.1.big_little", "gamma=0.5"),
        },
        "--trace {folder}/run.trace",
    ),
    "simulate, as": Line(
        "simulate",
        "moec.cli.simulation.predictions.Simulation.rows",
        {"preset": Given("--as mobile", "settings.1.big_little", "gamma=0.7,k=K/2")},
        "--trace {folder}/run.trace",
    ),
    "simulate, layers": Line(
        "simulate",
        "moec.cli.commands.measuring.simulate.Simulation",
        {"prefetch_layers": Given("--set prefetch-layers=1", "trace.header.prefetch_layers", 1)},
        "--trace {folder}/run.trace --set prefetch=path",
    ),
}


COMPILE = "moec.compiler.pipeline.compile_checkpoint"
OPTIONS = "request.options"
LAPTOP = "--device laptop"
"""A named device, so that nothing is probed."""
UNIFORM = f"--uniform 4 {LAPTOP}"
LOSS = Given("--loss 3%", f"{OPTIONS}.target", Target("loss", 0.03))
COMPILES = {
    "compile": Line(
        "compile",
        COMPILE,
        {
            "loss": LOSS,
            "target_path": Given("-o {folder}/made", "request.output", Path("{folder}/made")),
            "data": Given("--data {folder}/texts.jsonl", f"{OPTIONS}.data", "{folder}/texts.jsonl"),
            "tasks": Given("--task gsm8k --task samsum", f"{OPTIONS}.tasks", ("gsm8k", "samsum")),
            "devices": Given("--device raspberry-pi-4b-sd", "request.profile.name", "raspberry-pi-4b-sd"),
            "dense_bits": Given("--dense-bits 4", f"{OPTIONS}.dense_bits", 4),
            "bits": Given("--bits 1.6,2,8", f"{OPTIONS}.bits", (1.6, 2, 8)),
            "group_size": Given("--group-size 64,128", f"{OPTIONS}.group_sizes", (64, 128)),
            "sensitivity": Given("--sensitivity proxy", f"{OPTIONS}.sensitivity", "proxy"),
            "effort": Given("--effort quick", f"{OPTIONS}.effort", "quick"),
            "objective": Given("--objective size", f"{OPTIONS}.objective", "size"),
            "quantizer": Given("--quantizer rtn", f"{OPTIONS}.quantizer", "rtn"),
            "torch_device": Given("--torch-device cuda:1", f"{OPTIONS}.torch_device", "cuda:1"),
            "shots": Given("--shots 3", f"{OPTIONS}.shots", 3),
            "confidence": Given("--confidence 0.9", f"{OPTIONS}.confidence", 0.9),
            "long_items": Given("--long-items skip", f"{OPTIONS}.long_items", "skip"),
            "chat": Given("--chat", f"{OPTIONS}.task_settings.chat", True),
            "system": Given("--system kind", f"{OPTIONS}.task_settings.system", "kind"),
            "prompt_template": Given(
                "--prompt-template a.jinja", f"{OPTIONS}.task_settings.prompt_template", "a.jinja"
            ),
            "metric": Given("--metric wer", f"{OPTIONS}.task_settings.metric", "wer"),
            "lower_is_better": Given("--lower-is-better", f"{OPTIONS}.task_settings.lower_is_better", True),
            "trust_metric_code": Given("--trust-metric-code", f"{OPTIONS}.task_settings.trusts_metric_code", True),
            "fallback_bits": Given("--fallback-bits 2", f"{OPTIONS}.fallback_bits", 2),
            "prune": Given("--keep-experts", f"{OPTIONS}.prune", False),
            "swaps": Given("--swaps 12", f"{OPTIONS}.swaps", 12),
            "path_keys": Given("--set path-keys=pairs", f"{OPTIONS}.path_keys", "pairs"),
            "modes": Given(f"--modes '{MODES}'", "request.measure_modes", ModesMeasurement(MODES)),
            "limit": Given("--limit 13", f"{OPTIONS}.limit", 13),
            "seed": Given("--seed 4", f"{OPTIONS}.seed", 4),
            "comparisons": Given("--no-comparisons", f"{OPTIONS}.comparisons", False),
            "popularity": Given("--popularity {folder}/text.txt", "request.popularity", Path("{folder}/text.txt")),
            "memory": Given("--memory 5GiB", "request.memory_bytes", 5 << 30),
            "cluster": Given("--cluster 10.0.0.1:6379", "request.cluster", "10.0.0.1:6379"),
            "resume": Given("--resume", "request.resume", True),
            "measurements": Given("--measurements {folder}/kept", "request.measurements", Path("{folder}/kept")),
            "overwrite": Given("--overwrite", "request.overwrite", True),
            "model": Given("", "request.source", "{folder}/model"),
            "": Given("", "request.open_runtime", open_partial),
        },
    ),
    "compile, templates": Line("compile", COMPILE, {"": Given("", "request.templates.__name__", "of_model")}, UNIFORM),
    "compile, as edgemoe": Line(
        "compile",
        COMPILE,
        {"preset": Given("--as edgemoe", f"{OPTIONS}.search", "edgemoe")},
        f"--loss 2% --data x {LAPTOP}",
    ),
    "compile, as hobbit": Line(
        "compile",
        COMPILE,
        {"": Given("--as hobbit", "request.fit_eviction", fit_to_texts)},
        f"--kl 0.25 --data x {LAPTOP}",
    ),
    "compile, card": Line("compile", COMPILE, {"": Given("", "request.draw_card", draw_card)}, UNIFORM),
    "compile, pruned": Line(
        "compile",
        COMPILE,
        {
            "kl": Given("--kl 0.25", f"{OPTIONS}.target", Target("kl", 0.25)),
            "prune": Given("--prune-experts", f"{OPTIONS}.prune", True),
        },
        f"--data x {LAPTOP}",
    ),
    "compile, edgemoe": Line(
        "compile",
        COMPILE,
        {
            "bits_per_weight": Given("--bits-per-weight 3.5", f"{OPTIONS}.target", Target("bits_per_weight", 3.5)),
            "search": Given("--search edgemoe", f"{OPTIONS}.search", "edgemoe"),
            "plan_only": Given("--plan-only", "request.plan_only", True),
        },
        f"--data x {LAPTOP}",
    ),
    "compile, size": Line(
        "compile", COMPILE, {"size": Given("--size 3MiB", f"{OPTIONS}.target", Target("size", 3 << 20))}, LAPTOP
    ),
    "compile, keep codes": Line(
        "compile",
        COMPILE,
        {"keep_codes": Given("--keep-codes", f"{OPTIONS}.target", Target("uniform", 16, keeps_codes=True))},
        LAPTOP,
    ),
    "compile, uniform": Line(
        "compile",
        COMPILE,
        {
            "uniform": Given("--uniform 4", f"{OPTIONS}.target", Target("uniform", 4)),
            "symmetric": Given("--symmetric", f"{OPTIONS}.symmetric", True),
            "threads": Given("--threads 3", "request.open_runtime.keywords", {"threads": 3}),
        },
        LAPTOP,
    ),
    "compile, sweep": Line(
        "compile", COMPILE, {"sweep": Given("--sweep 1%,2%", "request.sweep", (0.01, 0.02))}, f"--data x {LAPTOP}"
    ),
    "compile, estimate": Line(
        "compile",
        "moec.compiler.forecast.forecast",
        {"estimate": Given("--estimate", f"{OPTIONS}.target", Target("loss", 0.03)), "loss": LOSS},
        f"--data x {LAPTOP}",
    ),
}


SHOWN_ELSEWHERE = {
    "run": {
        "bundle": "test_text_goes_to_stdout_and_talk_to_stderr",
        "prompt": "test_prompt_from_stdin",
        "chat": "test_a_chat_goes_through_the_template",
        "system": "test_a_chat_goes_through_the_template",
        "as_json": "test_json_is_one_object_with_all_counts",
        "trace_out": "test_a_trace_has_the_experts_of_every_token_and_no_text",
    },
    "chat": {
        "bundle": "test_answers_go_to_stdout_and_talk_to_stderr",
        "system": "test_a_system_message_comes_first",
        "plain": "test_plain_ignores_the_template",
        "as_json": "test_a_turn_computes_only_what_is_new",
    },
    "generate": {
        "bundle": "test_prompts_of_unequal_length_are_continued_as_alone",
        "out": "test_prompts_of_unequal_length_are_continued_as_alone",
    },
    "eval": {
        "model": "test_a_16_bit_bundle_scores_what_the_checkpoint_scores",
        "per_item": "test_slots_change_nothing",
        "as_json": "test_a_16_bit_bundle_scores_what_the_checkpoint_scores",
    },
    "bench": {
        "bundle": "test_json_holds_all_of_it",
        "policies": "test_people_get_the_table_of_policies",
        "trace_out": "test_counts_are_those_of_the_run_that_was_recorded",
        "trace_little": "test_the_little_model_of_a_trace_must_be_there",
        "profile": "test_a_profile_divides_a_token_among_kernels_waiting_and_python",
        "as_json": "test_json_holds_all_of_it",
    },
    "tune": {
        "bundle": "test_the_file_lies_beside_the_bundle_and_is_used",
        "as_json": "test_weights_are_fitted_and_compared_on_other_traces",
    },
    "simulate": {
        "bundle": "test_counts_are_those_of_the_run_that_was_recorded",
        "trace_path": "test_counts_are_those_of_the_run_that_was_recorded",
        "as_json": "test_counts_are_those_of_the_run_that_was_recorded",
    },
    "compile": {"as_json": "test_json_is_the_content_of_quality_json"},
}
"""Command -> parameter that reaches no seam -> test of this folder that fails if the parameter has no effect."""

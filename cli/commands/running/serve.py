"""`moec serve`: answer HTTP requests in the form of the OpenAI API."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import MoecError, OptionError
from moec.manifests.runtime_limits import DEFAULT_CONTEXT
from moec.manifests.sizes import parse_bytes

from ...lossy_modes.mode_costs import say_mode_cost
from ...options.opening import bundle_folder, open_engine, verdict_of, with_fitting_slots
from ...options.paths import bundle_argument, slots_option
from ...options.runtime_options import build_options, runtime_options
from ...options.sampling_options import chosen_sampling
from ...terminal import output
from ...terminal.help_sections import SectionCommand, section_option

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.text.sampling import SamplingOptions
    from moec.serving.api.service import MemoryShares

DEFAULT_SLOTS = 4
_MOST_NAME_CHARACTERS = 200
MOST_SLOTS = 64
server = section_option("Server")


@click.command("serve", cls=SectionCommand, short_help="Answer requests over HTTP, as the OpenAI API does.")
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free port.")
@slots_option
@server("--name", metavar="NAME", help="Name of the model in the API.  [default: that of the folder]")
@server("--queue", type=int, default=32, show_default=True, metavar="N", help="Most requests that wait for a slot.")
@server(
    "--prefill-tokens",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Most tokens of prompts in a pass while answers run. Fewer keep the pace of the answers.",
)
@server(
    "--deadline", type=float, default=600.0, show_default=True, metavar="SECONDS", help="Most time for one request."
)
@server(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Refuse requests without the key in the first line of this file.",
)
@server(
    "--prefix-cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Save slots, the keys and values of conversations, in this folder for the next start. It tells what was said.",
)
@server("--prefix-cache-size", default="1GiB", show_default=True, metavar="SIZE", help="Most bytes of that folder.")
@server("--allowed-host", multiple=True, metavar="NAME", help="A name of this server in Host headers; repeatable.")
@server("--cors-origin", multiple=True, metavar="ORIGIN", help="Let pages of this origin ask; repeatable.")
@runtime_options
def serve_command(
    bundle: Path,
    host: str,
    port: int,
    slots: int | None,
    name: str | None,
    queue: int,
    prefill_tokens: int,
    deadline: float,
    api_key_file: Path | None,
    prefix_cache: Path | None,
    prefix_cache_size: str,
    allowed_host: tuple[str, ...],
    cors_origin: tuple[str, ...],
    **values: Any,
) -> None:
    """Serve the bundle in folder BUNDLE over HTTP, within its memory budget.

    Clients of the OpenAI API work with the address that is printed and `/v1` after it. Requests share passes. An answer
    does not depend on other requests, except under modes marked LOSSY. SIGTERM lets running answers end, an interrupt
    ends them. Requests that do not say how to draw tokens get what the bundle's generation_config.json recommends, else
    temperature 1. Other machines can ask only with `--host` and `--api-key-file`.

    \b
    moec serve mixtral-moec --memory 2GiB
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.serving.api.fields import server_bytes
    from moec.serving.api.service import ServiceOptions, memory_shares
    from moec.serving.engine.scheduler import ServingOptions
    from moec.serving.grammar.masks import grammar_bytes, is_installed
    from moec.serving.security import SecurityOptions, read_key
    from moec.serving.serve import ServeOptions, bind, serve

    if slots is not None and not 1 <= slots <= MOST_SLOTS:
        raise OptionError(f"`--slots` must be 1 to {MOST_SLOTS}, found {slots}", "leave it out for 4")
    options = build_options(values, DEFAULT_SLOTS if slots is None else slots, bundle)
    with open_bundle(bundle_folder(bundle)) as opened:
        manifest = opened.manifest
    security = SecurityOptions(
        host, allowed_host, cors_origin, None if api_key_file is None else read_key(api_key_file)
    )
    security.check()
    if name is None:  # after a link, as `current` is one, the name in the manifest
        name = manifest.name if bundle.is_symlink() else bundle.resolve().name
    elif not 1 <= len(name) <= _MOST_NAME_CHARACTERS or not name.isprintable():
        raise OptionError(
            f"`--name` must have 1 to {_MOST_NAME_CHARACTERS} visible characters, found {name[:60]!r}",
            "leave it out for the name of the folder",
        )
    scheduling = ServingOptions(queue, prefill_tokens)
    if not 0 < deadline <= 1e6:
        raise OptionError(f"`--deadline` must be more than 0 and at most 1000000, found {deadline:g}", "try 600")
    service = ServiceOptions(name, deadline_s=deadline)
    settings = ServeOptions(service, security, scheduling)
    if prefix_cache is not None:
        limit_bytes = parse_bytes(prefix_cache_size, "--prefix-cache-size")
        settings = replace(settings, saved_slots=prefix_cache, saved_slots_bytes=limit_bytes)
    bound = bind(host, port)  # before the weights are read
    samplings: list[tuple[SamplingOptions, str]] = []

    def open_with(fitting: RuntimeOptions) -> Engine:
        """Open the engine. The server's memory counts, and that of grammars if they can be used."""
        grammars = grammar_bytes(manifest.model.vocab_size, fitting.slots) if is_installed() else 0
        other_bytes = server_bytes(fitting.context or DEFAULT_CONTEXT) + grammars
        return open_engine(bundle, replace(fitting, other_bytes=other_bytes), values["kernels"], prepare)

    def prepare(opened: Bundle) -> None:
        samplings.append(chosen_sampling(opened, options.verify, {}))

    with bound, with_fitting_slots(open_with, options, slots is None) as engine:
        (sampling, sampling_text), verdict = samplings[-1], verdict_of(bundle)
        settings = replace(settings, service=replace(service, sampling=sampling, verdict=verdict))
        output.say(engine.mode)
        if verdict:
            output.say(f"verdict: {verdict}")
        output.say(f"{sampling_text}; requests may say otherwise")
        output.say(_memory_table(memory_shares(engine), engine.memory.context))
        say_mode_cost(bundle, engine)

        def say_ready() -> None:
            address = f"{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
            answers = f"{engine.options.slots} answer{'s' * (engine.options.slots > 1)} at once"
            output.say(f"serving `{name}` at http://{address}, {answers}")

        serve(engine, bound, settings, say_ready, _report, output.say, _end_process)
    output.say("stopped")


def _memory_table(shares: MemoryShares, context: int) -> str:
    """Return a line for each part of the memory, after a line with their sum. context: tokens of a slot."""
    is_elastic = shares["unused_bytes"] is not None
    slots = f"{shares['slots']} slot{'s' * (shares['slots'] > 1)} of {output.human_bytes(shares['slot_bytes'])}"
    parts = [
        (shares["process_bytes"], "process, with tokenizer and manifest"),
        (shares["server_bytes"], "server: requests, log probabilities, grammars"),
        (shares["dense_bytes"], "dense weights"),
        (shares["tables_bytes"], "tables for reading ahead"),
        (shares["buffers_bytes"], "buffers of the longest pass"),
        (shares["accelerator_bytes"], "host memory of the accelerator"),
        (
            shares["slots"] * shares["slot_bytes"],
            f"{slots}: keys and values of {context} tokens, kept for the next turn of a conversation",
        ),
        (shares["experts_bytes"], "expert cache" + is_elastic * "; it also takes what slots and buffers leave free"),
        (shares["unused_bytes"] or 0, "not used"),
    ]
    rows = [(output.human_bytes(size), text) for size, text in parts if size > 0]
    whole = output.human_bytes(sum(size for size, _ in parts if size > 0))
    width = max(len(size) for size, _ in rows)
    head = f"{'memory budget' if is_elastic else 'memory at most'} {whole}"
    return "\n".join([head, *(f"  {size.rjust(width)}  {text}" for size, text in rows)])


def _end_process(error: MoecError) -> None:
    """Print why, and end the process. A thread that waits for storage would hold up any other end."""
    output.say(f"error: {error}")
    sys.stderr.flush()
    os._exit(error.exit_code)


def _report(problem: BaseException) -> None:
    """Print a fault, for the log."""
    output.say("".join(traceback.format_exception(problem)), end="")

"""`moec fit`: does a model fit this machine, and how fast would it be?"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from moec.manifests.errors import OptionError
from moec.manifests.sizes import exact_bytes, human_bytes, option_bytes

from ...options.paths import PLACE, json_option
from ...terminal import output

if TYPE_CHECKING:
    from collections.abc import Callable

    from moec.compiler.fit.config_file import ConfigFile
    from moec.compiler.fit.estimate import BitsRow, CompileOutlook, Outlook, Parameters
    from moec.manifests.model import ModelSpec
    from moec.profiles.device import DeviceProfile

MEMORY_SIZES = tuple(size << 30 for size in (2, 4, 8, 16))
_LONG_MINUTES = 100
_LARGE_WEIGHTS = 2_000_000_000
"""Weights from which the next command asks for a quick compile."""


@click.command("fit", short_help="Say whether a model fits, and how fast it would be.")
@click.argument("model", type=PLACE)
@click.option("--context", type=click.IntRange(1), metavar="N", help="Tokens of a text.  [default: as `moec run`]")
@click.option(
    "--device", "devices", multiple=True, metavar="NAME|FILE,...", help="Device profiles.  [default: this machine]"
)
@json_option
def fit_command(model: str, context: int | None, devices: tuple[str, ...], as_json: bool) -> None:
    """Predict from the config.json of MODEL alone: a folder, a URL, a model on the hub, or a GGUF file.

    Speeds are those of single tokens after a short prompt. Their range comes from the routing, which a compile
    measures, and from how much of the reading overlaps with computing. Models of a few million weights are slower.

    \b
    moec fit Qwen/Qwen3-30B-A3B
    moec fit mixtral --context 32768 --device raspberry-pi-5-nvme,laptop
    """
    from moec.compiler.families import describe
    from moec.compiler.fit.config_file import open_config
    from moec.compiler.fit.estimate import compile_outlook, count_parameters, estimate, measure_products

    files = open_config(model)
    spec = describe(files)
    tokens = min(context or spec.default_context, spec.max_positions)
    if context is not None and context > spec.max_positions:
        raise OptionError(
            f"`--context {context}` is longer than the {spec.max_positions} tokens of the model", "ask for fewer"
        )
    machines = _machines([name for given in devices for name in given.split(",")])
    counts, rows = count_parameters(spec), estimate(spec, files, tokens, [each for _, each in machines])
    compiling = compile_outlook(counts, measure_products())
    if not devices:
        machines, rows = _needed(machines, rows)
    if as_json:
        plain = _plain(files, spec, tokens, counts, machines, rows)
        output.data_json({**plain, "compile": asdict(compiling)})
        return
    output.data(_facts(files, spec, tokens, counts, compiling, machines[0][1] if not devices else None))
    output.data("\n" + _table("predicted tokens/s (slowest-fastest)", machines, rows, _speed))
    output.data("\n" + _table("share of experts in memory, share of reads that they serve", machines, rows, _hits))
    output.data("\n" + _next(model, files.has_codes, counts))


def _machines(devices: list[str]) -> list[tuple[str, DeviceProfile]]:
    """Return machines with titles: devices, or this one with several sizes of memory. Raises ProfileError."""
    from moec.compiler.fit.estimate import with_memory
    from moec.profiles.device import HOST_NAME
    from moec.profiles.loading import load_profile
    from moec.runtime.memory.bandwidth import LARGE_BYTES, buffer_bytes, read_bytes_per_s

    if devices:
        profiles = [load_profile(name) for name in devices]
        return [(f"{each.name} {human_bytes(each.memory_budget_bytes)}", each) for each in profiles]
    host = load_profile(HOST_NAME)
    # All threads decode. Copying by one of them, as the profile measures, may reach two thirds of the rate.
    host = replace(host, memory_bytes_per_s=read_bytes_per_s(buffer_bytes(LARGE_BYTES), host.threads))
    sizes = [size for size in MEMORY_SIZES if size < host.memory_budget_bytes]
    sizes += [size for size in MEMORY_SIZES if size >= host.memory_budget_bytes]
    titled = [(exact_bytes(size), with_memory(host, size)) for size in sizes]
    return [*titled, (f"free here {human_bytes(host.memory_budget_bytes)}", host)]


def _needed(
    machines: list[tuple[str, DeviceProfile]], rows: list[BitsRow]
) -> tuple[list[tuple[str, DeviceProfile]], list[BitsRow]]:
    """Return the machines up to the first that holds all experts at every bitwidth, and their columns."""
    holding = [all(row.outlooks[at].held_share == 1 for row in rows) for at in range(len(machines))]
    kept = [at for at in range(len(machines)) if not any(holding[:at])]
    return [machines[at] for at in kept], [
        replace(row, outlooks=tuple(row.outlooks[at] for at in kept)) for row in rows
    ]


def _facts(
    files: ConfigFile,
    spec: ModelSpec,
    tokens: int,
    counts: Parameters,
    compiling: CompileOutlook,
    host: DeviceProfile | None,
) -> str:
    from moec.profiles.memory_floor import kv_bytes

    weights = counts.routed + counts.dense
    facts = [
        ("model", f"{files.name}, family {spec.family}, which `moec compile` takes"),
        (
            "weights",
            f"{_count(weights)}: {_count(counts.routed)} in {counts.experts:,} routed experts, "
            f"{_count(counts.dense)} others",
        ),
        ("per token", f"{_count(counts.routed_per_token)} of experts, {_count(counts.dense_per_token)} others"),
        ("context", f"{tokens:,} tokens keep {human_bytes(kv_bytes(spec, tokens))} of keys, values and states"),
    ]
    if files.stored_bytes is not None:
        facts.insert(2, ("on disk", f"{human_bytes(files.stored_bytes)} as published"))
    if counts.routed + counts.dense > _LARGE_WEIGHTS:
        minutes = compiling.quick_seconds / 60
        took = f"{minutes:.0f} minutes" if minutes < _LONG_MINUTES else f"{minutes / 60:.0f} hours"
        disk = human_bytes(compiling.disk_bytes)
        facts.append(("compile", f"about {took} here with --effort quick, {disk} of free disk"))
    if host is not None:
        rates = f"memory {_rate(host.memory_bytes_per_s)}, storage {_rate(host.storage_bytes_per_s)}"
        facts.append(("this machine", f"{host.threads} threads, {rates}, measured now"))
    return output.facts(facts)


def _table(
    title: str, machines: list[tuple[str, DeviceProfile]], rows: list[BitsRow], cell: Callable[[Outlook], str]
) -> str:
    lines = [[f"{row.bits:g}", human_bytes(row.disk_bytes), *map(cell, row.outlooks)] for row in rows]
    return f"{title}\n" + output.table(lines, ["bits", "bundle", *(name for name, _ in machines)])


def _speed(outlook: Outlook) -> str:
    rates = (outlook.tokens_per_s, outlook.slowest, outlook.fastest)
    if None in rates:
        return f"needs {option_bytes(outlook.needed_bytes)}"
    usual, slowest, fastest = (f"{rate:.{0 if rate >= 20 else 1}f}" for rate in rates if rate is not None)
    return usual if slowest == fastest else f"{usual} ({slowest}-{fastest})"


def _hits(outlook: Outlook) -> str:
    if outlook.held_share is None or outlook.hit_rate is None:
        return "-"
    return f"{outlook.held_share:.0%}, {outlook.hit_rate:.0%}".replace("%", " %")


def _next(model: str, has_codes: bool, counts: Parameters) -> str:
    """Return the commands to type next."""
    quick = " --effort quick" if counts.routed + counts.dense > _LARGE_WEIGHTS else ""
    command = f"moec compile {model} --loss 2% --data DATA{quick}"
    lines = [("next", command), ("", f"{command} --estimate    its time, memory and disk here")]
    kept = f"moec compile {model} --keep-codes    no search: the codes of the file, in minutes"
    return output.facts([("next", kept), ("", command)] if has_codes else lines)


def _count(weights: int) -> str:
    return f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.1f} million"


def _rate(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s"


def _plain(
    files: ConfigFile,
    spec: ModelSpec,
    tokens: int,
    counts: Parameters,
    machines: list[tuple[str, DeviceProfile]],
    rows: list[BitsRow],
) -> dict[str, object]:
    """Return everything as plain values."""
    from moec.compiler.fit.routing import COMMON_SHARE, HIGH_SHARE, LOW_SHARE
    from moec.profiles.memory_floor import kv_bytes

    return {
        "model": files.name,
        "family": spec.family,
        "stored_bytes": files.stored_bytes,
        "parameters": asdict(counts),
        "context": tokens,
        "kv_bytes": kv_bytes(spec, tokens),
        "routing_common_share": {"usual": COMMON_SHARE, "least": LOW_SHARE, "most": HIGH_SHARE},
        "machines": [{**profile.to_plain(), "title": title} for title, profile in machines],
        "rows": [row.to_plain() for row in rows],
    }

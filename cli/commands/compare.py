"""`moec compare`: a finished bundle against the best uniform format and EdgeMoE's search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..options.paths import PATH
from ..terminal import output
from ..terminal.compile_log import CompileLog
from ..terminal.report import comparison_table

if TYPE_CHECKING:
    from moec.compiler.compare_bundle import ComparisonRequest
    from moec.manifests.bundle import BundleManifest


@click.command("compare", short_help="Measure the bytes that other quantization plans need.")
@click.argument("bundle", type=PATH)
@click.option("--model", metavar="FOLDER", help="The checkpoint.  [default: from the log next to the bundle]")
@click.option("--data", metavar="DATA", help="The task items.  [default: from the log next to the bundle]")
@click.option("--memory", metavar="SIZE", help="Memory for the comparison.  [default: 7/8 of the machine's]")
@click.option("--resume", is_flag=True, help="Continue an interrupted comparison.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(
    bundle: Path, model: str | None, data: str | None, memory: str | None, resume: bool, as_json: bool
) -> None:
    """Compare BUNDLE with the best uniform format and with EdgeMoE's search, at the target of its compile.

    A compile makes these comparisons only up to a third of all its measurements. This command makes all of them. The
    checkpoint and the data are measured again and must be those of the compile. The bundle does not change. The result
    is written to `NAME.comparison.json` next to it.

    \b
    moec compare mixtral-moec
    moec compare mixtral-moec --model mixtral --data gsm8k/
    """
    from moec.compiler.compare_bundle import COMPARISON_SUFFIX, compare_bundle
    from moec.runtime.bundle.opening import open_bundle

    from .inspect import read_quality

    opened = open_bundle(bundle)
    quality = read_quality(opened) or {}
    known = quality.get("comparison")
    if isinstance(known, dict) and not known.get("left_out"):
        output.say(f"`{bundle}` holds all comparisons already")
        _print(quality, as_json)
        return
    name = bundle.resolve().name
    folder = bundle.resolve().parent / name
    log = CompileLog(folder.with_name(name + COMPARISON_SUFFIX))
    request = _request(folder, opened.manifest, quality, (model, data), log, memory, resume)
    with log:
        found = compare_bundle(request)
        path = _write(folder, found)
    _print({**quality, "comparison": found}, as_json)
    output.say(f"kept in `{path}`")


def _request(
    bundle: Path,
    manifest: BundleManifest,
    quality: dict[str, Any],
    given: tuple[str | None, str | None],
    log: CompileLog,
    memory: str | None,
    resume: bool,
) -> ComparisonRequest:
    """Return the request.

    given: values of `--model` and `--data`.
    Raises OptionError if a path is neither given nor in the log.
    """
    from moec.compiler.compare_bundle import ComparisonRequest
    from moec.compiler.request.options import Talk
    from moec.manifests.errors import OptionError
    from moec.manifests.sizes import parse_bytes
    from moec.profiles.loading import load_profile

    from .compile import open_partial

    logged = _logged(bundle)
    source, data = given[0] or logged.get("model"), given[1] or logged.get("data")
    if source is None or data is None:
        missing = " and ".join(
            text
            for value, text in ((source, "the checkpoint (`--model`)"), (data, "the task data (`--data`)"))
            if value is None
        )
        raise OptionError(
            f"a comparison measures again, and the log next to `{bundle}` does not name {missing}",
            "name the paths of the compile",
        )
    return ComparisonRequest(
        bundle, manifest, quality, source, data, load_profile("host", bundle.parent), open_partial,
        Talk(log.note, log.progress), resume, 0 if memory is None else parse_bytes(memory, "--memory"),
    )  # fmt: skip


def _logged(bundle: Path) -> dict[str, str]:
    """Return `model` and `data` from the log next to the bundle. Without a log, return no entry."""
    from moec.manifests.files.input_file import UnreadableFile, read_input
    from moec.manifests.files.limits import LOG_JSON, MAX_LOG_BYTES
    from moec.manifests.files.strict_json import load_strict_json

    from .compile import LOG_SUFFIX

    try:
        plain = load_strict_json(read_input(bundle.with_name(bundle.name + LOG_SUFFIX), MAX_LOG_BYTES), LOG_JSON)
    except (UnreadableFile, ValueError):
        return {}
    found = plain if isinstance(plain, dict) else {}
    return {name: found[name] for name in ("model", "data") if isinstance(found.get(name), str)}


def _write(bundle: Path, found: dict[str, Any]) -> Path:
    """Write `NAME.comparison.json` and return its path. Raises DoesNotFit, InputError."""
    import hashlib

    from moec.manifests.bundle import MANIFEST_NAME
    from moec.manifests.files.output_file import write_output

    path = _comparison_path(bundle)
    digest = hashlib.sha256((bundle / MANIFEST_NAME).read_bytes()).hexdigest()
    content = {"manifest_sha256": digest, "comparison": found}
    write_output(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _comparison_path(bundle: Path) -> Path:
    from moec.compiler.compare_bundle import COMPARISON_SUFFIX

    return bundle.with_name(f"{bundle.name}{COMPARISON_SUFFIX}.json")


def _print(quality: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.data_json(quality["comparison"])
    else:
        output.data(comparison_table(quality))

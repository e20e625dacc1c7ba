"""`moec compare`: a finished bundle against the best uniform format and EdgeMoE's search."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from ...options.opening import bundle_folder
from ...options.paths import PATH, json_option, work_memory_option
from ...terminal import output
from ...terminal.compile_log import CompileLog, measurement_inputs
from ...terminal.report import comparison_table

_MARK = re.compile(rb'\A\{\s*"manifest_sha256": "[0-9a-f]{64}",\s*"comparison"')


@click.command("compare", short_help="Measure the bytes that other quantization plans need.")
@click.argument("bundle", type=PATH)
@click.option("--model", metavar="FOLDER", help="The checkpoint.  [default: from the log next to the bundle]")
@click.option("--data", metavar="DATA", help="The task items.  [default: from the log next to the bundle]")
@work_memory_option
@click.option(
    "--measurements",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of `moec compile --measurements`. What the compile measured is not measured again, and the "
    "comparison is added.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted comparison.")
@json_option
def compare_command(
    bundle: Path, model: str | None, data: str | None, memory: str | None, measurements: Path | None, resume: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare BUNDLE with the best uniform format and with EdgeMoE's search, at the target of its compile.

    A compile makes only some of these comparisons. Checkpoint and data must be those of the compile. They are measured
    again, unless --measurements has them. The result is written to `NAME.comparison.json` next to the bundle.

    \b
    moec compare mixtral-moec
    moec compare mixtral-moec --model mixtral --data gsm8k/
    moec compare mixtral-moec --measurements mixtral.measurements
    """
    import hashlib

    from moec.compiler.measured_bundle import COMPARISON_SUFFIX, BundleRequest, compare_bundle
    from moec.compiler.request.options import Talk
    from moec.manifests.bundle import MANIFEST_NAME
    from moec.manifests.files.implied_names import check_implied, write_implied
    from moec.manifests.sizes import parse_bytes
    from moec.profiles.loading import load_profile
    from moec.runtime.bundle.open_bundle import open_bundle

    from ...terminal.compile_result import check_measurements
    from ..bundles.inspect import read_quality
    from .partial_bundle import open_partial

    opened = open_bundle(bundle_folder(bundle))
    quality = read_quality(opened) or {}
    comparison = quality.get("comparison")
    if isinstance(comparison, dict) and not comparison.get("left_out"):
        output.say(f"`{bundle}` holds all comparisons already")
        _print(quality, as_json)
        return
    folder = bundle.resolve()
    path = folder.with_name(f"{folder.name}{COMPARISON_SUFFIX}.json")
    check_implied(path, _MARK)
    log = CompileLog(folder.with_name(folder.name + COMPARISON_SUFFIX))
    if measurements is not None:
        check_measurements(measurements, folder, is_many=False)
        log.work = measurements
    request = BundleRequest(
        folder, opened.manifest, quality, *measurement_inputs(folder, model, data),
        load_profile("host", folder.parent), open_partial, Talk(log.note, log.progress), resume,
        0 if memory is None else parse_bytes(memory, "--memory"), measurements,
    )  # fmt: skip
    with log:
        comparison = compare_bundle(request)
        digest = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
        content = {"manifest_sha256": digest, "comparison": comparison}
        write_implied(path, (json.dumps(content, indent=1) + "\n").encode(), _MARK)
    _print({**quality, "comparison": comparison}, as_json)
    output.say(f"kept in `{path}`")


def _print(quality: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.data_json(quality["comparison"])
    else:
        output.data(comparison_table(quality))

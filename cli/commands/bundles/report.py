"""`moec report`: a bundle as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import InputError, OptionError
from moec.manifests.files.implied_names import check_implied, write_implied
from moec.manifests.files.output_file import STDOUT, write_output

from ...options.opening import bundle_folder
from ...options.paths import OUTPUT_FILE, PLACE, bundle_argument, file_option
from ...terminal import output
from ...terminal.compile_result import REPORT_MARK, REPORT_SUFFIX
from .inspect import read_quality

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest
    from moec.reporting.card import CardPicture
    from moec.reporting.report import Replayed
    from moec.runtime.bundle.open_bundle import Bundle

_ELSEWHERE = "move it, or name another file: -o FILE"


@click.command("report", short_help="Show a bundle as one HTML page.")
@bundle_argument
@click.option(
    "-o",
    "--output",
    "target",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="The page; `-` is standard output.  [default: BUNDLE.report.html]",
)
@file_option("--trace", "trace_path", help="Trace that `moec bench --trace-out` wrote: caches and one token.")
@click.option(
    "--profile", type=PLACE, metavar="NAME|FILE", help="With --trace: device.  [default: the machine of the trace]"
)
@click.option(
    "--expert-cache", "cache", metavar="SIZE|PERCENT", help="With --trace: cache of the shown token.  [default: 50%]"
)
@click.option(
    "--curve",
    "curve_paths",
    type=PLACE,
    multiple=True,
    metavar="FILE",
    help="JSON of `moec compile --sweep`, or curves of other engines; repeatable.",
)
def report_command(
    bundle: Path,
    target: Path | None,
    trace_path: Path | None,
    profile: str | None,
    cache: str | None,
    curve_paths: tuple[str, ...],
) -> None:
    """Write a page about the bundle in folder BUNDLE: one file that needs no network.

    It shows what was promised and how it was shown, loss over bytes, maps of bits, popularity and sensitivity, and
    every plan that the search measured. With --trace it also shows what caches of several sizes keep, and the reads
    and the computing of one token.

    \b
    moec report mixtral-moec
    moec bench mixtral-moec --text held-out.txt --expert-cache 50% --trace-out held-out.trace
    moec report mixtral-moec --trace held-out.trace --profile raspberry-pi-5-nvme -o mixtral.html
    """
    if trace_path is None and (profile is not None or cache is not None):
        given = "--profile" if profile is not None else "--expert-cache"
        raise OptionError(f"`{given}` has no effect without a trace", "add `--trace FILE`, or leave it out")
    folder = bundle_folder(bundle)
    place = target or _implied_page(folder)
    if target is None:
        check_implied(place, REPORT_MARK, _ELSEWHERE)
    from moec.manifests.files.input_file import UnreadableFile, read_input
    from moec.reporting.curves import CURVE_JSON, read_curves
    from moec.reporting.report import Report, report_page
    from moec.runtime.bundle.open_bundle import open_bundle

    curves = []
    for path in curve_paths:
        try:
            curves += read_curves(read_input(Path(path), CURVE_JSON.size_bytes, follow_links=True), path)
        except UnreadableFile as error:
            raise InputError(f"`{path}` {error}", "give the JSON file that `moec compile --sweep` writes") from error
    with open_bundle(folder) as opened:
        replayed = None if trace_path is None else _replayed(opened, trace_path, profile, cache)
        page = report_page(Report(opened.manifest, read_quality(opened), replayed, curves)).encode()
    if target is None:
        write_implied(place, page, REPORT_MARK, _ELSEWHERE)
    else:
        write_output(place, page)
    if place != STDOUT:
        output.say(f"wrote `{place}`: open it in a browser")


def _implied_page(folder: Path) -> Path:
    """Return the page of a bundle if no other is named."""
    resolved = folder.resolve()
    return resolved.with_name(resolved.name + REPORT_SUFFIX)


def report_beside(bundle: Path) -> None:
    """Write the report of a fresh bundle next to it. Raises BundleError, DoesNotFit, InputError."""
    from moec.reporting.report import Report, report_page
    from moec.runtime.bundle.open_bundle import open_bundle

    with open_bundle(bundle) as opened:
        page = report_page(Report(opened.manifest, read_quality(opened)))
    write_implied(bundle.with_name(bundle.name + REPORT_SUFFIX), page.encode(), REPORT_MARK)


def draw_card(manifest: BundleManifest, quality: Mapping[str, Any]) -> Sequence[CardPicture]:
    """Return the pictures of the model card of a bundle that is being written."""
    from moec.reporting.card import card_pictures

    return card_pictures(manifest, quality)


def _replayed(bundle: Bundle, trace: Path, profile: str | None, cache: str | None) -> Replayed:
    """Return what a trace says. Raises InputError, OptionError, ProfileError."""
    from moec.profiles.loading import load_profile
    from moec.runtime.options.runtime import parse_cache

    from ...simulation.report_replay import replayed_for_report

    device = None if profile is None else load_profile(profile, bundle.path)
    experts_bytes = bundle.manifest.cost.expert_padded_bytes
    share = min(1.0, parse_cache(cache or "50%", experts_bytes) / max(experts_bytes, 1))
    return replayed_for_report(bundle, trace, device, share)

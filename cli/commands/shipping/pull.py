"""`moec pull`: install the bundle that a channel names for this device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...exit_codes import EXIT_ROLLED_BACK
from ...options.keys import accepted_keys_option, read_accepted_keys
from ...options.paths import PATH, PLACE, json_option
from ...options.stores import opened_store
from ...terminal import output
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.shipping.pull.observer import PullObserver
    from moec.shipping.pull.pull import Pulled, PullRequest

_OUTCOMES = {
    "installed": "installed `{name}`: {path} is current",
    "unchanged": "`{name}` is installed already, with sequence {sequence}",
    "rolled back": "sequence {sequence} was rolled back, so nothing is installed until a higher one appears",
    "planned": "`{name}` would be installed; nothing was changed",
}


@click.command("pull", short_help="Install the bundle of a channel on this device.")
@click.argument("source", type=PLACE)
@click.argument("folder", metavar="DIR", type=PATH)
@accepted_keys_option(required=True)
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="Device profile, or `auto`.")
@click.option("--channel", default="stable", show_default=True, metavar="NAME", help="Channel of the store.")
@click.option("--memory", metavar="SIZE", help="Memory of a run on this device.  [default: all of it]")
@click.option("--max-rate", metavar="SIZE", help="Most bytes a second, like `2MB`.  [default: no bound]")
@click.option(
    "--keep",
    default=1,
    show_default=True,
    type=click.IntRange(0, 100),
    help="Bundles to keep in addition to the current one.",
)
@click.option("--plan-only", is_flag=True, help="Tell what would be fetched, and change nothing.")
@json_option
def pull_command(
    source: str,
    folder: Path,
    key_files: tuple[Path, ...],
    device: str,
    channel: str,
    memory: str | None,
    max_rate: str | None,
    keep: int,
    plan_only: bool,
    as_json: bool,
) -> int:
    """Install the bundle that a channel of SOURCE has for this device in folder DIR. DIR/current then names it.

    SOURCE is where `moec push` wrote to: a folder, or an address of http, https, s3, gs, hf or oci. Only what one of
    the keys signed is installed. The bundle is chosen by device profile and memory. Credentials,
    certificates and proxies are those of `moec push`.

    Files and experts that an installed bundle has are not fetched again. An interrupted pull goes on where it ended.
    DIR/current changes in one step, after every byte was checked and the self-test has passed. Engines that run keep
    their bundle.

    The exit code is 0 if the bundle is current now, or was before. It is 3 if something is forged, damaged or older
    than what this device has seen, and 4 if the channel has no bundle for this device. It is 6 if the sequence was
    rolled back, so that nothing is installed. It is 5 if the store fails, and 75 if the disk is full, another pull
    works there, or the self-test is killed: try again later. It is 1 for other errors.

    \b
    moec pull https://models.example/mixtral /var/lib/moec --key fleet.pub
    moec pull file:/media/stick /var/lib/moec --key fleet.pub --device raspberry-pi-5-nvme
    moec run /var/lib/moec/current --prompt "Question: ..."
    """
    from moec.shipping.pull.pull import PullRequest

    from ...terminal.pull_report import PullLines, PullTalk

    request = PullRequest(folder, channel=channel, device=device, keep=keep, plan_only=plan_only)
    if as_json:
        with _failure_as_json():
            result = _pulled(source, key_files, _with_sizes(request, memory, max_rate), memory, PullLines())
        told = {"event": "ended", "outcome": result.outcome, "bundle": result.name, "path": str(result.path)}
        output.data_json({**told, "sequence": result.channel.sequence, "device": result.bundle.device})
    else:
        with ProgressBar("pulling") as bar:
            result = _pulled(source, key_files, _with_sizes(request, memory, max_rate), memory, PullTalk(bar))
        values = {"name": result.name, "path": result.path, "sequence": result.channel.sequence}
        output.data(_OUTCOMES[result.outcome].format(**values))
    return EXIT_ROLLED_BACK if result.outcome == "rolled back" else 0


@contextmanager
def _failure_as_json() -> Iterator[None]:
    """Print an error as the last event, in addition to its sentence on stderr."""
    from moec.manifests.errors import MoecError

    try:
        yield
    except MoecError as error:
        told = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        output.data_json({"event": "failed", "exit_code": error.exit_code, **told})
        raise


def _with_sizes(request: PullRequest, memory: str | None, max_rate: str | None) -> PullRequest:
    """Return a request with memory and rate. Raises OptionError."""
    from moec.manifests.sizes import parse_bytes
    from moec.shipping.pull.fetch import FetchOptions

    memory_bytes = None if memory is None else parse_bytes(memory, "--memory")
    rate = None if max_rate is None else _rate(max_rate)
    return replace(request, memory_bytes=memory_bytes, fetch=FetchOptions(most_bytes_per_s=rate))


def _rate(text: str) -> int:
    """Return a rate in bytes per second. Raises OptionError."""
    from moec.manifests.errors import OptionError
    from moec.manifests.sizes import parse_bytes

    rate = parse_bytes(text, "--max-rate")
    if rate < 1:
        raise OptionError(f"`--max-rate {text}` lets nothing through", "write a rate like `2MB`")
    return rate


def _pulled(
    source: str, key_files: tuple[Path, ...], request: PullRequest, memory: str | None, observer: PullObserver
) -> Pulled:
    """Open the store and pull. Raises the errors of both."""
    from moec.shipping.pull.pull import Machine, pull

    from ...bundle_check import check_bundle
    from ...group import version

    keys = read_accepted_keys(key_files)

    def check(folder: Path) -> None:
        output.say(check_bundle(folder, memory))

    with opened_store(source) as store:
        return pull(store, keys, request, check, Machine(version(), datetime.now(timezone.utc)), observer)

"""`moec pull`: install the bundle that a channel names for this device."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moec.manifests.errors import MoecError, OptionError

from ...exit_codes import EXIT_ROLLED_BACK
from ...options.keys import accepted_keys_option, read_accepted_keys
from ...options.paths import PATH, PLACE, json_option
from ...options.stores import opened_store
from ...terminal import output
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.shipping.pull.delta import PullObserver
    from moec.shipping.pull.pull import Pulled

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
    from moec.manifests.sizes import parse_bytes
    from moec.shipping.pull.fetch import FetchOptions
    from moec.shipping.pull.pull import Machine, PullRequest, pull

    from ...bundle_check import check_bundle
    from ...group import version
    from ...terminal.pull_report import PullLines, PullTalk

    def install(observer: PullObserver) -> Pulled:
        memory_bytes = None if memory is None else parse_bytes(memory, "--memory")
        rate = None if max_rate is None else parse_bytes(max_rate, "--max-rate")
        if rate is not None and rate < 1:
            raise OptionError(f"`--max-rate {max_rate}` lets nothing through", "write a rate like `2MB`")
        request = PullRequest(
            folder, channel, device, memory_bytes, keep, plan_only, FetchOptions(most_bytes_per_s=rate)
        )
        keys, machine = read_accepted_keys(key_files), Machine(version(), datetime.now(timezone.utc))
        with opened_store(source) as store:
            return pull(store, keys, request, lambda path: output.say(check_bundle(path, memory)), machine, observer)

    if as_json:
        try:
            result = install(PullLines())
        except MoecError as error:  # also the last event, in addition to its sentence on stderr
            facts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            output.data_json({"event": "failed", "exit_code": error.exit_code, **facts})
            raise
        ended = {"event": "ended", "outcome": result.outcome, "bundle": result.name, "path": str(result.path)}
        output.data_json({**ended, "sequence": result.channel.sequence, "device": result.bundle.device})
    else:
        with ProgressBar("pulling") as bar:
            result = install(PullTalk(bar))
        values = {"name": result.name, "path": result.path, "sequence": result.channel.sequence}
        output.data(_OUTCOMES[result.outcome].format(**values))
    return EXIT_ROLLED_BACK if result.outcome == "rolled back" else 0

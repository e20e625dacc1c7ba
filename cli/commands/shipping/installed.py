"""`moec installed`: list the bundles on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...options.paths import PATH, json_option
from ...terminal import output

if TYPE_CHECKING:
    from moec.shipping.installed.listing import InstalledBundle


@click.command("installed", short_help="List the bundles on a device.")
@click.argument("folder", metavar="DIR", type=PATH)
@json_option
def installed_command(folder: Path, as_json: bool) -> None:
    """List the bundles in DIR, the folder that `moec pull` installs into: the current one first.

    The column `files` compares the files with the receipt of their check, without reading them. `moec verify` reads
    every byte.

    \b
    moec installed /var/lib/moec
    """
    from moec.shipping.installed.listing import installed_bundles

    found = installed_bundles(folder)
    if as_json:
        channels = {item.channel: item for item in found.state.channels}
        sequences = {
            name: {"highest_sequence": item.highest_sequence, "rolled_back_sequence": item.rolled_back_sequence}
            for name, item in channels.items()
        }
        bundles = [_plain(item) for item in found.bundles]
        output.data_json({"model": found.state.model, "channels": sequences, "bundles": bundles})
        return
    output.data(found.state.model)
    if not found.bundles:
        output.data("no bundle is installed")
        return
    rows = [
        (
            item.name,
            "current" if item.is_current else "previous" if item.is_previous else "-",
            item.device or "-",
            f"{item.channel} {item.sequence}" if item.channel else "-",
            item.installed or "-",
            output.human_bytes(item.size_bytes),
            item.changed or "unchanged",
        )
        for item in found.bundles
    ]
    output.data(output.table(rows, ("bundle", "use", "device", "sequence", "installed", "size", "files")))


def _plain(item: InstalledBundle) -> dict[str, Any]:
    """Return a bundle for `--json`."""
    return {
        "bundle": item.name,
        "path": str(item.path),
        "current": item.is_current,
        "previous": item.is_previous,
        "device": item.device,
        "channel": item.channel,
        "sequence": item.sequence,
        "installed": item.installed,
        "bytes": item.size_bytes,
        "changed": item.changed,
    }

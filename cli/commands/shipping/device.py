"""`moec installed` and `moec rollback`: list the bundles on a device, and return to the previous one."""

from __future__ import annotations

from pathlib import Path

import click

from ...options.paths import PATH, json_option, test_memory_option
from ...terminal import output


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
    from moec.shipping.installed.device import installed_bundles

    state, bundles = installed_bundles(folder)
    if as_json:
        sequences = {
            item.channel: {"highest_sequence": item.highest_sequence, "rolled_back_sequence": item.rolled_back_sequence}
            for item in state.channels
        }
        output.data_json({"model": state.model, "channels": sequences, "bundles": bundles})
        return
    output.data(state.model)
    if not bundles:
        output.data("no bundle is installed")
        return
    rows = [
        (
            bundle["bundle"],
            "current" if bundle["current"] else "previous" if bundle["previous"] else "-",
            bundle["device"] or "-",
            f"{bundle['channel']} {bundle['sequence']}" if bundle["channel"] else "-",
            bundle["installed"] or "-",
            output.human_bytes(bundle["bytes"]),
            bundle["changed"] or "unchanged",
        )
        for bundle in bundles
    ]
    output.data(output.table(rows, ("bundle", "use", "device", "sequence", "installed", "size", "files")))


@click.command("rollback", short_help="Return to the previous bundle.")
@click.argument("folder", metavar="DIR", type=PATH)
@test_memory_option
@json_option
def rollback_command(folder: Path, memory: str | None, as_json: bool) -> None:
    """Let DIR/current name the bundle that was current before. DIR is the folder that `moec pull` installs into.

    Its files must be unchanged, and its self-test must pass. The sequence that is left is not pulled again: `moec pull`
    waits for a higher one.

    \b
    moec rollback /var/lib/moec
    """
    from moec.shipping.installed.device import roll_back

    from ...bundle_check import check_bundle

    result = roll_back(folder, lambda bundle: output.say(check_bundle(bundle, memory)))
    if as_json:
        output.data_json(result)
        return
    output.data(
        f"returned from `{result['left']}` to `{result['current']}`; sequence {result['sequence']} of the channel "
        f"`{result['channel']}` is not installed again"
    )

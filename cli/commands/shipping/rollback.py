"""`moec rollback`: return to the bundle that was current before."""

from __future__ import annotations

from pathlib import Path

import click

from ...options.paths import PATH, json_option, test_memory_option
from ...terminal import output


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
        facts = {"left": result.left, "current": result.current, "channel": result.channel}
        output.data_json({**facts, "sequence": result.sequence})
        return
    output.data(
        f"returned from `{result.left}` to `{result.current}`; sequence {result.sequence} of the channel "
        f"`{result.channel}` is not installed again"
    )

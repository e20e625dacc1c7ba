"""`moec push`: put bundles on a store, and name them in a channel that devices follow."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click

from ...options.keys import passphrase_option, read_accepted_keys, read_signing_key, signing_key_option
from ...options.opening import bundle_folder
from ...options.paths import PATH, PLACE, file_option, json_option
from ...options.stores import opened_store
from ...terminal import output
from ...terminal.progress_bar import ProgressBar

_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_LONGEST = timedelta(days=3650)


def _time(ctx: click.Context, parameter: click.Parameter, text: str) -> timedelta:
    """Return a time like `12h`, `90d` or `8w`. Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", text)
    time = timedelta(0) if match is None else int(match[1]) * _UNITS[match[2]]
    if not timedelta(0) < time <= _LONGEST:
        raise click.BadParameter(f"{text!r} is no time, expected one like `12h`, `90d` or `8w`, at most 3650d")
    return time


def _version(ctx: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Return a version like `0.3` or `0.3.1`. Raises BadParameter."""
    if text is not None and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}", text):
        raise click.BadParameter(f"{text!r} is no version, expected one like `0.3.1`")
    return text


@click.command("push", short_help="Put bundles on a store for devices.")
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=PATH)
@click.argument("destination", metavar="DEST", type=PLACE)
@signing_key_option
@passphrase_option
@file_option("--accept-key", "accepted_files", multiple=True, help="Further public key of what is signed already.")
@click.option("--channel", metavar="NAME", default="stable", show_default=True, help="Channel that names the bundles.")
@click.option(
    "--expires",
    "lasting",
    metavar="TIME",
    callback=_time,
    default="90d",
    show_default=True,
    help="Time until devices refuse the channel, like `12h`, `90d` or `8w`.",
)
@click.option("--only", is_flag=True, help="Remove bundles for other devices from the channel.")
@click.option(
    "--minimum-moec",
    metavar="VERSION",
    callback=_version,
    help="Oldest moec that may install the bundles.  [default: by their format]",
)
@click.option(
    "--sequence",
    metavar="N",
    type=click.IntRange(1, 1 << 53),
    help="Number of the channel; devices never go back to a lower one.  [default: the next one]",
)
@click.option("--again", is_flag=True, help="Send all files, whatever the store has.")
@json_option
def push_command(
    bundles: tuple[Path, ...],
    destination: str,
    key_file: Path,
    passphrase_variable: str | None,
    accepted_files: tuple[Path, ...],
    channel: str,
    lasting: timedelta,
    only: bool,
    minimum_moec: str | None,
    sequence: int | None,
    again: bool,
    as_json: bool,
) -> None:
    """Put bundles of one model, one for each device, on the store DEST, and name them in a channel.

    DEST is the place of one model: a folder, http://HOST/PATH or https://HOST/PATH (PUT), s3://BUCKET/PREFIX,
    gs://BUCKET/PREFIX, hf://OWNER/NAME, or oci://HOST/REPOSITORY. Credentials are never part of it. They come from
    MOEC_STORE_TOKEN, netrc, docker's config.json, and what obstore and huggingface_hub read. SSL_CERT_FILE names other
    certificates than those of the system. HTTPS_PROXY, HTTP_PROXY and NO_PROXY are followed.

    Every byte is checked before the first one is sent. A bundle without BUNDLE.sig is signed. What the store has is not
    sent again, so an interrupted push continues when the command is repeated. A folder is read to compare it. Object
    storage, the hub and registries state digests. An HTTP server states sizes alone: --again repairs damage there.
    Devices see nothing before the channel is written, which is the last step.

    Bundles for other devices stay in the channel. Push again before the channel expires: devices refuse an expired one.

    \b
    moec push mixtral-pi mixtral-laptop /srv/fleet/mixtral --key fleet.pem
    moec push mixtral-pi s3://models/mixtral --channel beta --key fleet.pem --expires 30d
    """
    folders = [bundle_folder(path) for path in bundles]
    from moec.shipping.push_bundles import ChannelRequest, push_bundles

    accepted = read_accepted_keys(accepted_files, "--accept-key", others=1)
    key = read_signing_key(key_file, passphrase_variable)
    request = ChannelRequest(channel, lasting, minimum_moec, sequence, only)
    with (
        opened_store(destination, for_writing=True) as store,
        ProgressBar("verifying") as verifying,
        ProgressBar("pushing") as sending,
    ):
        now = datetime.now(timezone.utc)
        written, sent_bundles = push_bundles(folders, store, key, request, now, accepted, again, verifying, sending)
        address = store.address
    if as_json:
        names = ("channel", "model", "sequence", "expires", "minimum_moec")
        output.data_json({
            "address": address,
            **{name: getattr(written, name) for name in names},
            "devices": [entry.device for entry in written.bundles],
            "bundles": [
                {
                    "path": str(sent.bundle.path),
                    "device": sent.bundle.entry.device,
                    "manifest_sha256": sent.bundle.entry.manifest_sha256,
                    "files": len(sent.bundle.files),
                    "bytes": sent.bundle.entry.total_bytes,
                    "sent_files": sent.sent_files,
                    "sent_bytes": sent.sent_bytes,
                    "signed_now": sent.bundle.is_signed_now,
                }
                for sent in sent_bundles
            ],
        })  # fmt: skip
        return
    for sent in sent_bundles:
        entry = sent.bundle.entry
        output.data(
            f"`{sent.bundle.path}` for `{entry.device}`: {output.human_bytes(sent.sent_bytes)} of "
            f"{output.human_bytes(entry.total_bytes)} sent"
        )
    output.data(
        f"channel `{written.channel}` on `{address}`: sequence {written.sequence}, {len(written.bundles)} "
        f"device{'' if len(written.bundles) == 1 else 's'}, expires {written.expires}"
    )

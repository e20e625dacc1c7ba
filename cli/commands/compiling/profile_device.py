"""`moec profile-device`: measure this machine and write a device profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from moec.manifests.errors import OptionError, ProfileError
from moec.manifests.files.output_file import STDOUT, write_output

from ...options.paths import OUTPUT_FILE, PATH, json_option
from ...terminal import output


@click.command("profile-device", short_help="Measure this machine and write a device profile.")
@click.option("-o", "--output", "target", type=OUTPUT_FILE, help="TOML file.  [default: print it]")
@click.option("--name", default="this-device", show_default=True, help="Lower-case letters, digits and hyphens.")
@click.option(
    "--storage",
    type=PATH,
    default=Path(),
    help="A file of 8 MiB or more, or a folder, on the disk that will hold bundles.  [default: this folder]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_option
def profile_device_command(target: Path | None, name: str, storage: Path, overwrite: bool, as_json: bool) -> None:
    """Measure memory, storage, threads and instruction sets of this machine, in about two seconds.

    The file says how each number was measured. Edit the numbers if you have better ones. A GPU and a power draw are not
    measured; add them by hand.

    \b
    moec profile-device -o board.toml --storage /data      on the board
    moec compile mixtral --loss 2% --device board.toml     on the machine that compiles
    """
    from moec.profiles.loading import to_toml
    from moec.profiles.probe import MIN_SAMPLE_BYTES, probe_host

    if target is not None and target != STDOUT and target.is_file() and not overwrite:
        raise OptionError(f"`{target}` is there already", "add `--overwrite`, or name another file")
    # A device, a pipe or a small file has no disk to measure.
    if not storage.is_dir() and not (storage.is_file() and storage.stat().st_size >= MIN_SAMPLE_BYTES):
        fault = "does not exist" if not storage.exists() else "is neither a folder nor a file of 8 MiB or more"
        raise OptionError(f"`--storage {storage}` {fault}", "name a folder on the disk that will hold bundles")
    try:
        profile = replace(probe_host(storage), name=name, is_probed=False)
    except ValueError as error:
        raise ProfileError(str(error), "choose another `--name`") from error
    text = to_toml(profile)
    if target is not None:
        write_output(target, text.encode())
        output.say(f"wrote `{target}`: give it to `moec compile --device`")
    if as_json:
        output.data_json(profile.to_plain())
    elif target is None:
        output.data(text, end="")

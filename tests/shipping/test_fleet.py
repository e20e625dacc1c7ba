"""The examples for fleets: units that systemd accepts, scripts that run, options that the command line has."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.manifests.bundle import CARD_NAME, MANIFEST_NAME, FileEntry
from moec.manifests.codec import decode_manifest, encode_manifest

ROOT = Path(__file__).parents[2]
FLEET, BUNDLE = ROOT / "examples" / "fleet", ROOT / "examples" / "bundle"
SCRIPTS = ("moec-bundle", "start")
CALL = re.compile(r'"\$MOEC" ((?:\\\n|[^\n|;>])+)')
VARIABLE = re.compile(r"\$\{?(MOEC\w*)")
MOEC = Path(sys.executable).with_name("moec")


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words after the program of each call of moec."""
    for found in CALL.findall(text):
        words = shlex.split(found.replace("\\\n", " ").removesuffix("'"))
        if words != ["$@"]:
            yield [re.sub(r"\$\w+", "1", word) for word in words]


def settings(text: str) -> dict[str, str]:
    """Return the values that lines or words of NAME=VALUE set."""
    return dict(re.findall(r"\b(MOEC\w*)=(\S+)", text))


def run(command: list[object], **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    own = {**os.environ, **environment}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=own)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units() -> None:
    done = run(["systemd-analyze", "verify", FLEET / "moec-pull.service", FLEET / "moec-pull.timer"])
    assert done.returncode == 0 and "moec-pull" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_of_a_plain_shell_and_can_run(name: str) -> None:
    path = FLEET / name
    assert path.read_text().startswith("#!/bin/sh\n") and os.access(path, os.X_OK)
    for shell in ("sh", "dash", "bash"):
        if shutil.which(shell):
            done = run([shell, "-n", path])
            assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert "set -eu" in text and not re.search(r"\[\[|\blocal\b|\bfunction\b|<\(|==", text), "words of bash"


@pytest.mark.parametrize("name", [*SCRIPTS, "moec-pull.service"])
def test_all_options_exist_and_all_settings_are_given(name: str) -> None:
    text, count = (FLEET / name).read_text(), 0
    for command, *arguments in calls(text):
        found = cli.get_command(click.Context(cli), command)
        assert found is not None, command
        _, left, _ = found.make_parser(click.Context(found)).parse_args(list(arguments))  # raises UsageError
        assert left == []
        count += 1
    assert count >= 1
    source = "Dockerfile" if name == "start" else "fleet.env"
    given = settings((FLEET / source).read_text()).keys() | {"MOEC_FLEET_ENV"}
    given |= {"MOEC_SOURCE"} if name == "start" else set()  # the Dockerfile says that it has no default
    assert set(VARIABLE.findall(text)) <= given


def test_the_exit_codes_of_the_service_are_those_of_a_pull() -> None:
    """A pull is repeated if the store fails, or something is in the way, and only then."""
    from moec.cli.exit_codes import EXIT_ROLLED_BACK
    from moec.manifests.errors import ChecksumMismatch, DeviceRefused, DiskFull, InputError, StoreFailed, TryAgain

    text = (FLEET / "moec-pull.service").read_text()
    kept = {int(code) for code in re.findall(r"\d+", re.findall(r"RestartPreventExitStatus=(.*)", text)[0])}
    assert {each.exit_code for each in (ChecksumMismatch, DeviceRefused, InputError)} <= kept
    assert not kept & {each.exit_code for each in (StoreFailed, DiskFull, TryAgain)} and "Restart=on-failure" in text
    assert f"SuccessExitStatus={EXIT_ROLLED_BACK}\n" in text


def test_the_dockerfile_copies_what_is_there() -> None:
    text = (FLEET / "Dockerfile").read_text()
    known = {"FROM", "COPY", "RUN", "USER", "VOLUME", "ENV", "ENTRYPOINT", "CMD"}
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == known and lines[0].startswith("FROM ")
    sources = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    made_by_the_reader = {"dist/*.whl", "fleet.pub"}
    assert {name for name in sources if not (FLEET / name).exists()} == made_by_the_reader
    assert "https://" not in text


@pytest.fixture
def fleet(tmp_path: Path) -> dict[str, str]:
    """A store with one version of the example, its key, and the settings of a device."""
    call("keygen", tmp_path / "fleet.pem")
    push(tmp_path, BUNDLE)
    values = {
        "MOEC": MOEC, "MOEC_SOURCE": tmp_path / "store", "MOEC_FOLDER": tmp_path / "device",
        "MOEC_KEY": tmp_path / "fleet.pub", "MOEC_CHANNEL": "stable", "MOEC_DEVICE": "auto", "MOEC_MAX_RATE": "1GB",
    }  # fmt: skip
    names = settings((FLEET / "fleet.env").read_text())
    assert names.keys() == values.keys()
    (tmp_path / "fleet.env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return {"MOEC_FLEET_ENV": str(tmp_path / "fleet.env"), **{name: str(value) for name, value in values.items()}}


def push(folder: Path, bundle: Path) -> None:
    call("push", bundle, folder / "store", "--key", folder / "fleet.pem")


def call(*words: object) -> None:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, done.stderr


def next_version(folder: Path) -> Path:
    """Return a copy of the example with another card."""
    made = Path(shutil.copytree(BUNDLE, folder / "example-2"))
    (made / CARD_NAME).write_bytes(card := b"# the second version\n")
    manifest = decode_manifest((made / MANIFEST_NAME).read_bytes(), "test")
    entry = FileEntry(CARD_NAME, len(card), hashlib.sha256(card).hexdigest())
    files = tuple(entry if each.name == CARD_NAME else each for each in manifest.files)
    (made / MANIFEST_NAME).write_bytes(encode_manifest(replace(manifest, files=files)))
    return made


def module(fleet: dict[str, str], state: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call the update module as Mender does."""
    return run([FLEET / "moec-bundle", state, folder], **fleet)


def test_the_update_module_installs_commits_and_rolls_back(fleet: dict[str, str], tmp_path: Path) -> None:
    assert module(fleet, "SupportsRollback", tmp_path).stdout == "Yes\n"
    assert module(fleet, "NeedsArtifactReboot", tmp_path).stdout == "No\n"
    current = tmp_path / "device" / "current"
    for state in ("ArtifactInstall", "ArtifactCommit", "Cleanup"):
        done = module(fleet, state, tmp_path / "first")
        assert done.returncode == 0, done.stderr
    first = os.readlink(current)
    push(tmp_path, next_version(tmp_path))
    assert module(fleet, "ArtifactInstall", tmp_path / "second").returncode == 0
    assert os.readlink(current) != first and (current / CARD_NAME).read_text() == "# the second version\n"
    done = module(fleet, "ArtifactRollback", tmp_path / "second")
    assert done.returncode == 0 and os.readlink(current) == first, done.stderr
    for _ in range(2):  # Mender may repeat a state
        assert module(fleet, "ArtifactRollback", tmp_path / "second").returncode == 0
        assert os.readlink(current) == first
    again = module(fleet, "ArtifactInstall", tmp_path / "third")
    assert again.returncode == 6 and os.readlink(current) == first, "nothing was installed, so the deployment fails"


def test_a_failed_update_leaves_what_was_installed(fleet: dict[str, str], tmp_path: Path) -> None:
    current = tmp_path / "device" / "current"
    assert module(fleet, "ArtifactInstall", tmp_path / "first").returncode == 0
    first = os.readlink(current)
    (tmp_path / "store" / "channel" / "stable.json").write_text("{}")
    done = module(fleet, "ArtifactInstall", tmp_path / "second")
    assert done.returncode == 3 and os.readlink(current) == first
    assert module(fleet, "ArtifactRollback", tmp_path / "second").returncode == 0 and os.readlink(current) == first


def test_a_container_starts_with_its_bundle_if_the_store_fails(fleet: dict[str, str], tmp_path: Path) -> None:
    arguments = ["inspect", tmp_path / "device" / "current"]
    missing = run([FLEET / "start", *arguments], **{**fleet, "MOEC_SOURCE": str(tmp_path / "none")})
    assert missing.returncode != 0, "without a bundle it does not start"
    assert run([FLEET / "start", *arguments], **fleet).stdout.startswith("bundle")
    (tmp_path / "store").rename(tmp_path / "gone")
    again = run([FLEET / "start", *arguments], **fleet)
    assert again.returncode == 0 and again.stdout.startswith("bundle") and "error:" in again.stderr

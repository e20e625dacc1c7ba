"""`moec keygen`, `moec sign`, and `moec verify --key`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.shipping.signatures.model_signature import sign_bundle
from tests.runtime.tiny_bundle import write_bundle

from .conftest import Invoke

SCRIPT = str(Path(sys.executable).with_name("moec"))


@pytest.fixture(scope="module")
def made(mixed_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a signed bundle, the key that signed it, and another key."""
    folder = tmp_path_factory.mktemp("signed")
    shutil.copytree(mixed_bundle, folder / "tiny")
    for words in (
        f"keygen {folder}/fleet.pem",
        f"keygen {folder}/next.pem",
        f"sign {folder}/tiny --key {folder}/fleet.pem",
    ):
        assert CliRunner().invoke(cli, words.split()).exit_code == 0, words
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "signed"))


def test_keygen_tells_the_files(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("keygen", tmp_path / "fleet.pem")
    assert result.exit_code == 0 and result.stderr == ""
    assert f"`{tmp_path}/fleet.pem`" in result.stdout and f"`{tmp_path}/fleet.pub`" in result.stdout
    told = json.loads(invoke("keygen", tmp_path / "next.pem", "--json").stdout)
    assert told["public_key"] == str(tmp_path / "next.pub") and len(told["key_id"]) == 64


def test_a_signed_bundle_is_verified(invoke: Invoke, folder: Path) -> None:
    assert sorted(os.listdir(folder)) == ["fleet.pem", "fleet.pub", "next.pem", "next.pub", "tiny", "tiny.sig"]
    result = invoke("verify", folder / "tiny", "--key", folder / "fleet.pub")
    assert result.exit_code == 0 and ", signed by the key " in result.stdout
    told = json.loads(invoke("verify", folder / "tiny", "--key", folder / "fleet.pub", "--json").stdout)
    assert told["ok"] is True and told["key_id"][:12] in result.stdout
    assert "key_id" not in json.loads(invoke("verify", folder / "tiny", "--json").stdout)


def test_signing_again_replaces_the_signature(invoke: Invoke, folder: Path) -> None:
    before = (folder / "tiny.sig").read_bytes()
    assert invoke("sign", folder / "tiny", "--key", folder / "fleet.pem").exit_code == 0
    assert (folder / "tiny.sig").read_bytes() == before
    told = json.loads(invoke("sign", folder / "tiny", "--key", folder / "next.pem", "--json").stdout)
    assert told["files"] == len(os.listdir(folder / "tiny")) and told["checked"] is False
    assert (folder / "tiny.sig").read_bytes() != before
    assert invoke("verify", folder / "tiny", "--key", folder / "next.pub").exit_code == 0
    assert invoke("verify", folder / "tiny", "--key", folder / "fleet.pub").exit_code == 3


@pytest.mark.gate("G14")
def test_another_key_is_refused_before_a_file_is_hashed(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a file was hashed")

    monkeypatch.setattr("moec.runtime.bundle.open_bundle.verify_bundle", fail)
    result = invoke("verify", folder / "tiny", "--key", folder / "next.pub")
    assert (result.exit_code, result.stdout) == (3, "") and "is signed by none of the accepted keys" in result.stderr


@pytest.mark.gate("G14")
def test_an_unsigned_bundle_is_refused(invoke: Invoke, folder: Path) -> None:
    (folder / "tiny.sig").unlink()
    result = invoke("verify", folder / "tiny", "--key", folder / "fleet.pub")
    assert (result.exit_code, result.stdout) == (3, "") and "tiny.sig` is missing" in result.stderr
    assert invoke("verify", folder / "tiny").exit_code == 0


def test_a_signature_at_another_place(invoke: Invoke, folder: Path) -> None:
    (folder / "tiny.sig").rename(folder / "elsewhere")
    words = ("verify", folder / "tiny", "--signature", folder / "elsewhere")
    assert invoke(*words, "--key", folder / "fleet.pub").exit_code == 0
    result = invoke(*words)
    assert result.exit_code == 1 and "`--signature` has no effect without an accepted key" in result.stderr


def test_a_damaged_bundle_is_signed_only_without_a_check(invoke: Invoke, folder: Path) -> None:
    path = folder / "tiny" / "experts-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    (folder / "tiny.sig").unlink()
    sign = ("sign", folder / "tiny", "--key", folder / "fleet.pem")
    result = invoke(*sign, "--check")
    assert result.exit_code == 3 and path.name in result.stderr and not (folder / "tiny.sig").exists()
    assert invoke(*sign).exit_code == 0
    result = invoke("verify", folder / "tiny", "--key", folder / "fleet.pub")
    assert result.exit_code == 3 and path.name in result.stderr


def test_what_is_not_signed(invoke: Invoke, folder: Path) -> None:
    sign = ("--key", folder / "fleet.pem")
    assert invoke("sign", folder / "nowhere", *sign).exit_code == 1
    write_bundle(folder / "partial", certified=False)
    assert invoke("sign", folder / "partial", *sign).exit_code == 3
    (folder / "tiny" / "more").write_bytes(b"")
    result = invoke("sign", folder / "tiny", *sign)
    assert result.exit_code == 3 and "more" in result.stderr
    assert not (folder / "partial.sig").exists()


def test_too_many_keys(invoke: Invoke, folder: Path) -> None:
    result = invoke("verify", folder / "tiny", *(["--key", folder / "fleet.pub"] * 9))
    assert result.exit_code == 1 and "at most 8 keys are accepted" in result.stderr


def test_a_passphrase_in_the_environment(invoke: Invoke, folder: Path) -> None:
    named = ("--passphrase-env", "FLEET_PASSPHRASE")
    assert invoke("keygen", folder / "safe.pem", *named, FLEET_PASSPHRASE="correct horse").exit_code == 0
    assert b"ENCRYPTED" in (folder / "safe.pem").read_bytes()
    sign = ("sign", folder / "tiny", "--key", folder / "safe.pem")
    assert invoke(*sign, *named, FLEET_PASSPHRASE="correct horse").exit_code == 0
    assert invoke("verify", folder / "tiny", "--key", folder / "safe.pub").exit_code == 0
    for variables, message in (
        ({"FLEET_PASSPHRASE": "wrong"}, "cannot be read with this passphrase"),
        ({"FLEET_PASSPHRASE": ""}, "the passphrase has 0 bytes"),
        ({"FLEET_PASSPHRASE": None}, "which is not set"),
    ):
        result = invoke(*sign, *named, **variables)
        assert result.exit_code == 1 and message in result.stderr
    result = invoke(*sign)
    assert result.exit_code == 1 and "standard input is no terminal" in result.stderr


def test_two_sources_of_a_passphrase(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("keygen", tmp_path / "a.pem", "--passphrase", "--passphrase-env", "X")
    assert result.exit_code == 1 and os.listdir(tmp_path) == []


def on_terminal(typed: list[str], *words: object) -> tuple[int, str]:
    """Run a command on a terminal, type a text at each question, and return exit code and output."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [SCRIPT, *map(str, words)], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    shown = ""
    try:
        while part := os.read(master, 4096):
            shown += part.decode()
            if typed and shown.endswith(": "):
                os.write(master, f"{typed.pop(0)}\n".encode())
    except OSError:  # the terminal has no more users
        pass
    os.close(master)
    return process.wait(), shown


def test_a_passphrase_is_asked_for_on_a_terminal(invoke: Invoke, folder: Path) -> None:
    code, shown = on_terminal(["horse", "horse"], "keygen", folder / "safe.pem", "--passphrase")
    assert code == 0 and "Passphrase of" in shown and "horse" not in shown, shown
    code, shown = on_terminal(["horse"], "sign", folder / "tiny", "--key", folder / "safe.pem")
    assert code == 0, shown
    assert invoke("verify", folder / "tiny", "--key", folder / "safe.pub").exit_code == 0


def without_cryptography(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command where `cryptography` cannot be imported."""
    package = folder / "packages" / "cryptography"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('no cryptography', name='cryptography')\n")
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, env=environment)


def test_devices_verify_without_cryptography(folder: Path) -> None:
    done = without_cryptography(folder, "verify", folder / "tiny", "--key", folder / "fleet.pub")
    assert done.returncode == 0, done.stderr


def test_the_missing_package_of_signing_is_named(folder: Path) -> None:
    for words in (("sign", folder / "tiny", "--key", folder / "fleet.pem"), ("keygen", folder / "another.pem")):
        done = without_cryptography(folder, *words)
        assert done.returncode == 1 and 'pip install "moec[ship]"' in done.stderr
    assert not (folder / "another.pem").exists()


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the bundle was signed")

    monkeypatch.setattr(sign_bundle.__module__ + ".sign_bundle", fail)
    (folder / "tiny.sig").unlink()
    (folder / "tiny.sig").mkdir()
    result = invoke("sign", folder / "tiny", "--key", folder / "fleet.pem")
    assert result.exit_code == 1 and "is a folder, expected a regular file" in result.stderr

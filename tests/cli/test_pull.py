"""`moec pull`, `moec rollback` and `moec installed` with the shipped example bundle, whose self-test runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from moec.cli.bundle_check import check_bundle, run_check
from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.errors import ChecksumMismatch, ExecutionError, MemoryBudgetExceeded
from moec.manifests.self_test import SELF_TEST_NAME
from moec.profiles.probe import resident_set_bytes
from moec.shipping.installed.places import Places, locked
from moec.shipping.pull import pull as pulling
from moec.shipping.pull.pull import PullRequest
from tests.gates.damage import seal_files
from tests.shipping.devices import Device
from tests.shipping.model_bundles import (
    channel_of,
    described,
    digests,
    put_bundle,
    put_channel,
    sha256_of,
    write_bundle,
)
from tests.shipping.signing_keys import signing_key

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"
KEY = signing_key()


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device, and a store with the example bundle."""
    device = Device(tmp_path / "device", tmp_path / "store")
    put(device, Path(shutil.copytree(EXAMPLE, tmp_path / "example")), 1)
    device.write_key(tmp_path)
    return device


def put(device: Device, bundle: Path, sequence: int, channel: str = "stable", **values: Any) -> None:
    put_bundle(device.store, bundle, KEY)
    model = json.loads((bundle / MANIFEST_NAME).read_text())["name"]
    now = datetime.now(timezone.utc)
    told = channel_of([described(bundle, **values)], sequence, model=model, channel=channel, created=now)
    put_channel(device.store, told, KEY)


def with_note(device: Device, note: str, **fields: Any) -> Path:
    """Another version of the example: a file, or a field of its self-test, is another."""
    folder = Path(shutil.copytree(EXAMPLE, device.store.parent / note))
    (folder / "README.md").write_text(note)
    if fields:
        told = json.loads((folder / SELF_TEST_NAME).read_text()) | fields
        (folder / SELF_TEST_NAME).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    seal_files(folder)
    return folder


def arguments(device: Device) -> list[object]:
    return [device.store, device.folder, "--key", device.store.parent / "fleet.pub"]


def test_pull_update_and_rollback(invoke: Invoke, device: Device) -> None:
    first = invoke("pull", *arguments(device))
    assert first.exit_code == 0, first.stderr
    assert (
        first.stdout == f"installed `{sha256_of(EXAMPLE)[:16]}`: {device.folder / sha256_of(EXAMPLE)[:16]} is current\n"
    )
    assert "self-test: the logits of" in first.stderr and "are those of the compile" in first.stderr
    assert digests(device.folder / "current") == digests(EXAMPLE)
    assert "installed already, with sequence 1" in invoke("pull", *arguments(device)).stdout

    second = with_note(device, "second")
    put(device, second, 2)
    planned = invoke("pull", *arguments(device), "--plan-only")
    assert "would be installed; nothing was changed" in planned.stdout and "in unchanged files" in planned.stderr
    assert digests(device.folder / "current") == digests(EXAMPLE)
    assert invoke("pull", *arguments(device)).exit_code == 0
    assert digests(device.folder / "current") == digests(second)

    listed = invoke("installed", device.folder).stdout.splitlines()
    assert listed[0] == "model" and "current" in listed[3] and "previous" in listed[4] and "unchanged" in listed[4]
    back = invoke("rollback", device.folder)
    assert back.exit_code == 0 and "sequence 2 of the channel `stable` is not installed again" in back.stdout
    assert digests(device.folder / "current") == digests(EXAMPLE)
    again = invoke("pull", *arguments(device))
    assert again.exit_code == 6 and "sequence 2 was rolled back" in again.stdout
    assert invoke("rollback", device.folder).exit_code == 1


def test_json(invoke: Invoke, device: Device) -> None:
    told = invoke("pull", *arguments(device), "--json")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    events = [line["event"] for line in lines]
    assert (
        events[:2] == ["chosen", "planned"]
        and events[-2:] == ["testing", "ended"]
        and set(events[2:-2]) == {"progress"}
    )
    chosen, planned, ended = lines[0], lines[1], lines[-1]
    name = sha256_of(EXAMPLE)[:16]
    assert (chosen["sequence"], chosen["device"], chosen["bundle"]) == (1, "host", name)
    assert planned["fetched_bytes"] == planned["total_bytes"] and planned["kept_bytes"] == 0
    assert (ended["outcome"], ended["bundle"], ended["path"]) == ("installed", name, str(device.folder / name))
    assert lines[-3]["done_bytes"] == lines[-3]["total_bytes"] == planned["total_bytes"]
    put(device, with_note(device, "second"), 2)
    invoke("pull", *arguments(device))
    listed = json.loads(invoke("installed", device.folder, "--json").stdout)
    assert [bundle["current"] for bundle in listed["bundles"]] == [True, False]
    assert listed["channels"] == {"stable": {"highest_sequence": 2, "rolled_back_sequence": 0}}
    back = json.loads(invoke("rollback", device.folder, "--json").stdout)
    assert (back["current"], back["channel"], back["sequence"]) == (name, "stable", 2)


def test_failures_as_json(invoke: Invoke, device: Device) -> None:
    source, folder, *key = arguments(device)
    assert invoke("pull", source, folder).exit_code == 2, "a key is required"
    for words, kind, code in (
        ([source, folder, *key, "--channel", "none"], "StoreFailed", 5),
        ([source, folder, *key, "--device", "toaster"], "DeviceRefused", 4),
        ([source, folder, *key, "--memory", "much"], "OptionError", 1),
        ([source, folder, "--key", source], "InputError", 1),
    ):
        told = invoke("pull", *words, "--json")
        failed = json.loads(told.stdout.splitlines()[-1])
        assert (failed["event"], failed["kind"], failed["exit_code"]) == ("failed", kind, code)
        assert told.exit_code == code and f"error: {failed['message']}" in told.stderr and failed["hint"]


def test_what_may_succeed_later(
    invoke: Invoke, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("pull", *arguments(device))
    put(device, with_note(device, "second"), 2)
    with locked(Places(device.folder)):
        for told in (invoke("pull", *arguments(device)), invoke("rollback", device.folder)):
            assert told.exit_code == 75 and "works in" in told.stderr
    free = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: free._replace(free=9))
        assert invoke("pull", *arguments(device)).exit_code == 75
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        assert invoke("pull", *arguments(device)).exit_code == 75
    assert digests(device.folder / "current") == digests(EXAMPLE)
    assert invoke("pull", *arguments(device)).exit_code == 0


def test_channel_device_and_memory(invoke: Invoke, device: Device) -> None:
    put(device, with_note(device, "hungry"), 1, "beta", memory_floor_bytes=3 << 30)
    refused = invoke("pull", *arguments(device), "--channel", "beta", "--device", "host", "--memory", "2GiB")
    assert refused.exit_code == 4 and "it needs 3072MiB of memory, 2GiB are there" in refused.stderr
    assert "hint: give a larger --memory\n" in refused.stderr
    assert not device.folder.exists()
    refused = invoke("pull", *arguments(device), "--device", "toaster")
    assert refused.exit_code == 4 and "- host" in refused.stderr and "hint: name one of them" in refused.stderr
    small = invoke("pull", *arguments(device), "--memory", "1MiB", "--device", "host")
    assert small.exit_code == 1 and "memory" in small.stderr, "the self-test does not fit, so nothing is switched to"
    assert not os.path.lexists(device.folder / "current")
    kept = invoke("pull", *arguments(device), "--memory", "2GiB", "--device", "host")
    assert kept.exit_code == 0 and digests(device.folder / "current") == digests(EXAMPLE)


def test_a_rate_and_bundles_to_keep(invoke: Invoke, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PullRequest] = []

    def noted(store: object, keys: object, request: PullRequest, *rest: object) -> None:
        asked.append(request)
        raise ExecutionError("noted")

    monkeypatch.setattr(pulling, "pull", noted)
    invoke("pull", *arguments(device), "--max-rate", "2MB", "--keep", "3")
    assert asked[0].fetch.most_bytes_per_s == 2_000_000 and asked[0].keep == 3
    assert invoke("pull", *arguments(device), "--max-rate", "0").exit_code == 1
    assert invoke("pull", *arguments(device), "--max-rate", "fast").exit_code == 1
    assert invoke("pull", *arguments(device), "--keep", "-1").exit_code == 2
    assert len(asked) == 1


def test_what_the_self_test_finds(device: Device, tmp_path: Path) -> None:
    taken = resident_set_bytes()  # the tests before have left this to the process
    assert "self-test: the logits of" in run_check(EXAMPLE, str(taken + (1 << 30)))
    assert "it has no self-test" in run_check(write_bundle(tmp_path / "plain"), None)
    later = with_note(device, "later", arithmetic=77)
    assert "was left out: the self-test is for arithmetic 77" in run_check(later, None)
    with pytest.raises(MemoryBudgetExceeded):
        run_check(EXAMPLE, "1MiB")
    wrong = with_note(device, "wrong", logits_sha256="0" * 64)
    with pytest.raises(ChecksumMismatch, match="the logits of the self-test have the digest"):
        run_check(wrong, None)
    with pytest.raises(ChecksumMismatch, match="the logits of the self-test have the digest") as told:
        check_bundle(wrong)
    assert told.value.hint is not None and told.value.exit_code == 3


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho no memory >&2\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(ExecutionError, match="ended with signal 9: no memory"):
        check_bundle(EXAMPLE)
    dying.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(ExecutionError, match="ended with exit code 7"):
        check_bundle(EXAMPLE)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ExecutionError, match="needs a Python interpreter"):
        check_bundle(EXAMPLE)

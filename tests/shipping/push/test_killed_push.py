"""A push that is killed at any moment leaves a store that devices can use, and the next push completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moec.shipping.channel import channel_path, verify_channel
from moec.shipping.signatures.keys import make_key_pair, read_public_key
from tests.shipping.devices import Device
from tests.shipping.model_bundles import Shape, digests, write_bundle

KILLS = 100 if os.environ.get("MOEC_FULL_GATES") else 3
SHAPE = Shape(layers=6, experts=8, hidden=256, width=512, vocabulary=1024)


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "moec.cli.main", "push", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.gate("G13")
def test_a_killed_push_leaves_a_usable_store(tmp_path: Path) -> None:
    bundles = [write_bundle(tmp_path / f"v{at}", SHAPE, lambda layer, expert, at=at: at) for at in range(2)]
    make_key_pair(tmp_path / "fleet.pem")
    key, store = read_public_key(tmp_path / "fleet.pub"), tmp_path / "store"
    started = time.monotonic()
    assert start(bundles[0], store, "--key", tmp_path / "fleet.pem").wait() == 0
    usual_s = time.monotonic() - started
    draw, killed = random.Random(KILLS), 0
    for kill in range(KILLS):
        process = start(bundles[1], store, "--key", tmp_path / "fleet.pem")
        time.sleep(draw.uniform(0.3, 1.0) * usual_s)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        channel = verify_channel((store / channel_path("stable")).read_bytes(), [key], "stable")
        device = Device(tmp_path / f"device{kill}", store, [key])
        device.pull()
        assert device.current == digests(bundles[0 if channel.sequence == 1 else 1])
    assert start(bundles[1], store, "--key", tmp_path / "fleet.pem").wait() == 0
    device = Device(tmp_path / "device", store, [key])
    device.pull()
    assert device.current == digests(bundles[1])
    assert not [path for path in store.rglob("*") if path.suffix in (".partial", ".writing")]
    assert killed or KILLS < 10

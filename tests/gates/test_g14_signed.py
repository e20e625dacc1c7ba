"""G14: only what was signed is installed. Altered, mixed, old and unsigned bundles are refused before a switch.

CI flips 100 bytes; MOEC_FULL_GATES=1 flips 2,000. Replays, expired channels, removed keys and mixes of two bundles are
in tests/shipping/pull/test_pull.py, single signatures in tests/shipping/signatures/.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from moec.manifests.errors import BundleError
from moec.shipping.channel import channel_path, signature_path
from tests.gates.damage import flip
from tests.shipping.devices import Device
from tests.shipping.model_bundles import (
    Shape,
    channel_of,
    described,
    digests,
    push,
    put_bundle,
    put_channel,
    sha256_of,
    write_bundle,
)
from tests.shipping.signing_keys import signing_key

pytestmark = pytest.mark.gate("G14")
FLIPS = 2000 if os.environ.get("MOEC_FULL_GATES") == "1" else 100
KEY = signing_key()
SMALL = Shape(layers=1, experts=2, hidden=32, width=32)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("versions")
    return [write_bundle(root / f"v{at}", SMALL, lambda layer, expert, at=at: at, at, note=str(at)) for at in (0, 1)]


@pytest.fixture
def device(tmp_path: Path, versions: list[Path]) -> Device:
    """A device with the first version, and a store with the second, whose files may be changed."""
    device = Device(tmp_path / "device", tmp_path / "store", check=lambda folder: None)
    push(device.store, versions[0], KEY, 1)
    device.pull()
    copied = write_bundle(tmp_path / "copied", SMALL, lambda layer, expert: 1, 1, note="1")
    push(device.store, copied, KEY, 2)
    return device


def test_every_flipped_byte_is_refused(device: Device, versions: list[Path]) -> None:
    draw, digest = random.Random(14), sha256_of(versions[1])
    old = digests(versions[0])
    changed = [device.store / digest / name for name, found in digests(versions[1]).items() if found != old[name]]
    assert len(changed) == 4, "files that a pull reads: experts, dense weights, a note and moec.json"
    kinds = [sorted(changed), [device.store / signature_path(digest)], [device.store / channel_path("stable")]]
    for at in range(FLIPS):
        path = draw.choice(kinds[at % len(kinds)])
        place, mask = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        flip(path, place, mask)
        with pytest.raises(BundleError) as told:
            device.pull()
        assert told.value.exit_code == 3, (path, place, mask)
        assert digests(device.folder / "current") == old
        flip(path, place, mask)
        # What an earlier pull has fetched and noted is not fetched again.
        shutil.rmtree(device.folder / f"{digest[:16]}.partial", ignore_errors=True)
    assert device.pull().outcome == "installed"
    assert device.current == digests(versions[1])


def test_exit_codes_of_the_command(device: Device, versions: list[Path], tmp_path: Path) -> None:
    key, other = device.write_key(tmp_path), tmp_path / "other.pub"
    Device(tmp_path / "x", device.store, [signing_key("other").public]).write_key(tmp_path / "keys")
    (tmp_path / "keys" / "fleet.pub").rename(other)
    now = datetime.now(timezone.utc)

    def pulled(*words: str, accepted: Path = key) -> tuple[int, str]:
        command = [sys.executable, "-m", "moec.cli.main", "pull", str(device.store), str(device.folder)]
        done = subprocess.run([*command, "--key", str(accepted), *words], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, text = pulled(accepted=other)
    assert code == 3 and "is signed by none of the accepted keys" in text
    code, text = pulled("--device", "toaster")
    assert code == 4 and "- host" in text
    code, text = pulled("--channel", "beta")
    assert code == 5 and "has no channel `beta`" in text
    put_channel(device.store, channel_of([described(versions[1])], 9, created=now - timedelta(days=99)), KEY)
    code, text = pulled()
    assert code == 3 and "expired at" in text
    assert device.current == digests(versions[0])
    put_bundle(device.store, versions[1], KEY)
    put_channel(device.store, channel_of([described(versions[1])], 9, created=now), KEY)
    assert pulled()[0] == 0 and pulled()[0] == 0
    assert device.current == digests(versions[1])

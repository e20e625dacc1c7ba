"""Two pushes and two pulls over every kind of store."""

from __future__ import annotations

from pathlib import Path

from moec.shipping.push_bundles import ChannelRequest, push_bundles
from tests.shipping.devices import Device
from tests.shipping.model_bundles import NOW, digests, write_bundle
from tests.shipping.signing_keys import signing_key
from tests.shipping.store.conftest import Place


def test_what_is_pushed_is_pulled(place: Place, tmp_path: Path) -> None:
    bundles = [write_bundle(tmp_path / f"v{at}", version=lambda layer, expert, at=at: at * layer) for at in range(2)]
    device = Device(tmp_path / "device", tmp_path)
    for sequence, bundle in enumerate(bundles, 1):
        store = place.open()
        pushed = push_bundles([bundle], store, signing_key(), ChannelRequest(), NOW)
        store.close()
        assert pushed.channel.sequence == sequence
        store = place.open(for_writing=False)
        device.pull(store)
        store.close()
        assert device.current == digests(bundle)
    (plan,) = device.events.plans
    assert 0 < plan.fetched_bytes < plan.total_bytes / 2, "a delta"
    if place.kind != "hub":
        assert pushed.bundles[0].sent_files == 2, "the changed file and the manifest"

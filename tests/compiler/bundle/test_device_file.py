"""`device.json` in a bundle for a named device, and no such file in one for the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moec.compiler.bundle.emit import BundleContent, emit
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.bundle import DEVICE_NAME, MANIFEST_NAME
from moec.manifests.quant import QuantSpec
from moec.profiles.device_json import decode_device
from moec.profiles.loading import load_profile
from tests.tiny_models import NO_DEVICE, TinyMixtral, save_tiny_mixtral


def test_a_bundle_for_a_named_device_has_one_file_more(tmp_path: Path) -> None:
    """All other files are the same, and equal profiles give equal bytes."""
    lowering = lower(open_checkpoint(str(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(layers=1)))))
    plan = uniform_plan(lowering.model, QuantSpec(4, 32), QuantSpec(8, 32), lowering.float_type)
    content, profile = BundleContent(plan, NO_DEVICE), load_profile("jetson-tx2-hdd")
    written, listed = list[dict[str, bytes]](), list[set[str]]()
    for name, each in (("host", None), ("one", profile), ("two", replace(profile))):
        partial = tmp_path / f"{name}.partial"
        listed.append({entry.name for entry in emit(lowering, replace(content, profile=each), partial).files})
        written.append({file.name: file.read_bytes() for file in partial.iterdir()})
    host, one, two = written
    assert one == two and listed[1] == listed[0] | {DEVICE_NAME}
    assert decode_device(one[DEVICE_NAME], DEVICE_NAME) == profile
    for contents in (host, one):
        del contents[MANIFEST_NAME]
    del one[DEVICE_NAME]
    assert one == host

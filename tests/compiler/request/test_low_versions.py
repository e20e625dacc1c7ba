"""Low versions of experts: planned, written, checked, refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.quantization.packing import unpack
from moec.compiler.request.plan import with_low_versions
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import ChecksumMismatch, ManifestInvalid, PlanError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from tests.compiler.lowered import lowered
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

LOW = QuantSpec.parse("q2g32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("low") / "model"
    return save_tiny_mixtral(folder, TinyMixtral(layers=2, experts=4, top_k=2, seed=3))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return emit_bundle(checkpoint, checkpoint.parent / "bundle", bitwidth=8, low="q2g32")


def test_a_low_version_is_the_weight_in_fewer_bits(checkpoint: Path, bundle: Path) -> None:
    opened, lowering = open_bundle(bundle), lowered(checkpoint)
    manifest = opened.manifest
    assert [entry.key for entry in manifest.low_experts] == [entry.key for entry in manifest.experts]
    entry = manifest.low_experts[5]
    tensor = opened.headers[entry.file][f"experts.{entry.expert:05d}"]
    rows, columns = manifest.model.unit_shape(entry.layer, "gate")
    packed = opened.read_tensor_bytes(entry.file, tensor)[: LOW.packed_bytes(rows, columns)]
    found = unpack(packed, rows, columns, LOW).dequantize().numpy()
    wanted = lowering.unit(UnitKey(entry.layer, entry.expert, "gate")).float().numpy()
    error = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    assert 0.05 < error < 0.6, "two bits (.41 measured), and of this expert: another gives 1.4"


def test_verify_looks_at_low_versions(bundle: Path, tmp_path: Path) -> None:
    verify_bundle(open_bundle(bundle))
    own = Path(shutil.copytree(bundle, tmp_path / "own"))
    entry = open_bundle(own).manifest.low_experts[3]
    data = bytearray((own / entry.file).read_bytes())
    data[entry.offset_bytes + 5] ^= 1
    (own / entry.file).write_bytes(bytes(data))
    with pytest.raises(ChecksumMismatch, match=f"{entry.file}`, expert {entry.expert}"):
        verify_bundle(open_bundle(own))


def test_experts_that_are_small_already_have_none(checkpoint: Path) -> None:
    lowering = lowered(checkpoint)
    plan = uniform_plan(lowering.model, QuantSpec(8, 32), lowering.spec_16bit, lowering.float_type)
    small = {unit: LOW if unit.expert == 1 else spec for unit, spec in plan.units.items()}
    mixed = with_low_versions(dataclasses.replace(plan, units=small), LOW)
    assert [key.expert for key in mixed.low_experts] == [0, 2, 3] * 2
    with pytest.raises(PlanError, match="no expert is larger"):
        with_low_versions(dataclasses.replace(plan, units=dict.fromkeys(plan.units, LOW)), LOW)


def test_a_bundle_without_them_says_nothing_of_them(checkpoint: Path, tmp_path: Path) -> None:
    """Older bundles keep their bytes."""
    folder = emit_bundle(checkpoint, tmp_path / "plain", bitwidth=8)
    assert "low_experts" not in json.loads((folder / "moec.json").read_text())


@pytest.mark.parametrize("wrong", ["twice", "not smaller", "file", "unknown"])
def test_entries_that_contradict_are_refused(bundle: Path, wrong: str) -> None:
    manifest = open_bundle(bundle).manifest
    low = list(manifest.low_experts)
    if wrong == "twice":
        low.insert(1, low[0])
    elif wrong == "not smaller":
        low[0] = dataclasses.replace(manifest.experts[0], file=low[0].file)
    elif wrong == "file":
        low[0] = dataclasses.replace(low[0], file=manifest.experts[0].file)
    else:
        low[-1] = dataclasses.replace(low[-1], expert=4)
    plain = json.loads(encode_manifest(manifest))
    with pytest.raises(ValueError, match="low_experts"):
        dataclasses.replace(manifest, low_experts=tuple(low))
    plain["low_experts"] = []
    with pytest.raises((ManifestInvalid, ChecksumMismatch)):
        decode_manifest(json.dumps(plain).encode(), "moec.json")

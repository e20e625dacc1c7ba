"""Emit: equal plans give equal bytes, and a bundle holds exactly the plan or does not exist."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moec.compiler.bundle.emit import BundleContent, cost_summary, emit, finish
from moec.compiler.calibration.tables import Tables, encode_tables
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.families import Lowering
from moec.compiler.quantization.packing import pack
from moec.compiler.quantization.quantizers.rtn import quantize_rtn, rounded_rows
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.uniform import uniform_plan
from moec.compiler.workspace.durable import Disk
from moec.manifests.bundle import (
    DEVICE_NAME,
    MANIFEST_NAME,
    BundleManifest,
    experts_file_name,
    unit_offsets,
)
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import CheckpointError, DiskFull, MoecError, OptionError
from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec
from moec.manifests.safetensors_header import read_header
from moec.profiles.device_json import decode_device
from moec.profiles.loading import load_profile
from moec.runtime.kernels import packed_matrix
from tests.compiler.lowered import lowered
from tests.tiny_models import NO_DEVICE

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [QuantSpec.parse(text) for text in ("q2g32", "q3", "q4g32", "q8", "bf16", "q4s", "q2g32s")]


def _mixed_plan(model: ModelSpec) -> CompilePlan:
    """Return a plan with another format for nearly every unit, and three formats for dense weights."""
    uniform = uniform_plan(model, QuantSpec(4, 32), QuantSpec(8, 32), "bfloat16")
    units = {key: SPECS[index % len(SPECS)] for index, key in enumerate(uniform.units)}
    dense = dict(uniform.dense) | {"layers.0.query": QuantSpec(4, 32), "embedding": QuantSpec(3)}
    return CompilePlan(model, units, dense, "rtn")


def _emit(lowering: Lowering, partial: Path, plan: CompilePlan | None = None, **options: Any) -> BundleManifest:
    return emit(lowering, BundleContent(plan or _mixed_plan(lowering.model), NO_DEVICE), partial, **options)


def _contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_every_unit_is_what_the_quantizer_gave(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    plan, partial = _mixed_plan(lowering.model), tmp_path / "out.partial"
    manifest = _emit(lowering, partial, plan)
    for entry in manifest.experts:
        raw = (partial / entry.file).read_bytes()[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        assert xxhash.xxh3_128_hexdigest(raw) == entry.xxh3
        specs = {projection: entry.spec(projection) for projection in PROJECTIONS}
        assert specs == plan.expert_specs(entry.key)
        offsets, _ = unit_offsets(plan.model, entry.layer, specs)
        covered = np.zeros(len(raw), bool)
        for projection in PROJECTIONS:
            shape, spec = plan.model.unit_shape(entry.layer, projection), specs[projection]
            place = slice(offsets[projection], offsets[projection] + spec.packed_bytes(*shape))
            covered[place] = True
            weight = lowering.unit(UnitKey(*entry.key, projection)).float()
            expected = weight if spec.bitwidth == 16 else quantize_rtn(weight, spec).dequantize()
            stored = np.frombuffer(raw, np.uint8)[place]
            np.testing.assert_array_equal(packed_matrix.unpack(stored, *shape, spec)[: shape[0]], expected.numpy())
        assert not np.frombuffer(raw, np.uint8)[~covered].any(), "padding is zero"


def test_threads_pack_side_by_side_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, both = set[str](), threading.Barrier(2)

    def offsets(*arguments: Any) -> tuple[dict[str, int], int]:
        seen.add(threading.current_thread().name)
        with suppress(threading.BrokenBarrierError):
            both.wait(120)  # experts are tiny, so one thread could do all of them before a second one begins
        both.abort()
        return unit_offsets(*arguments)

    _emit(lowered(folder), tmp_path / "one.partial")
    monkeypatch.setattr("moec.compiler.bundle.emit.unit_offsets", offsets)  # called first for each expert
    torch.set_num_threads(3)
    try:
        _emit(lowered(folder), tmp_path / "three.partial")
    finally:
        torch.set_num_threads(1)
    assert len(seen) > 1 and _contents(tmp_path / "one.partial") == _contents(tmp_path / "three.partial")


def test_every_dense_weight_is_there(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    manifest, arrays = _emit(lowering, tmp_path / "out.partial"), load_file(tmp_path / "out.partial/dense.safetensors")
    assert list(arrays) and set(arrays) == {entry.name for entry in manifest.dense}
    for entry in manifest.dense:
        weight, stored = lowering.dense_weight(entry.name), arrays[entry.name]
        if len(entry.shape) == 1 or entry.name.endswith(".router"):
            assert entry.spec == lowering.spec_16bit
        if len(entry.shape) == 1:
            assert stored.dtype == weight.dtype and torch.equal(stored, weight)
            continue
        expected = weight.float()
        if entry.spec.bitwidth != 16:
            expected = quantize_rtn(expected, entry.spec, clip_search=True).dequantize()
        values = packed_matrix.unpack(stored.numpy(), *entry.shape, entry.spec)[: entry.shape[0]]
        np.testing.assert_array_equal(values, expected.numpy())


def test_files_are_aligned_and_accounted_for(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    manifest = _emit(lowered(folder), partial)
    on_disk = _contents(partial)
    assert set(on_disk) == {entry.name for entry in manifest.files} | {MANIFEST_NAME}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert on_disk[name] == (folder / name).read_bytes(), name
    for entry in manifest.files:
        data = on_disk[entry.name]
        assert (entry.size_bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    for name in on_disk:
        if name.endswith(".safetensors"):
            first = min(read_header(partial / name).values(), key=lambda tensor: tensor.offset_bytes)
            assert first.offset_bytes % 4096 == 0
    for layer in range(2):
        for tensor in read_header(partial / experts_file_name(layer)).values():
            assert tensor.dtype == "U8" and tensor.offset_bytes % 4096 == 0 and tensor.size_bytes % 4096 == 0
    assert decode_manifest(on_disk[MANIFEST_NAME], MANIFEST_NAME) == manifest
    assert not manifest.certified


@pytest.mark.gate("G4")
def test_emitting_twice_gives_identical_bytes(folder: Path, tmp_path: Path) -> None:
    copy_elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "tiny"))
    manifests = [_emit(lowered(folder), tmp_path / "a.partial"), _emit(lowered(copy_elsewhere), tmp_path / "b.partial")]
    assert manifests[0] == manifests[1]
    one, other = _contents(tmp_path / "a.partial"), _contents(tmp_path / "b.partial")
    assert one == other and len(one) == 9
    assert str(tmp_path).encode() not in b"".join(one.values())


def test_costs(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    plan = _mixed_plan(lowering.model)
    tables = Tables.empty(plan.model)
    tables.popularity[0] = [7, 1, 0, 0]
    cost = emit(lowering, BundleContent(plan, NO_DEVICE, tables=tables), tmp_path / "out.partial").cost
    sizes = [[plan.expert_padded_bytes(ExpertKey(layer, expert)) for expert in range(4)] for layer in range(2)]
    assert cost.expert_padded_bytes == sum(map(sum, sizes))
    assert cost.expected_read_bytes_per_token == round(2 * (7 * sizes[0][0] + sizes[0][1]) / 8 + 2 * sum(sizes[1]) / 4)
    assert cost.minimum_expert_bytes == max(sum(sorted(layer)[-2:]) for layer in sizes)
    assert cost_summary(plan).expected_read_bytes_per_token == sum(map(sum, sizes)) * 2 // 4
    assert cost.kv_bytes_per_position == 2 * 2 * 2 * 16 * 4
    assert cost.expert_packed_bytes == plan.expert_packed_bytes < cost.expert_padded_bytes
    assert np.array_equal(load_file(tmp_path / "out.partial/tables.safetensors")["popularity"], tables.popularity)


def test_progress_ends_at_the_number_of_weights(folder: Path, tmp_path: Path) -> None:
    lowering, seen = lowered(folder), []
    _emit(lowering, tmp_path / "out.partial", progress=lambda done, total: seen.append((done, total)))
    total = len(lowering.units) + len(lowering.dense)
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_finish_certifies(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    before = _emit(lowered(folder), partial)
    after = finish(partial, before, b'{"a": 1}\n', b"# Card\n")
    on_disk = _contents(partial)
    assert after.certified and decode_manifest(on_disk[MANIFEST_NAME], MANIFEST_NAME) == after
    assert (on_disk["quality.json"], on_disk["README.md"]) == (b'{"a": 1}\n', b"# Card\n")
    assert {entry.name for entry in after.files} == set(on_disk) - {MANIFEST_NAME}
    assert replace(after, certified=False, files=before.files) == before
    assert encode_manifest(finish(partial, before, b'{"a": 1}\n', b"# Card\n")) == on_disk[MANIFEST_NAME]


def test_units_of_an_earlier_stage_are_taken(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    asked: list[UnitKey] = []

    def known(key: UnitKey, spec: QuantSpec) -> np.ndarray | None:
        asked.append(key)
        return pack(quantize_rtn(lowering.unit(key), spec)) if key.expert % 2 else None

    _emit(lowering, tmp_path / "a.partial", packed_units=known)
    _emit(lowering, tmp_path / "b.partial")
    assert _contents(tmp_path / "a.partial") == _contents(tmp_path / "b.partial")
    assert len(asked) == sum(spec.bitwidth < 16 for spec in _mixed_plan(lowering.model).units.values())


def test_what_a_killed_run_left_is_replaced(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "deeper").mkdir(parents=True)
    (partial / "experts-00099.safetensors.writing").write_bytes(b"half")
    manifest = _emit(lowered(folder), partial)
    assert set(_contents(partial)) == {entry.name for entry in manifest.files} | {MANIFEST_NAME}


def test_finite_weights_whose_sum_is_not_are_read(copy: Path) -> None:
    tensors, name = load_file(copy / WEIGHTS_NAME), "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    tensors[name][0] = 3e38
    save_file(tensors, copy / WEIGHTS_NAME)
    weight = lowered(copy).unit(UnitKey(1, 3, "up"))
    assert torch.isfinite(weight).all() and not torch.isfinite(weight.sum(dtype=torch.float32))


@pytest.mark.parametrize("tensor", ["model.layers.0.block_sparse_moe.experts.0.w1", "model.embed_tokens"])
def test_a_weight_beyond_the_scales_is_named(copy: Path, tmp_path: Path, tensor: str) -> None:
    tensors = load_file(copy / WEIGHTS_NAME)
    tensors[f"{tensor}.weight"][1, 2] = -1e6
    save_file(tensors, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"tensor `{tensor}.weight` .* cannot be stored: .* exceed the float16"):
        _emit(lowered(copy), tmp_path / "out.partial")
    assert not (tmp_path / "out.partial").exists()


def test_a_file_cut_off_after_opening_leaves_nothing(copy: Path, tmp_path: Path) -> None:
    lowering = lowered(copy)
    (copy / WEIGHTS_NAME).write_bytes((copy / WEIGHTS_NAME).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        _emit(lowering, tmp_path / "out.partial")
    assert not (tmp_path / "out.partial").exists()


def test_no_space_is_found_before_the_first_byte(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(DiskFull, match=r"has 10 B free, [\d.]+ MiB are needed"):
        _emit(lowered(folder), tmp_path / "out.partial")
    assert not (tmp_path / "out.partial").exists()


class _FullDisk(Disk):
    """A disk that is full after some writes."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.writes -= 1
        if self.writes < 0:
            raise OSError(28, "No space left on device")
        super().write(file, data)


def test_a_disk_that_fills_up_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    plan = uniform_plan(lowering.model, lowering.spec_16bit, lowering.spec_16bit, "bfloat16")
    for writes in range(100):
        try:
            _emit(lowering, tmp_path / "out.partial", plan, disk=_FullDisk(writes))
        except DiskFull as error:
            assert re.search(r"the disk of `.*out\.partial` is full", str(error))
            assert not list(tmp_path.iterdir())
        else:
            break
    assert writes == 1 + 17 + 2 * (1 + 4) + 5 + 1  # dense, experts, small files, manifest: one write each and headers


def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _emit(lowered(folder), tmp_path / "out.partial", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_only_unfinished_names_are_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(OptionError, match=r"precious` does not end in `\.partial`"):
        _emit(lowered(folder), tmp_path / "precious")
    assert (tmp_path / "precious").is_dir()
    with pytest.raises(MoecError):
        _emit(lowered(folder), tmp_path / "absent" / "out.partial")


def test_a_quantizer_that_breaks_its_promise_is_found(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    plan = uniform_plan(lowering.model, QuantSpec(4, 32), lowering.spec_16bit, "bfloat16")

    def other_format(key: UnitKey, spec: QuantSpec) -> np.ndarray:
        return pack(quantize_rtn(lowering.unit(key), QuantSpec(2, 32)))

    with pytest.raises(RuntimeError, match="the plan says"):
        _emit(lowering, tmp_path / "out.partial", plan, packed_units=other_format)


@given(
    rows=st.integers(1, 5000),
    text=st.sampled_from(["q1g32", "q1.6s", "q2g32", "q3g32", "q4g32", "q8g32"]),
    seed=st.integers(0, 9),
)
def test_pieces_of_a_dense_matrix_are_the_whole(rows: int, text: str, seed: int) -> None:
    weight, spec = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)), QuantSpec.parse(text)
    pieces = np.concatenate([pack(matrix) for _, matrix in rounded_rows(weight, spec)])
    np.testing.assert_array_equal(pieces, pack(quantize_rtn(weight, spec, clip_search=True)))


def test_tables_come_back(folder: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tables = Tables(
        generator.integers(0, 99, (2, 4), np.uint32),
        generator.integers(0, 99, (1, 4, 4), np.uint32),
        np.array([[0, 1, 2], [0, 1, 3]], np.int32),
        np.array([0, 2, 3], np.int64),
        np.array([1, 2, 0], np.uint16),
        np.array([5, 4, 3], np.uint32),
        generator.random((2, 3)).astype(np.float32),
    )
    model = lowered(folder).model
    for value in (tables, Tables.empty(model)):
        value.check(model)
        (tmp_path / "tables.safetensors").write_bytes(encode_tables(value))
        for name, array in load_file(tmp_path / "tables.safetensors").items():
            expected = getattr(value, {"router_score_quantiles": "router_quantiles"}.get(name, name.replace(".", "_")))
            np.testing.assert_array_equal(array, expected, strict=True)
    header = read_header(tmp_path / "tables.safetensors")
    assert {name: entry.dtype for name, entry in header.items()} == {
        "popularity": "U32", "transitions": "U32", "path.keys": "I32", "path.offsets": "I64",
        "path.experts": "U16", "path.counts": "U32", "router_score_quantiles": "F32",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"popularity: expected uint32 \(2, 4\), found uint32 \(2, 5\)"):
        replace(tables, popularity=np.zeros((2, 5), np.uint32)).check(model)
    with pytest.raises(ValueError, match="path_offsets: expected a rising sequence"):
        replace(tables, path_offsets=np.array([0, 3, 2], np.int64)).check(model)


def test_the_manifest_names_the_source_without_a_path(folder: Path, tmp_path: Path) -> None:
    lowering = lowered(folder)
    content = BundleContent(_mixed_plan(lowering.model), NO_DEVICE, options={"z": "1", "a": "2"})
    emit(lowering, content, tmp_path / "out.partial")
    plain = json.loads((tmp_path / "out.partial" / MANIFEST_NAME).read_text())
    assert (plain["name"], plain["source"]["name"], plain["options"]) == ("tiny", "tiny", {"a": "2", "z": "1"})
    assert WEIGHTS_NAME in {file["name"] for file in plain["source"]["files"]}


def test_a_bundle_for_a_named_device_has_one_file_more(folder: Path, tmp_path: Path) -> None:
    """All other files are the same, and equal profiles give equal bytes."""
    lowering = lowered(folder)
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

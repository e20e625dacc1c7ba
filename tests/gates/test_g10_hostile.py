"""G10: damaged and hostile bundles are refused with an error that names the place. No crash, no hang, little memory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME
from moec.manifests.errors import BundleError, BundleIncomplete, ManifestInvalid, MoecError
from moec.manifests.safetensors_header import read_header
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace.statistics import peak_memory_bytes, reset_peak_memory
from tests.gates.bundles import emit_bundle
from tests.gates.damage import IO_MODES, check, flip, places, plain_manifest, run, seal, seal_files, write_tables
from tests.manifests.examples import get, paths, put
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.gate("G10")
PATIENCE_S = 120
EXPERTS_0, EXPERTS_1 = "experts-00000.safetensors", "experts-00001.safetensors"
WEIGHT_FILES = (DENSE_NAME, TABLES_NAME, EXPERTS_0, EXPERTS_1)
READ_BY_A_RUN = (*WEIGHT_FILES, MANIFEST_NAME, "tokenizer.json")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError(f"still busy after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    tiny = TinyMixtral(hidden_size=32, heads=2, kv_heads=1, experts=3, top_k=2, width=32, seed=8)
    return emit_bundle(save_tiny_mixtral(root / "model", tiny), root / "bundle", mixed=False)


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def names(original: Path) -> list[str]:
    return sorted(path.name for path in original.iterdir())


def refused(action: Callable[[], Any], *named: str) -> BundleError:
    """Check that the action raises a BundleError whose message contains all of `named`."""
    with pytest.raises(BundleError) as caught:
        action()
    assert caught.value.exit_code == 3 and len(caught.value.message) < 2000
    for name in named:
        assert name in caught.value.message
    return caught.value


def test_the_bundle_itself_is_fine(bundle: Path) -> None:
    check(bundle)
    for io in IO_MODES:
        run(bundle, io)
    seal_files(bundle)
    check(bundle)
    assert set(READ_BY_A_RUN) <= set(names(bundle))


def test_a_flipped_byte_in_every_file(bundle: Path) -> None:
    count = 0
    for name in names(bundle):
        size = (bundle / name).stat().st_size
        # 0x03 turns a line feed into a tab: a change of white space is found too.
        for mask, place in [(m, p) for p in places(size) for m in (0x01, 0x80)] + [(0x03, 1)]:
            flip(bundle / name, place, mask)
            count += 1
            refused(lambda: check(bundle), name)
            if name in READ_BY_A_RUN:
                refused(lambda io=IO_MODES[count % 3]: run(bundle, io), name)
            flip(bundle / name, place, mask)
    check(bundle)
    assert count > 100


def test_a_flipped_byte_in_every_expert(bundle: Path) -> None:
    """The byte is found by a check, and by a run when it reads the expert first."""
    opened = open_bundle(bundle)
    smallest = str(opened.manifest.cost.minimum_expert_bytes)
    for number, entry in enumerate(opened.manifest.experts):
        for place in (0, entry.size_bytes // 2, entry.size_bytes - 1):
            flip(bundle / entry.file, entry.offset_bytes + place, 0x40)
            refused(lambda: check(bundle), entry.file, f"expert {entry.expert}")
            named = (entry.file, f"expert {entry.expert} of layer {entry.layer}")
            refused(lambda io=IO_MODES[number % 3]: run(bundle, io), *named)
            refused(lambda: run(bundle, expert_cache=smallest), *named)
            flip(bundle / entry.file, entry.offset_bytes + place, 0x40)
    check(bundle)


def lengths(path: Path) -> list[int]:
    """Return lengths at which to cut: near the prefix, the header, every tensor and every page, and some between."""
    size, found = path.stat().st_size, {0, 1, 7, 8, 9}
    marks = [size, *range(4096, size, 4096), *places(size, 4)]
    if path.suffix == ".safetensors":
        marks += [8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
        marks += [entry.offset_bytes for entry in read_header(path).values()]
    found |= {mark + change for mark in marks for change in (-1, 0, 1)}
    return sorted(length for length in found if 0 <= length < size)


def test_truncation_at_every_boundary(bundle: Path) -> None:
    for name in names(bundle):
        whole = (bundle / name).read_bytes()
        for length in lengths(bundle / name):
            (bundle / name).write_bytes(whole[:length])
            refused(lambda: open_bundle(bundle), name)
        (bundle / name).write_bytes(whole + b"\0")
        refused(lambda: open_bundle(bundle), name)
        (bundle / name).write_bytes(whole)
    check(bundle)


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_truncation_that_the_manifest_knows_of(bundle: Path, name: str) -> None:
    whole, manifest = (bundle / name).read_bytes(), (bundle / MANIFEST_NAME).read_bytes()
    for length in lengths(bundle / name)[::2]:
        (bundle / name).write_bytes(whole[:length])
        seal_files(bundle)
        refused(lambda: open_bundle(bundle))
        (bundle / MANIFEST_NAME).write_bytes(manifest)


def test_a_missing_file(bundle: Path) -> None:
    for name in names(bundle):
        data = (bundle / name).read_bytes()
        (bundle / name).unlink()
        for action in (check, run):
            assert isinstance(refused(lambda act=action: act(bundle), name), BundleIncomplete)
        (bundle / name).mkdir()
        refused(lambda: open_bundle(bundle), name)
        (bundle / name).rmdir()
        (bundle / name).write_bytes(data)


def test_no_bundle_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "file"):
        refused(lambda where=path: open_bundle(where), MANIFEST_NAME)
    refused(lambda: open_bundle(tmp_path / "nowhere"), "nowhere", "does not exist")


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "experts-00002.safetensors", "moec.json.tmp", "sub", "pipe"])
def test_an_extra_file(bundle: Path, name: str) -> None:
    if name == "sub":
        (bundle / name).mkdir()
    elif name == "pipe":
        os.mkfifo(bundle / name)
    else:
        (bundle / name).write_bytes(b"x")
    for action in (check, run):
        refused(lambda act=action: act(bundle), f"`{name}`, which the manifest does not list")


def test_links(bundle: Path, tmp_path: Path) -> None:
    """A link is refused even if it points to the same bytes, because its target can change after the check."""
    for name in names(bundle):
        target = tmp_path / name
        (bundle / name).rename(target)
        for link_to in (target, "/dev/zero", "/etc/hostname", tmp_path / "nowhere"):
            (bundle / name).symlink_to(link_to)
            refused(lambda: open_bundle(bundle), name)
            (bundle / name).unlink()
        target.rename(bundle / name)
    check(bundle)


def test_swapped_expert_files(bundle: Path) -> None:
    for a, b in ((EXPERTS_0, EXPERTS_1), (DENSE_NAME, TABLES_NAME)):
        (bundle / a).rename(bundle / "aside")
        (bundle / b).rename(bundle / a)
        (bundle / "aside").rename(bundle / b)
        refused(lambda: check(bundle), ".safetensors")
        refused(lambda: run(bundle), ".safetensors")
        shutil.move(bundle / a, bundle / "aside")
        shutil.move(bundle / b, bundle / a)
        shutil.move(bundle / "aside", bundle / b)
    check(bundle)


def test_unfinished_bundles(bundle: Path, tmp_path: Path) -> None:
    partial = bundle.rename(tmp_path / "model.partial")
    (tmp_path / "link").symlink_to(partial)
    for path in (partial, tmp_path / "link", partial / ".." / "model.partial"):
        for action in (check, run):
            refused(lambda act=action, where=path: act(where), "unfinished")
    assert open_bundle(partial, allow_partial=True).manifest.certified
    finished = partial.rename(tmp_path / "model")
    plain = plain_manifest(finished)
    plain["certified"] = False
    seal(finished, plain)
    for action in (check, run):
        refused(lambda act=action: act(finished), MANIFEST_NAME, "not certified")


HOSTILE_FIELDS: list[tuple[str, Any]] = [
    ("layout", "rows32"), ("layout", "../rows16"), ("format_version", 2), ("format_version", -1),
    *(("files[0].name", name) for name in ("../../etc/passwd", "/etc/passwd", "a/b", "..", "", "a\0b", MANIFEST_NAME)),
    *(("experts[0].file", name) for name in ("../x", "/dev/zero", TABLES_NAME, DENSE_NAME, EXPERTS_1, "config.json")),
    *(("experts[1].offset_bytes", value) for value in (-4096, 0, 1, 4096, 1 << 45, 1 << 62)),
    *(("experts[1].size_bytes", value) for value in (-4096, 0, 1, 4096, 1 << 45, 1 << 62)),
    *(("files[2].size_bytes", value) for value in (-1, 0, 1 << 45, 1 << 62)),
    *(("model.hidden_size", value) for value in (-32, 0, 31, 64, 1 << 20, 1 << 62)),
    *(("model.vocab_size", value) for value in (-1, 0, 1, 289, 1 << 24, 1 << 62)),
    *(("model.layers[0].experts.count", value) for value in (-1, 0, 2, 65535, 1 << 62)),
    *(("model.layers[0].experts.top_k", value) for value in (-1, 0, 4, 1 << 62)),
    *(("model.layers[0].experts.width", value) for value in (-32, 0, 33, 64, 1 << 20)),
    *(("model.layers[1].attention.num_heads", value) for value in (-1, 0, 4, 4096)),
    *(("model.layers[1].attention.num_kv_heads", value) for value in (-1, 0, 2, 3)),
    *(("model.layers[1].attention.head_size", value) for value in (-1, 0, 8, 4096)),
    *(("model.layers[1].attention.rope.rotary_size", value) for value in (-2, 0, 3, 64)),
    *(("model.layers[1].attention.rope.theta", value) for value in (-1.0, 0.0, 1e308, 1e-300)),
    *(("model.layers[0].attention.sliding_window", value) for value in (-1, 1 << 40)),
    ("model.layers[0].experts.activation", "relu"), ("model.layers[0].experts.router.scoring", "tanh"),
    *(("model.layers[0].experts.router.scale", value) for value in (-1.0, 0.0, 1e308)),
    *(("model.layers[0].experts.router.groups", value) for value in (-1, 0, 2, 1 << 62)),
    *(("model.layers[0].experts.router.kept_groups", value) for value in (-1, 0, 2)),
    ("model.layers[0].experts.router.correction", [0.5]), ("model.layers[0].shared", {"width": 64, "has_gate": False}),
    ("model.layers[0].shared", {"width": 0, "has_gate": False}), ("model.layers[0].attention.bias", "inputs"),
    ("model.layers[0].attention.scale", -1.0), ("model.layers[0].attention.latent", {}),
    *(("model.layers[0].attention.rope.frequencies", value) for value in ([0.5], [2.0] * 4, [-1.0] * 4)),
    ("model.layers[0].attention.rope.magnitude", 0.0), ("model.embedding_scale", 0.0), ("model.logits_scale", 1e308),
    ("model.max_positions", 1 << 40), ("model.max_positions", 0), ("model.eos_token_ids", [288]), ("model.layers", []),
    ("experts[0].gate", "q4g32"), ("experts[0].gate", "q4g31"), ("experts[0].expert", 1), ("experts[0].layer", 9),
    ("dense[0].shape", [288, 1 << 40]), ("dense[0].shape", []), ("dense[0].shape", [-288, -32]),
    ("dense[0].name", "lm_head"), ("dense[0].spec", "q2g32"), ("dense[1].spec", "q8"), ("dense[1].spec", "fp16"),
    ("experts[0].xxh3", "0" * 31), ("dense[0].xxh3", "x" * 32), ("files[0].sha256", "Z" * 64),
    ("device.recommended_cache_bytes", -1),
    *((f"cost.{name}", value) for name in (
        "expert_packed_bytes", "expert_padded_bytes", "dense_packed_bytes", "expected_read_bytes_per_token",
        "minimum_expert_bytes", "kv_bytes_per_position") for value in (-(1 << 40), 1 << 50)),
]  # fmt: skip


def test_hostile_manifests(bundle: Path) -> None:
    """Each manifest has its correct digest."""
    original = plain_manifest(bundle)
    reset_peak_memory()
    before = peak_memory_bytes()
    for path, value in HOSTILE_FIELDS:
        plain = deepcopy(original)
        assert get(plain, path) != value
        put(plain, path, value)
        seal(bundle, plain)
        refused(lambda: open_bundle(bundle), f"`{bundle}/")
    for changed in (repeated(original, "experts"), repeated(original, "files"), repeated(original, "dense")):
        seal(bundle, changed)
        refused(lambda: open_bundle(bundle), MANIFEST_NAME)
    assert peak_memory_bytes() < before + (64 << 20)


def repeated(plain: dict[str, Any], field: str) -> dict[str, Any]:
    return {**plain, field: [*plain[field], plain[field][-1]]}


def test_an_absurd_model_costs_no_memory(bundle: Path) -> None:
    plain = plain_manifest(bundle)
    plain["model"]["layers"] = [plain["model"]["layers"][0]] * 1024
    plain["model"]["layers"][0]["experts"]["count"] = 65535
    seal(bundle, plain)
    if not reset_peak_memory():
        pytest.skip("the system does not reset the peak")
    before = peak_memory_bytes()
    refused(lambda: open_bundle(bundle), MANIFEST_NAME, "expected all 67107840")
    assert peak_memory_bytes() < before + (64 << 20)


def test_any_value_anywhere(bundle: Path) -> None:
    """A manifest that is not refused is consistent: it runs, or the run is refused for a value in it."""
    original, source = plain_manifest(bundle), random.Random(10)
    every = [path for path in paths(original) if not path.startswith("source.files")]
    model = [path for path in every if path.startswith(("model", "cost", "required"))]
    values = [None, True, 0, -1, 1, 3, 64, 2**31, 2**63 - 1, 10**400, 0.5, 1e308, "", "x", "q8g32", "bf16", [], {}, ...]
    ran = 0
    for number in range(250):
        path, plain = source.choice(every if number % 2 else model), deepcopy(original)
        put(plain, path, source.choice(values))
        seal(bundle, plain)
        try:
            run(bundle, IO_MODES[number % 3], context=0)
            ran += 1
        except MoecError as error:
            assert error.exit_code == (1 if not isinstance(error, BundleError) else 3)
    assert 0 < ran < 125


PATHS = {
    "path_keys": np.array([[1, 0, 1]], np.int32), "path_offsets": np.array([0, 2], np.int64),
    "path_experts": np.array([0, 1], np.uint16), "path_counts": np.array([3, 4], np.uint32),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"popularity": None}, {"popularity": np.ones((2, 4), np.uint32)}, {"popularity": np.ones(6, np.uint32)},
        {"popularity": np.full((2, 3), np.nan, np.float32)}, {"popularity": np.ones((2, 3), np.int64)},
        {"popularity": np.zeros((0, 1 << 47), np.uint32)}, {"transitions": np.ones((2, 3, 3), np.uint32)},
        {"transitions": np.zeros((0, 3, 3), np.uint32)}, {"path_keys": np.zeros((0, 1 << 47), np.int32)},
        {"path_keys": np.zeros((3, 3), np.int32)}, {"path_offsets": np.zeros(0, np.int64)},
        {"path_offsets": np.array([0, 3])}, {"path_offsets": np.array([1, 2])}, {"path_offsets": np.array([2, 0])},
        {"path_offsets": np.array([0, -1])}, {"path_offsets": np.zeros((2, 1), np.int64)},
        {"path_experts": np.array([0, 3], np.uint16)}, {"path_experts": np.array([0, -9], np.int32)},
        {"path_counts": np.array([3], np.uint32)}, {"path_counts": np.array([3, -4], np.int64)},
        {"path_keys": np.array([[1, 0, 1], [1, 0, 0]], np.int32), "path_offsets": np.array([0, 1, 2])},
        {"path_keys": np.array([[1, 0, 1], [0, 2, 2]], np.int32), "path_offsets": np.array([0, 1, 2])},
        {"path_keys": np.array([[1, 0, 1], [1, 0, 1]], np.int32), "path_offsets": np.array([0, 1, 2])},
        {"path_keys": np.array([[1, 0, 3]], np.int32)}, {"path_keys": np.array([[1, 3, 0]], np.int32)},
        {"path_keys": np.array([[2, 0, 0]], np.int32)}, {"path_keys": np.array([[1, -1, 0]], np.int32)},
        {"path_more": np.zeros(1, np.uint16)}, {"alignment_bytes": 2048},
    ],
)  # fmt: skip
def test_hostile_tables(bundle: Path, changes: dict[str, Any]) -> None:
    has_paths = any(name.startswith("path") and value is not None and value.size for name, value in changes.items())
    write_tables(bundle, **{**(PATHS if has_paths else {}), **changes})
    refused_by_run = refused(lambda: run(bundle, prefetch="path", expert_cache="80%"), TABLES_NAME)
    assert isinstance(refused_by_run, ManifestInvalid)
    assert isinstance(refused(lambda: check(bundle), TABLES_NAME), ManifestInvalid)


def test_offsets_whose_differences_overflow(bundle: Path) -> None:
    edges = [0, 2**63 - 1, -(2**63), -1, 2]
    changes = {"path_keys": np.zeros((4, 3), np.int32), "path_offsets": np.array(edges, np.int64)}
    write_tables(bundle, **{**PATHS, **changes})
    refused(lambda: check(bundle), TABLES_NAME)


def test_tables_that_are_well_formed_are_accepted(bundle: Path) -> None:
    keys = {"path_keys": np.array([[0, 2, 2], [1, 0, 1]], np.int32), "path_offsets": np.array([0, 1, 2])}
    write_tables(bundle, **{**PATHS, **keys, "router_score_quantiles": np.zeros((2, 3), np.float32)})
    check(bundle)
    run(bundle, prefetch="path", expert_cache="80%")


def test_more_path_keys_than_the_limit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is refused with every prefetcher."""
    write_tables(bundle, **PATHS)
    monkeypatch.setattr("moec.runtime.bundle.tables.MAX_PATH_KEYS", 0)
    for action in (check, run):
        error = refused(lambda act=action: act(bundle), TABLES_NAME)
        assert "`path.keys` has 1 rows, more than the limit of 0" in error.message


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_hostile_headers(bundle: Path, name: str) -> None:
    """Random changes of a header with a correct digest are refused, or do not change the meaning of the file."""
    source, whole = random.Random(name), (bundle / name).read_bytes()
    end = len(whole[8:].split(b" ", 1)[0]) + 16
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            data[source.randrange(end)] = source.choice([source.randrange(256), *b'0123456789,:"[]{}'])
        (bundle / name).write_bytes(bytes(data))
        seal_files(bundle)
        if data != whole:
            try:
                check(bundle)
            except BundleError:
                continue
            assert read_header(bundle / name) is not None
            run(bundle)


def test_hostile_tokenizers(bundle: Path) -> None:
    """A file is refused or usable. The tokenizers library causes no other error."""
    source, whole = random.Random(3), (bundle / "tokenizer.json").read_bytes()
    for number in range(60):
        data = bytearray(whole)
        if number % 2:
            data = data[: source.randrange(len(data))]
        else:
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.choice(b'0189,:"[]{}ntx\xff')
        (bundle / "tokenizer.json").write_bytes(bytes(data))
        seal_files(bundle)
        try:
            run(bundle)
        except BundleError as error:
            assert "tokenizer.json" in error.message

"""The plan of a pull: what is linked, copied and fetched. Ranges and rate of a fetch."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from bench.shipping.shared_bytes import Shared, dense_of, experts_of, other_files_of
from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.shipping.pull.delta import GAP_SHARE, plan_delta, source_of
from moec.shipping.pull.fetch import MAX_RANGE_BYTES, FetchOptions, RateLimit, split_ranges
from moec.shipping.pull.journal import Intervals
from tests.shipping.model_bundles import Shape, write_bundle

EXAMPLES = {loss: Path(__file__).with_name(f"example-{loss}-percent.json.xz") for loss in ("2", "5")}
"""Manifests of an earlier example, compiled for losses of 2 % and of 5 %."""
SHAPE = Shape(layers=3, experts=16)


def manifest_of(folder: Path) -> BundleManifest:
    return decode_manifest((folder / MANIFEST_NAME).read_bytes(), "moec.json")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> BundleManifest:
    return manifest_of(write_bundle(tmp_path_factory.mktemp("old") / "a", SHAPE))


def names(manifest: BundleManifest) -> set[str]:
    return {entry.name for entry in manifest.files}


def test_without_a_source_everything_is_fetched(old: BundleManifest) -> None:
    delta = plan_delta(old, [])
    assert delta.links == {} and delta.copies == ()
    assert delta.left_bytes([Intervals() for _ in old.files]) == (0, sum(entry.size_bytes for entry in old.files))


def test_equal_files_are_linked_and_equal_experts_copied(old: BundleManifest, tmp_path: Path) -> None:
    new = manifest_of(write_bundle(tmp_path / "b", SHAPE, version=lambda layer, expert: int((layer, expert) == (1, 9))))
    delta = plan_delta(new, [source_of(tmp_path, old, names(old))])
    assert {new.files[number].name for number in delta.links} == names(new) - {"experts-00001.safetensors"}
    (number,) = delta.fetched
    changed = new.experts[16 + 9]
    header = new.experts[16].offset_bytes
    assert delta.fetched[number] == ((0, header), (changed.offset_bytes, changed.offset_bytes + changed.size_bytes))
    assert [copy.start for copy in delta.copies] == [
        entry.offset_bytes for entry in new.experts if entry.layer == 1 and entry.expert != 9
    ]
    assert all(copy.source == tmp_path / "experts-00001.safetensors" for copy in delta.copies)


def test_files_that_changed_since_they_were_checked_are_not_linked(old: BundleManifest, tmp_path: Path) -> None:
    delta = plan_delta(old, [source_of(tmp_path, old, names(old) - {"experts-00000.safetensors", DENSE_NAME})])
    fetched = {old.files[number].name for number in delta.fetched}
    assert fetched == {"experts-00000.safetensors", DENSE_NAME}
    assert len(delta.copies) == SHAPE.experts + len(old.dense)
    size = next(entry.size_bytes for entry in old.files if entry.name == DENSE_NAME)
    assert max(copy.end for copy in delta.copies if copy.source.name == DENSE_NAME) == size


def test_short_gaps_are_fetched_as_long_as_they_are_a_small_share(old: BundleManifest, tmp_path: Path) -> None:
    # 46 of 48 experts change; a copy of one of the two others would need a request more.
    same = {(0, 5), (2, 5)}
    new = manifest_of(
        write_bundle(tmp_path / "b", SHAPE, lambda layer, expert: int((layer, expert) not in same), dense_version=1)
    )
    delta = plan_delta(new, [source_of(tmp_path, old, names(old))])
    copied, fetched = delta.left_bytes([Intervals() for _ in new.files])
    size = new.experts[0].size_bytes
    needed = fetched - (2 * size - copied)
    assert copied < 2 * size, "a gap is joined"
    assert fetched <= needed * (1 + 1 / GAP_SHARE)


def test_what_is_there_already_is_not_counted(old: BundleManifest, tmp_path: Path) -> None:
    new = manifest_of(write_bundle(tmp_path / "b", SHAPE, version=lambda layer, expert: int(expert < 8)))
    delta = plan_delta(new, [source_of(tmp_path, old, names(old))])
    nothing = [Intervals() for _ in new.files]
    copied, fetched = delta.left_bytes(nothing)
    first = delta.copies[0]
    nothing[first.file].add(first.start, first.end)
    number = next(iter(delta.fetched))
    start, end = delta.fetched[number][0]
    nothing[number].add(start, end - 7)
    assert delta.left_bytes(nothing) == (copied - first.size_bytes, fetched - (end - start - 7))


@pytest.mark.gate("G13")
@pytest.mark.parametrize(("before", "after"), [("2", "5"), ("5", "2")])
def test_between_two_plans_of_the_example(before: str, after: str, tmp_path: Path) -> None:
    """Experts of another format have another size, so all offsets differ.

    G13 bounds the bytes by 1.05 times changed experts, all dense weights and 1 MB. The bound here is lower.
    """
    old, new = (decode_manifest(lzma.decompress(EXAMPLES[loss].read_bytes()), loss) for loss in (before, after))
    delta = plan_delta(new, [source_of(tmp_path, old, names(old))])
    _, fetched = delta.left_bytes([Intervals() for _ in new.files])
    parts = [
        (experts_of(new), experts_of(old)),
        (dense_of(new), dense_of(old)),
        (other_files_of(new), other_files_of(old)),
    ]
    shared = [Shared.of(*pair) for pair in parts]
    assert all(0 < part.equal < part.count for part in shared)
    assert fetched <= 1.05 * sum(part.size - part.equal_size for part in shared)


def test_bytes_take_the_time_of_the_rate() -> None:
    now, waits = [100.0], list[float]()

    def pause(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    limit = RateLimit(1000, pause, lambda: now[0])
    for _ in range(10):
        limit.take(500)
    assert now[0] == 105.0 and waits == [0.5] * 10
    now[0] += 60  # time in which nothing is read is not saved up
    limit.take(1000)
    assert waits[-1] == 1.0


def test_no_rate_no_wait() -> None:
    def never(seconds: float) -> None:
        raise AssertionError("waits")

    RateLimit(None, never).take(1 << 40)


def test_a_low_rate_has_one_connection_and_short_ranges() -> None:
    assert FetchOptions(4).used_connections == 4 and FetchOptions(4).range_bytes == MAX_RANGE_BYTES
    assert FetchOptions(4, 1 << 20).used_connections == 1 and FetchOptions(4, 1 << 20).range_bytes == 1 << 20
    assert FetchOptions(4, 10).range_bytes == 64 << 10
    assert FetchOptions(4, 1 << 30).used_connections == 4 and FetchOptions(4, 1 << 30).range_bytes == MAX_RANGE_BYTES


def test_ranges_are_split() -> None:
    assert split_ranges(3, 10, 4) == [(3, 7), (7, 10)]
    assert split_ranges(3, 3, 4) == []

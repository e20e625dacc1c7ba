"""The bundle manifest (`moec.json`): the exact content of a bundle. The format is docs/format.md."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .model import MAX_EXPERTS, ExpertKey, ModelSpec, keeps_16_bits
from .optional_fields import OPTIONAL
from .path_tables import PATH_SETS_VERSION, check_path_sets
from .quant import EXPERT_ALIGNMENT_BYTES, LAYOUT, UNIT_ALIGNMENT_BYTES, QuantSpec, round_up

FORMAT_VERSIONS = (1, 2, 3, 4)
"""Versions that this package reads. A bundle has the lowest one that has all its features."""
RELEASED_VERSION = 4
"""Newest version with a release. Later versions may still change."""
MANIFEST_NAME = "moec.json"
DENSE_NAME = "dense.safetensors"
TABLES_NAME = "tables.safetensors"
LOOKAHEAD_NAME = "lookahead.safetensors"
EVICTION_NAME = "eviction.json"
QUALITY_NAME = "quality.json"
DEVICE_NAME = "device.json"
TOKENIZER_NAME = "tokenizer.json"
CARD_NAME = "README.md"
LOSSES_PICTURE_NAME = "losses.svg"
BITS_PICTURE_NAME = "bits.svg"
PARTIAL_SUFFIX = ".partial"
WORK_SUFFIX = ".work"
MAX_FILE_BYTES = 1 << 46
_SHA256 = re.compile(r"[0-9a-f]{64}")
_XXH3 = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def expert_tensor_name(expert: int) -> str:
    """Return the name of one expert's tensor in its layer's file. Source: docs/format.md, Expert files."""
    return f"experts.{expert:05d}"


def experts_file_name(layer: int) -> str:
    """Return the name of the file with the routed experts of one layer."""
    return f"experts-{layer:05d}.safetensors"


def low_experts_file_name(layer: int) -> str:
    """Return the name of the file with the low versions of one layer's routed experts."""
    return f"low-experts-{layer:05d}.safetensors"


def _check_digest(text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise ValueError(f"not a SHA-256 digest: `{text[:80]}`")


def _check_checksum(text: str) -> None:
    if not _XXH3.fullmatch(text):
        raise ValueError(f"not an XXH3 checksum of 128 bits: `{text[:80]}`")


def _check_name(name: str) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"not a plain file name: `{name[:80]}`")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the bundle or of the source checkpoint."""

    name: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_digest(self.sha256)
        if not 0 <= self.size_bytes <= MAX_FILE_BYTES:
            raise ValueError(f"size_bytes out of range: {self.size_bytes}")


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """Position of one routed expert, and the formats of its projections.

    offset_bytes: from the start of the file.
    size_bytes: size with padding.
    xxh3: checksum of the stored bytes, 128 bits in hex. It is fast enough to be compared when an expert is first read.
    gate: None if experts have no gate.

    The projections are stored in the order gate, up, down. Each starts at a multiple of UNIT_ALIGNMENT_BYTES.
    The expert is padded with zeros to a multiple of EXPERT_ALIGNMENT_BYTES.
    """

    layer: int
    expert: int
    file: str
    offset_bytes: int
    size_bytes: int
    xxh3: str
    gate: QuantSpec | None
    up: QuantSpec
    down: QuantSpec

    def __post_init__(self) -> None:
        _check_name(self.file)
        _check_checksum(self.xxh3)
        if not (0 <= self.layer < 1 << 16 and 0 <= self.expert < MAX_EXPERTS):
            raise ValueError(f"expert key out of range: {self.layer}, {self.expert}")
        if not (0 <= self.offset_bytes <= MAX_FILE_BYTES and self.offset_bytes % EXPERT_ALIGNMENT_BYTES == 0):
            raise ValueError(f"offset_bytes must be a multiple of {EXPERT_ALIGNMENT_BYTES}, found {self.offset_bytes}")
        specs = [spec for spec in (self.gate, self.up, self.down) if spec is not None]
        if any(spec.is_pruned != self.is_pruned for spec in specs):
            raise ValueError("an expert is left out as a whole: q0 for all its projections, or for none")
        least = 0 if self.is_pruned else 1
        if not (least <= self.size_bytes <= MAX_FILE_BYTES and self.size_bytes % EXPERT_ALIGNMENT_BYTES == 0):
            raise ValueError(f"size_bytes must be a multiple of {EXPERT_ALIGNMENT_BYTES}, found {self.size_bytes}")

    @property
    def key(self) -> ExpertKey:
        return ExpertKey(self.layer, self.expert)

    @property
    def is_pruned(self) -> bool:
        """True if the expert is left out: it has no bytes and adds nothing."""
        return self.up.is_pruned

    def spec(self, projection: str) -> QuantSpec:
        """Return the format of one projection. Raises KeyError for a projection that the expert does not have."""
        up_and_down = {"up": self.up, "down": self.down}
        return (up_and_down if self.gate is None else {"gate": self.gate, **up_and_down})[projection]


def unit_offsets(model: ModelSpec, layer: int, specs: dict[str, QuantSpec]) -> tuple[dict[str, int], int]:
    """Return the byte offset of each projection inside its expert, and the expert's padded size.

    Source: docs/format.md, Expert files.
    Raises ValueError if a format cannot hold the projection.
    """
    offsets, end = {}, 0
    for projection in model.layers[layer].experts.projections:
        offsets[projection] = round_up(end, UNIT_ALIGNMENT_BYTES)
        end = offsets[projection] + specs[projection].packed_bytes(*model.unit_shape(layer, projection))
    return offsets, round_up(end, EXPERT_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """One weight of `dense.safetensors`: a packed matrix, or a norm as a plain 16-bit vector.

    xxh3: checksum of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    spec: QuantSpec
    xxh3: str

    def __post_init__(self) -> None:
        _check_checksum(self.xxh3)


def version_of(
    model: ModelSpec, dense: Iterable[DenseEntry], experts: Iterable[ExpertEntry], path_sets: bool = False
) -> int:
    """Return the lowest format version that has the model, the entries' formats, and exact sets in the path tables."""
    specs = {entry.spec for entry in dense}
    for expert in experts:
        specs.update(spec for spec in (expert.gate, expert.up, expert.down) if spec is not None)
    least = PATH_SETS_VERSION if path_sets else min(FORMAT_VERSIONS)
    return max((least, model.format_version, *(spec.format_version for spec in specs)))


@dataclass(frozen=True, slots=True)
class CostSummary:
    """Sizes and read costs of the bundle.

    Packed bytes include scales and no padding. Padded bytes are read from storage.
    expected_read_bytes_per_token: sum over decoder layers of popularity x padded bytes; cold cache, no reuse.
    minimum_expert_bytes: padded bytes of the largest top_k experts of any one layer. A run needs at least these.
    state_bytes: recurrent states of one sequence.
    """

    expert_packed_bytes: int
    expert_padded_bytes: int
    dense_packed_bytes: int
    expert_bits_per_weight: float
    expected_read_bytes_per_token: int
    minimum_expert_bytes: int
    kv_bytes_per_position: int
    state_bytes: int = field(default=0, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class CalibrationSummary:
    """Text from which the statistics come.

    data_sha256: digest of the rendered items in order.
    """

    task: str
    data_sha256: str
    items: int
    tokens: int
    seed: int
    experts_without_tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_digest(self.data_sha256)
        if self.items < 0 or self.tokens < 0:
            raise ValueError("items and tokens must not be negative")


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """The device profile that the bundle was compiled for."""

    profile: str
    profile_sha256: str
    memory_budget_bytes: int
    recommended_cache_bytes: int

    def __post_init__(self) -> None:
        _check_digest(self.profile_sha256)
        if self.memory_budget_bytes < 0 or self.recommended_cache_bytes < 0:
            raise ValueError("memory_budget_bytes and recommended_cache_bytes must not be negative")


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """The checkpoint: its folder or hub name (no path) and its files."""

    name: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """All data that a runtime needs before it reads a weight.

    Raises ValueError if fields contradict each other:
    * the version is not the lowest one that has its formats.
    * an expert is missing or occurs twice.
    * a size differs from that of its formats.
    * ranges overlap.
    * a dense weight has the wrong shape.
    * a file is not listed.
    * a cost differs from that of the formats.
    * path tables have exact sets, and tokens do not choose equally many experts, at least two, in all routed layers.

    path_sets: the keys of the path tables are exact sets of experts. False: pairs.
    """

    format_version: int
    producer: str
    name: str
    certified: bool
    layout: str
    model: ModelSpec
    device: DeviceSummary
    cost: CostSummary
    calibration: CalibrationSummary | None
    source: SourceSummary
    options: dict[str, str]
    required_cpu_features: tuple[str, ...]
    dense: tuple[DenseEntry, ...]
    experts: tuple[ExpertEntry, ...]
    files: tuple[FileEntry, ...]
    low_experts: tuple[ExpertEntry, ...] = field(default=(), metadata=OPTIONAL)
    path_sets: bool = field(default=False, metadata=OPTIONAL)

    @property
    def pruned_experts(self) -> list[list[int]]:
        """Experts of each layer that are left out."""
        pruned: list[list[int]] = [[] for _ in self.model.layers]
        for entry in self.experts:
            if entry.is_pruned:
                pruned[entry.layer].append(entry.expert)
        return pruned

    @property
    def stored_experts(self) -> tuple[ExpertEntry, ...]:
        """All entries in the expert files: every expert, then the low versions."""
        return (*self.experts, *self.low_experts)

    def __post_init__(self) -> None:
        if self.layout != LAYOUT:
            raise ValueError(f"layout: expected `{LAYOUT}`, found `{self.layout[:40]}`")
        needed = version_of(self.model, self.dense, self.stored_experts, self.path_sets)
        if self.format_version != needed:
            raise ValueError(f"format_version: its contents need {needed}, found {self.format_version}")
        if self.required_cpu_features:
            raise ValueError(
                f"required_cpu_features: expected no instruction set, found `{self.required_cpu_features[0][:40]}`"
            )
        if self.path_sets:
            check_path_sets(self.model)
        names = [entry.name for entry in self.files]
        if len(set(names)) != len(names) or MANIFEST_NAME in names:
            raise ValueError("files: a name occurs twice, or the manifest lists itself")
        sizes = {entry.name: entry.size_bytes for entry in self.files}
        self._check_experts(sizes)
        self._check_low_experts(sizes)
        self._check_dense()
        self._check_cost()

    def _check_experts(self, file_sizes: dict[str, int]) -> None:
        count = sum(layer.experts.count for layer in self.model.layers)
        # The count comes first: the model may claim far more experts than the manifest lists.
        if len(self.experts) != count or tuple(entry.key for entry in self.experts) != self.model.expert_keys():
            raise ValueError(f"experts: expected all {count} of the model once each, in order")
        self._check_entries("experts", self.experts, experts_file_name, file_sizes)
        kept_by_layer: list[list[bool]] = [[] for _ in self.model.layers]
        for entry in self.experts:
            kept_by_layer[entry.layer].append(not entry.is_pruned)
        for index, (layer, is_stored) in enumerate(zip(self.model.layers, kept_by_layer, strict=True)):
            if not all(is_stored) and (not layer.experts.can_lose_experts or sum(is_stored) < layer.experts.top_k):
                raise ValueError(
                    f"experts: layer {index} leaves {is_stored.count(False)} of {len(is_stored)} out, "
                    "and its router needs "
                    + (f"{layer.experts.top_k}" if layer.experts.can_lose_experts else "all of them")
                )

    def _check_low_experts(self, file_sizes: dict[str, int]) -> None:
        sizes = {entry.key: entry.size_bytes for entry in self.experts}
        keys = [entry.key for entry in self.low_experts]
        if keys != sorted(set(keys)):
            raise ValueError("low_experts: expected each at most once, in order")
        for entry in self.low_experts:
            if entry.is_pruned:
                raise ValueError(f"low_experts[{entry.layer}, {entry.expert}]: a version must have bytes")
            if entry.size_bytes >= sizes.get(entry.key, 0):
                raise ValueError(f"low_experts[{entry.layer}, {entry.expert}]: not smaller than the expert itself")
        self._check_entries("low_experts", self.low_experts, low_experts_file_name, file_sizes)

    def _check_entries(
        self,
        field_name: str,
        entries: tuple[ExpertEntry, ...],
        file_name: Callable[[int], str],
        file_sizes: dict[str, int],
    ) -> None:
        end: dict[str, int] = {}
        for entry in entries:
            place = f"{field_name}[{entry.layer}, {entry.expert}]"
            projections = self.model.layers[entry.layer].experts.projections
            if (entry.gate is None) == ("gate" in projections):
                raise ValueError(f"{place}: expected formats of {', '.join(projections)}")
            specs = {projection: entry.spec(projection) for projection in projections}
            _, size = unit_offsets(self.model, entry.layer, specs)
            if size != entry.size_bytes:
                raise ValueError(f"{place}: its formats take {size} bytes, size_bytes says {entry.size_bytes}")
            if entry.file != file_name(entry.layer):
                raise ValueError(f"{place}: expected file `{file_name(entry.layer)}`, found `{entry.file}`")
            if entry.offset_bytes < end.get(entry.file, 0):
                raise ValueError(f"{place}: overlaps the expert before it in `{entry.file}`")
            end[entry.file] = entry.offset_bytes + entry.size_bytes
            if end[entry.file] > file_sizes.get(entry.file, -1):
                raise ValueError(f"{place}: lies outside `{entry.file}` or the file is not listed")

    def _check_dense(self) -> None:
        shapes = self.model.dense_shapes()
        if [entry.name for entry in self.dense] != list(shapes):
            raise ValueError("dense: expected every dense weight of the model once, in order")
        for entry in self.dense:
            if entry.shape != shapes[entry.name]:
                raise ValueError(f"dense[{entry.name}]: expected shape {shapes[entry.name]}, found {entry.shape}")
            if keeps_16_bits(entry.name, entry.shape) and entry.spec.bitwidth != 16:
                raise ValueError(f"dense[{entry.name}]: norms, routers and rates stay at 16 bits, found {entry.spec}")
            if entry.spec.is_pruned or not entry.spec.fits(entry.shape[-1]):
                raise ValueError(f"dense[{entry.name}]: format {entry.spec} cannot hold {entry.shape[-1]} columns")

    def _check_cost(self) -> None:
        """Check the numbers that the memory budget uses against the formats."""
        model, cost = self.model, self.cost
        padded: list[list[int]] = [[] for _ in model.layers]
        packed = weights = 0
        for entry in self.experts:
            padded[entry.layer].append(entry.size_bytes)
            for projection in model.layers[entry.layer].experts.projections:
                rows, columns = model.unit_shape(entry.layer, projection)
                packed += rows * round(entry.spec(projection).row_bytes(columns))
                weights += rows * columns
        top_k = [layer.experts.top_k for layer in model.layers]
        decoded = [model.reads_per_token(layer) for layer in range(model.num_layers)]
        dense = sum(
            (entry.shape[0] if len(entry.shape) == 2 else 1) * round(entry.spec.row_bytes(entry.shape[-1]))
            for entry in self.dense
        )
        expected = {
            "expert_packed_bytes": packed,
            "expert_padded_bytes": sum(map(sum, padded)),
            "dense_packed_bytes": dense,
            "minimum_expert_bytes": max(sum(sorted(s)[-k:]) for s, k in zip(padded, top_k, strict=True)),
            "kv_bytes_per_position": model.kv_bytes_per_position,
            "state_bytes": model.state_bytes,
        }
        for name, value in expected.items():
            if getattr(cost, name) != value:
                raise ValueError(f"cost.{name}: the formats give {value}, found {getattr(cost, name)}")
        if not math.isclose(cost.expert_bits_per_weight, 8 * packed / weights, rel_tol=1e-9):
            raise ValueError(f"cost.expert_bits_per_weight: the formats give {8 * packed / weights}")
        most = sum(k * max(sizes, default=0) for sizes, k in zip(padded, decoded, strict=True))
        if not 0 <= cost.expected_read_bytes_per_token <= most:
            raise ValueError("cost.expected_read_bytes_per_token: out of range")

"""Write checkpoint and plan as a bundle folder, complete except for its certificate.

docs/format.md defines the content. One tensor per thread is in memory at a time. Every byte is hashed as it is written.
Equal inputs give equal bytes. The manifest is written last, so a folder without one is no bundle.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import xxhash

from moec.manifests.bundle import (
    CARD_NAME,
    DENSE_NAME,
    DEVICE_NAME,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    QUALITY_NAME,
    TABLES_NAME,
    BundleManifest,
    CalibrationSummary,
    CostSummary,
    DenseEntry,
    DeviceSummary,
    ExpertEntry,
    FileEntry,
    SourceSummary,
    expert_tensor_name,
    experts_file_name,
    low_experts_file_name,
    unit_offsets,
    version_of,
)
from moec.manifests.codec import encode_manifest
from moec.manifests.errors import CheckpointError, OptionError
from moec.manifests.files.output_file import require_free_bytes
from moec.manifests.model import PROJECTIONS, ExpertKey, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import LAYOUT, ROWS_PER_BLOCK, QuantSpec
from moec.manifests.safetensors_header import build_header
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import encode_device

from ..calibration.tables import Tables, encode_tables
from ..families import Lowering
from ..quantization.own_codes import dense_matrices, unit_matrix
from ..quantization.packing import pack, pack_16bit
from ..quantization.quantizers import Quantizer, quantizer
from ..request.plan import CompilePlan
from ..workspace.durable import Disk, StreamingFile, disk_errors
from ..workspace.parallel import Workers, workers
from ..workspace.work_folder import removed_on_failure

PackedUnits = Callable[[UnitKey, QuantSpec], np.ndarray | None]

_DENSE_CHUNK_ROWS = 128 * ROWS_PER_BLOCK  # limits the float32 copies of a large embedding
_MANIFEST_BYTES_PER_EXPERT = 512
_MANIFEST_BASE_BYTES = 1 << 20
_HEADER_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class BundleContent:
    """Content of a bundle, in addition to the weights of the checkpoint.

    plan: the format of every weight.
    device: the device entry of the manifest.
    options: the options entry of the manifest.
    calibration: the calibration entry of the manifest, or None.
    tables: the tables, which also give the expected reads. None: empty tables, equally popular experts.
    profile: the profile of `device.json`. None: the bundle has no such file.
    """

    plan: CompilePlan
    device: DeviceSummary
    options: Mapping[str, str] = field(default_factory=dict)
    calibration: CalibrationSummary | None = None
    tables: Tables | None = None
    profile: DeviceProfile | None = None


def emit(
    lowering: Lowering,
    content: BundleContent,
    partial: Path,
    *,
    packed_units: PackedUnits | None = None,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> BundleManifest:
    """Write all files of the bundle into the folder `partial`. The manifest (certified: false) comes last.

    partial: `NAME.partial`. The remains of a killed run are removed first.
    packed_units: returns the bytes of units that an earlier stage has quantized, None for others.
    progress: called with (weights done, weights in all).
    On any of these errors the folder is removed:
    Raises CheckpointError if weights are not finite, or the format cannot hold them.
    Raises DoesNotFit if the disk is too small.
    Raises MoecError if the disk refuses.
    Raises OptionError.
    """
    if not partial.name.endswith(PARTIAL_SUFFIX):
        raise OptionError(f"`{partial}` does not end in `{PARTIAL_SUFFIX}`, expected the name of an unfinished bundle")
    disk, plan, checkpoint = disk or Disk(), content.plan, lowering.checkpoint
    tables = content.tables or Tables.empty(plan.model)
    tables.check(plan.model)
    small_files = {name: checkpoint.file_bytes(name) for name in checkpoint.companion_files()}
    small_files[TABLES_NAME] = encode_tables(tables)
    if content.profile is not None:
        small_files[DEVICE_NAME] = encode_device(content.profile)
    emitter = _Emitter(lowering, plan, partial, disk, progress)
    with disk_errors(partial):
        disk.remove_tree(partial)
        require_free_bytes(partial.parent, emitter.weight_bytes() + sum(map(len, small_files.values())))
        source = SourceSummary(checkpoint.name, checkpoint.source_files())
        with removed_on_failure(disk, partial):
            disk.make_directory(partial)
            emitter.write_dense()
            emitter.write_experts(quantizer(plan.quantizer), packed_units)
            for file_name, data in small_files.items():
                emitter.write_small(file_name, data)
            manifest = _manifest(content, source, tables, emitter)
            disk.write_file(partial / MANIFEST_NAME, encode_manifest(manifest))
    return manifest


def _manifest(content: BundleContent, source: SourceSummary, tables: Tables, written: _Emitter) -> BundleManifest:
    """Return the manifest of written files, not certified."""
    return BundleManifest(
        format_version=version_of(
            content.plan.model, written.dense, (*written.experts, *written.low_experts), tables.has_path_sets
        ),
        producer=producer(),
        certified=False,
        name=source.name,
        layout=LAYOUT,
        required_cpu_features=(),
        model=content.plan.model,
        device=content.device,
        cost=cost_summary(content.plan, tables.popularity),
        calibration=content.calibration,
        source=source,
        options=dict(sorted(content.options.items())),
        dense=tuple(written.dense),
        experts=tuple(written.experts),
        low_experts=tuple(written.low_experts),
        path_sets=tables.has_path_sets,
        files=tuple(sorted(written.files, key=lambda entry: entry.name)),
    )


def finish(
    partial: Path,
    manifest: BundleManifest,
    quality_bytes: bytes,
    card_bytes: bytes,
    disk: Disk | None = None,
    further: Mapping[str, bytes] | None = None,
) -> BundleManifest:
    """Add quality.json and README.md to an emitted folder, and certify its manifest. The caller publishes the folder.

    further: content of further files by name.

    A crash in between leaves a folder that is not certified.
    Raises DoesNotFit or MoecError if the disk refuses.
    """
    disk = disk or Disk()
    entries = {entry.name: entry for entry in manifest.files}
    with disk_errors(partial):
        for file_name, data in {QUALITY_NAME: quality_bytes, CARD_NAME: card_bytes, **(further or {})}.items():
            disk.write_file(partial / file_name, data)
            entries[file_name] = FileEntry(file_name, len(data), hashlib.sha256(data).hexdigest())
        files = tuple(entries[file_name] for file_name in sorted(entries))
        certified = dataclasses.replace(manifest, certified=True, files=files)
        disk.write_file(partial / MANIFEST_NAME, encode_manifest(certified))
    return certified


def cost_summary(plan: CompilePlan, popularity: np.ndarray | None = None) -> CostSummary:
    """Return the sizes of the bundle.

    popularity: counts [L, E]. None, or a layer of zeros, counts all experts equally.
    Source: docs/format.md, Manifest.
    """
    model = plan.model
    sizes = [
        [plan.expert_padded_bytes(ExpertKey(index, expert)) for expert in range(layer.experts.count)]
        for index, layer in enumerate(model.layers)
    ]
    expected = Fraction(0)
    rows = Tables.empty(model).popularity if popularity is None else popularity
    for layer, (padded, row) in enumerate(zip(sizes, rows.tolist(), strict=True)):
        if not padded:
            continue
        read_counts = [
            count if size else 0 for count, size in zip(row, padded, strict=False)
        ]  # a pruned one is not read
        counts = read_counts if any(read_counts) else [int(size > 0) for size in padded]
        if not any(counts):
            continue
        read = sum(count * size for count, size in zip(counts, padded, strict=True))
        expected += Fraction(model.reads_per_token(layer) * read, sum(counts))
    minimum = (sum(sorted(s)[-layer.experts.top_k :]) for layer, s in zip(model.layers, sizes, strict=True))
    return CostSummary(
        expert_packed_bytes=plan.expert_packed_bytes,
        expert_padded_bytes=sum(map(sum, sizes)),
        dense_packed_bytes=plan.dense_packed_bytes,
        expert_bits_per_weight=plan.bits_per_weight,
        expected_read_bytes_per_token=round(expected),
        minimum_expert_bytes=max(minimum),
        kv_bytes_per_position=model.kv_bytes_per_position,
        state_bytes=model.state_bytes,
    )


def producer() -> str:
    """Return program and version for the manifest."""
    try:
        return f"moec {metadata.version('moec')}"
    except metadata.PackageNotFoundError:
        return "moec (not installed)"


def packed_dense(lowering: Lowering, name: str, spec: QuantSpec) -> Iterator[np.ndarray]:
    """Yield a dense weight in its format, a bounded number of rows at a time. Joined, they are the packed weight.

    Raises CheckpointError. Raises ValueError if the format does not hold it.
    """
    if spec.bitwidth != 16:
        yield from map(pack, dense_matrices(lowering, name, spec))
        return
    weight = lowering.dense_weight(name)
    if weight.ndim == 1:
        yield weight.view(torch.uint8).numpy()
    else:
        yield from (pack_16bit(rows, spec) for rows in torch.split(weight, _DENSE_CHUNK_ROWS))


class _Emitter:
    """Writes the files of one bundle and collects their entries."""

    def __init__(
        self, lowering: Lowering, plan: CompilePlan, partial: Path, disk: Disk, progress: Progress | None
    ) -> None:
        self._lowering, self._plan, self._partial, self._disk = lowering, plan, partial, disk
        self._progress = progress
        self._dense_sources = {weight.name for weight in lowering.dense.values()}
        self._done, self._total = 0, len(plan.dense) + len(plan.units) + len(plan.low_units)
        self.files: list[FileEntry] = []
        self.dense: list[DenseEntry] = []
        self.experts: list[ExpertEntry] = []
        self.low_experts: list[ExpertEntry] = []

    def weight_bytes(self) -> int:
        """Return the bytes on disk of weights and manifest, rounded up."""
        keys = self._plan.model.expert_keys()
        total = sum(self._plan.expert_padded_bytes(key) for key in keys)
        total += sum(self._plan.expert_padded_bytes(key, is_low=True) for key in self._plan.low_experts)
        total += sum(_dense_bytes(shape, self._plan.dense[n]) for n, shape in self._plan.model.dense_shapes().items())
        return total + (len(keys) + len(self._plan.low_experts)) * _MANIFEST_BYTES_PER_EXPERT + _MANIFEST_BASE_BYTES

    def write_small(self, name: str, data: bytes) -> None:
        """Write one whole small file."""
        with self._disk.create(self._partial / name) as file:
            file.write(data)
        self._finished(name, file, len(data))

    def write_dense(self) -> None:
        """Write `dense.safetensors`. Source: docs/format.md, Dense weights."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self._plan.model.dense_shapes().items():
            spec = self._plan.dense[name]
            tensors[name] = ("U8", (_dense_bytes(shape, spec),))
            if len(shape) == 1:
                tensors[name] = (_HEADER_DTYPES[spec.float_type], shape)
        header = build_header(tensors)
        size = len(header)
        with self._disk.create(self._partial / DENSE_NAME) as file:
            file.write(header)
            for name, shape in self._plan.model.dense_shapes().items():
                spec = self._plan.dense[name]
                size += _dense_bytes(shape, spec)
                pieces, checksum = packed_dense(self._lowering, name, spec), xxhash.xxh3_128()
                for piece in self._translated(self._lowering.dense[name].name, pieces):
                    checksum.update(piece.data)
                    file.write(piece.data)
                self.dense.append(DenseEntry(name, shape, spec, checksum.hexdigest()))
                self._step()
        self._finished(DENSE_NAME, file, size)

    def write_experts(self, quantize: Quantizer, packed_units: PackedUnits | None) -> None:
        """Write all expert files, one per layer, then those of low versions. Source: docs/format.md, Expert files."""

        def unit_bytes(key: UnitKey, spec: QuantSpec) -> np.ndarray:
            if spec.bitwidth == 16:
                return pack_16bit(self._lowering.unit(key), spec)
            known = packed_units(key, spec) if packed_units is not None else None
            if known is not None:
                return known
            return pack(unit_matrix(self._lowering, key, spec, quantize))

        # Only one thread reads units of an earlier stage. That takes no time.
        with workers(torch.get_num_threads() if packed_units is None else 1) as pool:
            for layer in self._plan.model.expert_layers:
                self.experts += self._write_layer(layer, unit_bytes, pool, is_low=False)
            for layer in sorted({key.layer for key in self._plan.low_experts}):
                self.low_experts += self._write_layer(layer, unit_bytes, pool, is_low=True)

    def _write_layer(
        self, layer: int, unit_bytes: Callable[[UnitKey, QuantSpec], np.ndarray], pool: Workers, is_low: bool
    ) -> list[ExpertEntry]:
        """Write one expert file. Memory holds one blob per thread, and the blob that is written."""
        every = self._plan.low_experts if is_low else self._plan.model.expert_keys()
        keys = [key for key in every if key.layer == layer]
        sizes = [self._plan.expert_padded_bytes(key, is_low) for key in keys]
        names = [expert_tensor_name(key.expert) for key in keys]
        header = build_header({name: ("U8", (size,)) for name, size in zip(names, sizes, strict=True)})
        name = low_experts_file_name(layer) if is_low else experts_file_name(layer)
        offset, entries = len(header), list[ExpertEntry]()
        with self._disk.create(self._partial / name) as file:
            file.write(header)
            formats = [self._plan.expert_specs(key, is_low) for key in keys]
            jobs = zip(keys, formats, strict=True)
            blobs = pool.in_order(lambda job: self._expert_blob(*job, unit_bytes), jobs, most=pool.count)
            for key, size, specs, blob in zip(keys, sizes, formats, blobs, strict=True):
                checksum = xxhash.xxh3_128_hexdigest(blob.data)
                file.write(blob.data)
                gate, up, down = (specs.get(projection) for projection in PROJECTIONS)
                if up is None or down is None:
                    raise RuntimeError(f"{key}: the plan has no format of up or down")
                entries.append(ExpertEntry(layer, key.expert, name, offset, size, checksum, gate, up, down))
                offset += size
                for _ in specs:
                    self._step()
        self._finished(name, file, offset)
        return entries

    def _expert_blob(
        self, key: ExpertKey, specs: dict[str, QuantSpec], unit_bytes: Callable[[UnitKey, QuantSpec], np.ndarray]
    ) -> np.ndarray:
        """Return one expert in these formats, padded, uint8."""
        offsets, size = unit_offsets(self._plan.model, key.layer, specs)
        blob = np.zeros(size, np.uint8)
        for projection in specs:
            unit = UnitKey(*key, projection)
            source = self._lowering.units[unit].name
            (packed,) = self._translated(source, (unit_bytes(unit, spec) for spec in (specs[projection],)))
            expected = specs[projection].packed_bytes(*self._plan.model.unit_shape(key.layer, projection))
            if len(packed) != expected:
                raise RuntimeError(f"{unit}: the quantizer gave {len(packed)} bytes, the plan says {expected}")
            blob[offsets[projection] : offsets[projection] + len(packed)] = packed
        return blob

    def _translated(self, source: str, pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the pieces. An error of quantizer or packer becomes a CheckpointError that names the tensor."""
        try:
            yield from pieces
        except ValueError as error:
            raise CheckpointError(
                f"tensor `{source}` in `{self._lowering.checkpoint.place}` cannot be stored: {error}",
                "use `--dense-bits 16`"
                if source in self._dense_sources
                else "use more bits, or a target such as `--kl`, which keeps 16 bits for it",
            ) from error

    def _finished(self, name: str, file: StreamingFile, expected_bytes: int) -> None:
        """Record a closed file. Its size must match the plan."""
        if file.size_bytes != expected_bytes:
            raise RuntimeError(f"`{name}` took {file.size_bytes} bytes, the plan says {expected_bytes}")
        self.files.append(FileEntry(name, file.size_bytes, file.sha256))

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _dense_bytes(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Return the bytes of one dense weight in the file."""
    return 2 * shape[0] if len(shape) == 1 else spec.packed_bytes(shape[0], shape[1])

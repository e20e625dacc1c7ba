"""`moec inspect`: the content of a bundle, without running it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...options.opening import bundle_folder
from ...options.paths import bundle_argument, json_option
from ...terminal import output
from ...terminal.report import heat_map, loss_table, verdict_line

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest, ExpertEntry
    from moec.runtime.bundle.open_bundle import Bundle


@click.command("inspect", short_help="Show the content of a bundle: shape, formats, sizes, quality.")
@bundle_argument
@json_option
def inspect_command(bundle: Path, as_json: bool) -> None:
    """Show the content of the bundle in folder BUNDLE. The command reads the manifest and headers, and no weights.

    The map has a line per layer and a block per expert. A higher block has more bits per weight on average. A dot is an
    expert that was left out.

    \b
    moec inspect mixtral-moec
    moec inspect mixtral-moec --json | jq .sizes.expert_packed_bytes
    """
    folder = bundle_folder(bundle)
    from moec.runtime.bundle.open_bundle import open_bundle

    opened = open_bundle(folder)
    facts = describe(opened)
    if as_json:
        output.data_json(facts)
    else:
        quality = _quality_tables(folder, facts["quality"])
        output.data(f"{_page(opened.manifest, facts)}\n\n{quality}")


def describe(bundle: Bundle) -> dict[str, Any]:
    """Return the content of `--json`."""
    from moec.manifests.sizes import option_bytes
    from moec.runtime import kernels
    from moec.runtime.memory.budget import nominal_memory
    from moec.runtime.model.code_path import code_path
    from moec.runtime.options.runtime import RuntimeOptions

    manifest = bundle.manifest
    model, cost = manifest.model, manifest.cost
    layer = model.layers[model.expert_layers[-1]]
    floor = nominal_memory(manifest).floor_bytes
    memory = {"floor_bytes": floor, "option": f"--memory {option_bytes(floor)}", "context": model.default_context}
    return {
        "name": manifest.name,
        "producer": manifest.producer,
        "format_version": manifest.format_version,
        "device": manifest.device.profile,
        "run": run_on_device(bundle),
        "model": {
            "family": model.family,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_positions": model.max_positions,
            "original_positions": model.original_positions,
            "heads": layer.attention.num_heads,
            "kv_heads": layer.attention.num_kv_heads,
            "experts": layer.experts.count,
            "top_k": layer.experts.top_k,
            "expert_width": layer.experts.width,
            "expert_weights": expert_weights(manifest),
            "dense_weights": dense_weights(manifest),
        },
        "formats": {
            "experts": format_counts(manifest),
            "dense": dict(Counter(str(entry.spec) for entry in manifest.dense)),
            "bits_per_weight": cost.expert_bits_per_weight,
            "pruned_experts": sum(map(len, manifest.pruned_experts)),
            "bits": [[average_bits(manifest, entry) for entry in row] for row in rows_by_layer(manifest)],
        },
        "sizes": _sizes(manifest),
        "memory": memory,
        "calibration": None if manifest.calibration is None else _calibration(manifest),
        "options": manifest.options,
        "kernels": {"active": kernels.active(), "available": list(kernels.available())},
        "code_path": code_path(manifest, RuntimeOptions()).to_plain(),
        "quality": _summary(read_quality(bundle)),
    }


def run_on_device(bundle: Bundle) -> dict[str, Any] | None:
    """Return the settings of a run on the device of a bundle, and whether this machine is one; None without a profile.

    Raises BundleError, StorageReadFailed.
    """
    from moec.profiles.present_machine import first_difference, slower_kernels
    from moec.runtime.bundle.device_file import device_of

    from ...options.profile_defaults import run_settings

    profile = device_of(bundle)
    if profile is None:
        return None
    cache_bytes = bundle.manifest.device.recommended_cache_bytes
    settings = {"options": run_settings(profile), "expert_cache_bytes": cache_bytes}
    return {**settings, "difference": first_difference(profile), "slower": slower_kernels(profile)}


def _sizes(manifest: BundleManifest) -> dict[str, int]:
    cost = manifest.cost
    return {
        "bundle_bytes": sum(entry.size_bytes for entry in manifest.files),
        "expert_packed_bytes": cost.expert_packed_bytes,
        "expert_padded_bytes": cost.expert_padded_bytes,
        "expert_16_bit_bytes": 2 * expert_weights(manifest),
        "low_expert_bytes": sum(entry.size_bytes for entry in manifest.low_experts),
        "dense_packed_bytes": cost.dense_packed_bytes,
        "dense_16_bit_bytes": 2 * dense_weights(manifest),
        "expected_read_bytes_per_token": cost.expected_read_bytes_per_token,
        "minimum_expert_bytes": cost.minimum_expert_bytes,
        "kv_bytes_per_position": cost.kv_bytes_per_position,
    }


def _calibration(manifest: BundleManifest) -> dict[str, Any] | None:
    from moec.manifests.codec import to_plain

    plain: dict[str, Any] | None = to_plain(manifest.calibration)
    return plain


def expert_weights(manifest: BundleManifest) -> int:
    """Return the number of weights in routed experts."""
    model = manifest.model
    experts = [layer.experts for layer in model.layers]
    return sum(len(each.projections) * each.count * each.width * model.hidden_size for each in experts)


def dense_weights(manifest: BundleManifest) -> int:
    """Return the number of all other weights."""
    count = 0
    for shape in manifest.model.dense_shapes().values():
        size = 1
        for extent in shape:
            size *= extent
        count += size
    return count


def rows_by_layer(manifest: BundleManifest) -> list[list[ExpertEntry]]:
    """Return the experts of each layer."""
    rows: list[list[ExpertEntry]] = [[] for _ in manifest.model.layers]
    for entry in manifest.experts:
        rows[entry.layer].append(entry)
    return rows


def average_bits(manifest: BundleManifest, entry: ExpertEntry) -> float:
    """Return the mean stored bits of an expert's weights, scales included."""
    model = manifest.model
    columns = {unit.projection: model.unit_shape(unit.layer, unit.projection)[1] for unit in model.units_of(entry.key)}
    bits = (entry.spec(projection).bits_per_weight(width) for projection, width in columns.items())
    # The projections have the same number of weights.
    return round(sum(bits) / len(columns), 4)


def format_counts(manifest: BundleManifest) -> dict[str, dict[str, int]]:
    """Return projection -> format -> number of experts."""
    counts: dict[str, Counter[str]] = {}
    for entry in manifest.experts:
        for unit in manifest.model.units_of(entry.key):
            counts.setdefault(unit.projection, Counter())[str(entry.spec(unit.projection))] += 1
    return {projection: dict(count.most_common()) for projection, count in counts.items()}


def _summary(quality: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the certificate without the trials and tables of the search."""
    known = ("target", "verdict", "tasks", "comparison", "baseline_precision", "own_codes", "lookahead")
    return quality and {name: quality[name] for name in known if name in quality}


def read_quality(bundle: Bundle) -> dict[str, Any] | None:
    """Return `quality.json` of an opened bundle, or None if it has none. Raises BundleIncomplete, ManifestInvalid."""
    from moec.manifests.bundle import QUALITY_NAME
    from moec.manifests.errors import ManifestInvalid
    from moec.manifests.files.limits import MAX_QUALITY_BYTES, QUALITY_JSON
    from moec.manifests.files.strict_json import load_strict_json

    path = bundle.path / QUALITY_NAME
    if not bundle.has_file(QUALITY_NAME):
        return None
    try:
        quality = load_strict_json(bundle.read_file(QUALITY_NAME, MAX_QUALITY_BYTES), QUALITY_JSON)
    except ValueError as problem:
        raise ManifestInvalid(f"`{path}` is not strict JSON: {problem}", "copy the bundle again") from problem
    if not isinstance(quality, dict):
        raise ManifestInvalid(f"`{path}`: expected an object", "copy the bundle again")
    return quality


def _long_context(model: dict[str, Any]) -> str:
    """Return a note on the context from which a run takes the long rotary form; empty if the model has one form."""
    original = model["original_positions"]
    return "" if original == model["max_positions"] else f" (runs of more than {original} take its long rotary form)"


def _page(manifest: BundleManifest, facts: dict[str, Any]) -> str:
    from moec.manifests.path_tables import why_no_paths

    model, sizes, size = facts["model"], facts["sizes"], output.human_bytes
    pruned = facts["formats"]["pruned_experts"]
    pairs: list[tuple[str, object]] = [
        ("bundle", f"{facts['name']}, made by {facts['producer']} for `{facts['device']}`"),
        (
            "model",
            f"{model['family']}, {model['layers']} layers, hidden {model['hidden_size']}, {model['experts']} experts "
            f"of width {model['expert_width']}, top-{model['top_k']}, vocabulary {model['vocab_size']}, context "
            f"{model['max_positions']}{_long_context(model)}",
        ),
        ("files", size(sizes["bundle_bytes"])),
        ("experts", _against_16_bit(sizes["expert_packed_bytes"], sizes["expert_16_bit_bytes"])),
        ("  padded", size(sizes["expert_padded_bytes"])),
        *([("  left out", f"{pruned} of {len(manifest.experts)}")] if pruned else []),
        *([("  low versions", size(sizes["low_expert_bytes"]))] if sizes["low_expert_bytes"] else []),
        ("dense", _against_16_bit(sizes["dense_packed_bytes"], sizes["dense_16_bit_bytes"])),
        ("bits per weight", f"{facts['formats']['bits_per_weight']:.3f} (routed experts, scales included)"),
        ("read per token", f"{size(sizes['expected_read_bytes_per_token'])} expected from a cold cache"),
        (
            "memory floor",
            f"`{facts['memory']['option']}` for a context of {facts['memory']['context']}, of it "
            f"{size(sizes['minimum_expert_bytes'])} for experts",
        ),
        *_run_lines(facts["run"]),
        ("kernels", f"{facts['kernels']['active']} (available: {', '.join(facts['kernels']['available'])})"),
        ("runs with", _code_path_line(facts["code_path"])),
        ("calibration", _calibration_line(facts["calibration"], why_no_paths(manifest.model))),
        *_lookahead_fact(facts["quality"]),
    ]
    parts = (output.facts(pairs), _formats_table(facts), heat_map(facts["formats"]["bits"]))
    return "\n\n".join(parts)


def _run_lines(run: dict[str, Any] | None) -> list[tuple[str, object]]:
    from ...options.profile_defaults import run_text

    if run is None:
        return []
    here = "this machine is one" if run["difference"] is None else f"this machine differs: {run['difference']}"
    here += f"; {run['slower']}" if run["slower"] else ""
    return [("on the device", f"{run_text(run['options'], run['expert_cache_bytes'])}; {here}")]


def _code_path_line(path: dict[str, Any]) -> str:
    from moec.runtime.model.code_path import CodePath

    text = CodePath(path["why_not_native"], path["why_not_one_call"]).to_text()
    return f"{text}, if options are left at their defaults"


def _against_16_bit(packed: int, full: int) -> str:
    return f"{output.human_bytes(packed)} packed, {packed / full:.1%} of {output.human_bytes(full)} at 16 bits"


def _calibration_line(calibration: dict[str, Any] | None, no_paths: str) -> str:
    if calibration is None:
        return "none"
    without = len(calibration["experts_without_tokens"])
    return (
        f"{calibration['task']}, {calibration['items']} items, {calibration['tokens']} tokens"
        f"{f', {without} experts without tokens' if without else ''}{no_paths and f'; {no_paths}'}"
    )


def _lookahead_fact(quality: dict[str, Any] | None) -> list[tuple[str, object]]:
    """Return what learned routers foresee one layer ahead; empty without them, or if the record has another form."""
    try:
        row = (quality or {})["lookahead"]["rows"][0]
        told = (
            f"{row['recall']:.1%} of the choices {row['ahead']} layer ahead foreseen, {row['own_recall']:.1%} without"
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return []
    return [("learned routers", told)]


def _quality_tables(folder: Path, quality: dict[str, Any] | None) -> str:
    """Return the verdict and a line per task. Raises ManifestInvalid if the certificate has another form."""
    from moec.manifests.errors import ManifestInvalid

    if not quality:
        return "quality was not measured"
    try:
        return "\n".join(part for part in (verdict_line(quality), loss_table(quality)) if part)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ManifestInvalid(
            f"`{folder / 'quality.json'}` does not have the form of a certificate: {problem!r}", "compile it again"
        ) from problem


def _formats_table(facts: dict[str, Any]) -> str:
    rows = [
        (projection, ", ".join(f"{count} x {name}" for name, count in counts.items()))
        for projection, counts in facts["formats"]["experts"].items()
    ]
    dense = ", ".join(f"{count} x {name}" for name, count in facts["formats"]["dense"].items())
    return output.table([*rows, ("dense", dense)], ("weights", "formats"))

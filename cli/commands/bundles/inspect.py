"""`moec inspect`: the content of a bundle, without running it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...options.opening import bundle_folder
from ...options.paths import bundle_argument, json_option
from ...terminal import output
from ...terminal.report import heat_map, loss_table, verdict_line

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest
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
    from moec.manifests.errors import ManifestInvalid
    from moec.runtime.bundle.open_bundle import open_bundle

    opened = open_bundle(folder)
    facts = describe(opened)
    if as_json:
        output.data_json(facts)
        return
    quality, tables = facts["quality"], "quality was not measured"
    if quality:
        try:
            tables = "\n".join(table for table in (verdict_line(quality), loss_table(quality)) if table)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ManifestInvalid(
                f"`{folder / 'quality.json'}` does not have the form of a certificate: {problem!r}", "compile it again"
            ) from problem
    output.data(f"{_page(opened.manifest, facts)}\n\n{tables}")


def describe(bundle: Bundle) -> dict[str, Any]:
    """Return the content of `--json`. Raises BundleError, StorageReadFailed."""
    from moec.manifests.codec import to_plain
    from moec.manifests.sizes import option_bytes
    from moec.profiles.probe import first_difference, slower_kernels
    from moec.runtime import kernels
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.engine.mode_line import code_path
    from moec.runtime.memory.budget import nominal_memory
    from moec.runtime.options.runtime import RuntimeOptions

    from ...options.profile_defaults import run_settings

    manifest = bundle.manifest
    model, cost, profile = manifest.model, manifest.cost, device_of(bundle)
    last = model.layers[model.expert_layers[-1]]
    attention = model.attentions[-1] if model.attentions else None
    floor = nominal_memory(manifest).floor_bytes
    experts = [layer.experts for layer in model.layers]
    expert_weights = sum(len(row.projections) * row.count * row.width * model.hidden_size for row in experts)
    dense_weights = sum(map(math.prod, model.dense_shapes().values()))
    formats: dict[str, Counter[str]] = {}
    bits: list[list[float]] = [[] for _ in model.layers]
    for entry in manifest.experts:
        stored = list[float]()
        for unit in model.units_of(entry.key):
            spec = entry.spec(unit.projection)
            formats.setdefault(unit.projection, Counter())[str(spec)] += 1
            stored.append(spec.bits_per_weight(model.unit_shape(unit.layer, unit.projection)[1]))
        # The projections have the same number of weights.
        bits[entry.layer].append(round(sum(stored) / len(stored), 4))
    known = ("target", "verdict", "tasks", "comparison", "baseline_precision", "own_codes", "lookahead")
    quality = read_quality(bundle)
    return {
        "name": manifest.name,
        "producer": manifest.producer,
        "format_version": manifest.format_version,
        "device": manifest.device.profile,
        "run": profile
        and {
            "options": run_settings(profile),
            "expert_cache_bytes": manifest.device.recommended_cache_bytes,
            "difference": first_difference(profile),
            "slower": slower_kernels(profile),
        },
        "model": {
            "family": model.family,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_positions": model.max_positions,
            "original_positions": model.original_positions,
            "heads": attention and attention.num_heads,
            "kv_heads": attention and attention.num_kv_heads,
            "experts": last.experts.count,
            "top_k": last.experts.top_k,
            "expert_width": last.experts.width,
            "expert_weights": expert_weights,
            "dense_weights": dense_weights,
        },
        "formats": {
            "experts": {projection: dict(counts.most_common()) for projection, counts in formats.items()},
            "dense": dict(Counter(str(entry.spec) for entry in manifest.dense)),
            "bits_per_weight": cost.expert_bits_per_weight,
            "pruned_experts": sum(map(len, manifest.pruned_experts)),
            "bits": bits,
        },
        "sizes": {
            "bundle_bytes": sum(entry.size_bytes for entry in manifest.files),
            "expert_packed_bytes": cost.expert_packed_bytes,
            "expert_padded_bytes": cost.expert_padded_bytes,
            "expert_16_bit_bytes": 2 * expert_weights,
            "low_expert_bytes": sum(entry.size_bytes for entry in manifest.low_experts),
            "dense_packed_bytes": cost.dense_packed_bytes,
            "dense_16_bit_bytes": 2 * dense_weights,
            "expected_read_bytes_per_token": cost.expected_read_bytes_per_token,
            "minimum_expert_bytes": cost.minimum_expert_bytes,
            "kv_bytes_per_position": cost.kv_bytes_per_position,
            "state_bytes": cost.state_bytes,
        },
        "memory": {
            "floor_bytes": floor,
            "option": f"--memory {option_bytes(floor)}",
            "context": model.default_context,
        },
        "calibration": to_plain(manifest.calibration),
        "options": manifest.options,
        "kernels": {"active": kernels.active(), "available": list(kernels.available())},
        "code_path": code_path(manifest, RuntimeOptions()).to_plain(),
        # The certificate, without the trials and tables of the search.
        "quality": quality and {name: quality[name] for name in known if name in quality},
    }


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


def _page(manifest: BundleManifest, facts: dict[str, Any]) -> str:
    from moec.manifests.path_tables import why_no_paths
    from moec.runtime.engine.mode_line import CodePath

    from ...options.profile_defaults import run_text

    model, sizes, size, formats = facts["model"], facts["sizes"], output.human_bytes, facts["formats"]
    original, pruned, run, path = (
        model["original_positions"],
        formats["pruned_experts"],
        facts["run"],
        facts["code_path"],
    )
    pairs: list[tuple[str, object]] = [
        ("bundle", f"{facts['name']}, made by {facts['producer']} for `{facts['device']}`"),
        (
            "model",
            f"{model['family']}, {model['layers']} layers, hidden {model['hidden_size']}, {model['experts']} experts "
            f"of width {model['expert_width']}, top-{model['top_k']}, vocabulary {model['vocab_size']}, context "
            f"{model['max_positions']}"
            + f" (runs of more than {original} take its long rotary form)"
            * (original != model["max_positions"]),
        ),
        ("files", size(sizes["bundle_bytes"])),
        ("experts", _against_16_bit(sizes["expert_packed_bytes"], sizes["expert_16_bit_bytes"])),
        ("  padded", size(sizes["expert_padded_bytes"])),
        *([("  left out", f"{pruned} of {len(manifest.experts)}")] if pruned else []),
        *([("  low versions", size(sizes["low_expert_bytes"]))] if sizes["low_expert_bytes"] else []),
        ("dense", _against_16_bit(sizes["dense_packed_bytes"], sizes["dense_16_bit_bytes"])),
        ("bits per weight", f"{formats['bits_per_weight']:.3f} (routed experts, scales included)"),
        ("read per token", f"{size(sizes['expected_read_bytes_per_token'])} expected from a cold cache"),
        (
            "memory floor",
            f"`{facts['memory']['option']}` for a context of {facts['memory']['context']}, of it "
            f"{size(sizes['minimum_expert_bytes'])} for experts",
        ),
    ]
    if run is not None:
        here = "this machine is one" if run["difference"] is None else f"this machine differs: {run['difference']}"
        here += f"; {run['slower']}" if run["slower"] else ""
        pairs.append(("on the device", f"{run_text(run['options'], run['expert_cache_bytes'])}; {here}"))
    code = CodePath(path["why_not_native"], path["why_not_one_call"]).to_text()
    calibration, calibrated = facts["calibration"], "none"
    if calibration is not None:
        calibrated = f"{calibration['task']}, {calibration['items']} items, {calibration['tokens']} tokens"
        if without := len(calibration["experts_without_tokens"]):
            calibrated += f", {without} experts without tokens"
        if no_paths := why_no_paths(manifest.model):
            calibrated += f"; {no_paths}"
    pairs += [
        ("kernels", f"{facts['kernels']['active']} (available: {', '.join(facts['kernels']['available'])})"),
        ("runs with", f"{code}, if options are left at their defaults"),
        ("calibration", calibrated),
    ]
    try:  # what learned routers foresee one layer ahead; the record may have another form
        row = (facts["quality"] or {})["lookahead"]["rows"][0]
        foreseen = f"{row['recall']:.1%} of the choices {row['ahead']} layer ahead foreseen"
        pairs.append(("learned routers", f"{foreseen}, {row['own_recall']:.1%} without"))
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    rows = [
        (weights, ", ".join(f"{count} x {name}" for name, count in counts.items()))
        for weights, counts in {**formats["experts"], "dense": formats["dense"]}.items()
    ]
    return "\n\n".join((output.facts(pairs), output.table(rows, ("weights", "formats")), heat_map(formats["bits"])))


def _against_16_bit(packed: int, full: int) -> str:
    return f"{output.human_bytes(packed)} packed, {packed / full:.1%} of {output.human_bytes(full)} at 16 bits"

"""Completion of an earlier run that has published its bundle, and was perhaps interrupted after that.

A resumed run then finds the output in place and must not refuse it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from moec.manifests.bundle import MANIFEST_NAME, QUALITY_NAME, BundleManifest
from moec.manifests.codec import canonical_json, decode_manifest
from moec.manifests.errors import MoecError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES, MAX_QUALITY_BYTES, QUALITY_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from moec.profiles.device_json import encode_device

from ..bundle.emit import producer
from ..request.plan import CompilePlan, CompileResult
from ..request.request import CompileRequest
from ..workspace.journal import Journal
from ..workspace.work_folder import certified_stage, forget
from .prepared import Prepared


def note_certified(journal: Journal, request: CompileRequest, partial: Path) -> None:
    """Record the bundle that will be published.

    Raises DoesNotFit or MoecError if the disk refuses.
    """
    digest = hashlib.sha256((partial / MANIFEST_NAME).read_bytes()).hexdigest()
    journal.put(
        certified_stage(request.profile.name), canonical_json({"manifest_sha256": digest, "asked": _asked(request)})
    )


def may_be_finished(request: CompileRequest) -> bool:
    """Return whether a resumed run finds a bundle. Its content is not checked.

    Kept measurements resume every run. With `overwrite` alone, it makes the bundle anew.
    """
    resumes = request.resume or (request.takes_up and not request.overwrite)
    return resumes and (request.output / MANIFEST_NAME).is_file()


def complete_earlier_run(prepared: Prepared) -> CompileResult | None:
    """Return the bundle of an earlier run of these inputs, and finish that run if it was interrupted.

    Returns None if the bundle is not the result of such a run.
    Raises OptionError if the work folder holds anything but results of a journal.
    Raises the errors of `request.talk.published`.
    """
    request = prepared.request
    has_work = request.work.is_dir()
    try:
        data = read_input(request.output / MANIFEST_NAME, MAX_MANIFEST_BYTES)
        quality_data = read_input(request.output / QUALITY_NAME, MAX_QUALITY_BYTES)
    except UnreadableFile:
        return None
    try:
        manifest, quality = decode_manifest(data, str(request.output)), load_strict_json(quality_data, QUALITY_JSON)
    except (MoecError, ValueError):
        return None
    result = CompileResult(request.output, plan_of(manifest), quality, device=manifest.device)
    if has_work:
        journal = Journal(request.work, prepared.identity(), request.disk, request.talk.note)
        digest = hashlib.sha256(data).hexdigest()
        certified = canonical_json({"manifest_sha256": digest, "asked": _asked(request)})
        if journal.get(certified_stage(request.profile.name)) != certified:
            return None
        request.talk.published(result)
        if not request.keeps_work:
            forget(journal, certified_stage(request.profile.name))
    elif request.overwrite or not _is_result(manifest, quality, prepared):
        return None
    request.talk.note(f"`{request.output}` is complete: an earlier run of these inputs and options wrote it")
    return result


def _is_result(manifest: BundleManifest, quality: Any, prepared: Prepared) -> bool:
    """Return whether a bundle records the checkpoint, items, options and device of a compile."""
    request = prepared.request
    files = {file.name: file.sha256 for file in prepared.checkpoint.source_files()}
    return (
        (manifest.producer, dict(manifest.options)) == (producer(), prepared.options_plain())
        and (manifest.device.profile, manifest.device.profile_sha256) == (request.profile.name, request.profile.sha256)
        and {file.name: file.sha256 for file in manifest.source.files} == files
        and isinstance(quality, dict)
        and bool(quality.get("modes")) == (request.measure_modes is not None)
        and (not request.options.comparisons or bool(quality.get("comparison")))
    )


def plan_of(manifest: BundleManifest) -> CompilePlan:
    """Return the plan that a bundle stores. Its quantizer is `rtn` if the bundle records no options."""
    units, low_units = dict[UnitKey, QuantSpec](), dict[UnitKey, QuantSpec]()
    for entries, formats in ((manifest.experts, units), (manifest.low_experts, low_units)):
        for entry in entries:
            specs = {"gate": entry.gate, "up": entry.up, "down": entry.down}
            formats.update({UnitKey(entry.layer, entry.expert, p): s for p, s in specs.items() if s is not None})
    ordered = {unit: units[unit] for unit in manifest.model.unit_keys()}
    dense = {entry.name: entry.spec for entry in manifest.dense}
    return CompilePlan(manifest.model, ordered, dense, manifest.options.get("quantizer", "rtn"), low_units)


def _asked(request: CompileRequest) -> list[Any]:
    """Return what changes a bundle but not the identity, because no measurement depends on it."""
    profile = request.profile
    stated = "" if profile.is_probed else hashlib.sha256(encode_device(profile)).hexdigest()
    return [request.options.comparisons, repr(request.measure_modes), profile.name, profile.sha256, stated]

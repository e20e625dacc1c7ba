"""One bundle per device from one set of measurements: calibration, quantization and trials are shared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.bundle import MANIFEST_NAME, FileEntry
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import OptionError
from moec.manifests.files.input_file import read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES

from .bundle.publish import check_replaceable
from .checkpoint.opening import open_checkpoint
from .pipeline import compile_checkpoint
from .preflight.device_fit import predicted_token_ns
from .preflight.preparation import prepare
from .preflight.prepared import Prepared
from .request.options import Talk
from .request.plan import CompileResult
from .request.request import CompileRequest, SharedWork
from .workspace.output_lock import hold_measurements, hold_output
from .workspace.work_folder import work_folder

_LINKING_SUFFIX = ".moec-linking"


def compile_for_devices(
    requests: Sequence[CompileRequest], base: Path, checked: Prepared | None = None
) -> Iterator[CompileResult]:
    """Compile one bundle per request, and yield each when it is complete.

    requests: equal but for profile, output and talk.
    base: path whose `BASE.work` holds the shared measurements, unless the requests name a folder.
    checked: result of `check_devices`, by which devices after the first do not read checkpoint and data again.
    Identical files of the bundles become hard links. Raises the errors of a compile.
    """
    devices = tuple(request.profile.sha256 for request in requests)
    folder, disk, note = requests[0].measurements, requests[0].disk, requests[0].talk.note
    with hold_output(base, disk, note), hold_measurements(folder, disk, note):
        earlier = list[Path]()
        for at, request in enumerate(requests):
            is_first, is_last = at == 0, at == len(requests) - 1
            resumes = request.takes_up if is_first else True
            work = SharedWork(work_folder(base), devices, is_first, is_last)
            shared = replace(request, shared=work, resume=resumes)
            result = compile_checkpoint(shared, None if is_first else checked)
            if result.path is not None:
                link_identical(result.path, earlier)
                earlier.append(result.path)
            yield result


def check_devices(requests: Sequence[CompileRequest]) -> Prepared:
    """Check all devices before any work, and return the checked request of the first one.

    Raises OptionError for two devices of one name, and the errors of a compile.
    """
    names = [request.profile.name for request in requests]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"`--device` has two devices of the name `{twice[0]}`", "name each device once")
    checked: Prepared | None = None
    for request in requests:
        prepared = prepare(replace(request, talk=Talk()), checked)
        checked = checked or prepared
        if not request.plan_only and not request.takes_up:
            check_replaceable(request.output, request.overwrite)
    if checked is None:
        raise OptionError("`--device` names no device", "name one, or leave it out")
    return checked


def link_identical(folder: Path, earlier: Sequence[Path]) -> int:
    """Replace files of a bundle that an earlier bundle has too by hard links. Return the bytes that this saves.

    A file system without links keeps the files.
    """
    known = {(entry.sha256, entry.size_bytes): path / entry.name for path in earlier for entry in _files(path)}
    saved = 0
    for entry in _files(folder):
        same = known.get((entry.sha256, entry.size_bytes))
        if same is None or not entry.size_bytes:
            continue
        target = folder / entry.name
        linking = target.with_name(target.name + _LINKING_SUFFIX)
        with suppress(OSError):
            linking.unlink(missing_ok=True)
            os.link(same, linking)
            os.replace(linking, target)
            saved += entry.size_bytes
    return saved


def _files(folder: Path) -> Sequence[FileEntry]:
    return decode_manifest(read_input(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES), str(folder)).files


def predictions(requests: Sequence[CompileRequest], results: Sequence[CompileResult]) -> list[dict[str, Any]]:
    """Return the predicted time per token of every bundle on every device, as plain values.

    device: whose bundle it is.
    token_ns: by device; None where the bundle does not fit.
    """
    tokenizer_bytes, rows = open_checkpoint(requests[0].source).tokenizer_file_bytes, list[dict[str, Any]]()
    for request, result in zip(requests, results, strict=True):
        token_ns = {}
        for other in requests:
            profile = other.profile.rounded()
            token_ns[other.profile.name] = predicted_token_ns(profile, result.plan, result.popularity, tokenizer_bytes)
        rows.append({"device": request.profile.name, "token_ns": token_ns})
    return rows

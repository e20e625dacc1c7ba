"""Open a bundle for a command: check the path, plan memory, select kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moec.manifests.errors import BundleIncomplete, InputError, MemoryBudgetExceeded

from ..terminal import output
from .profile_defaults import device_facts, say_device

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.options.runtime import RuntimeOptions

R = TypeVar("R")
_REMEDY = "name a folder that `moec compile` wrote, or DIR/current of `moec pull`"


def bundle_folder(path: Path) -> Path:
    """Return the path if it is the folder of a bundle. Raises InputError otherwise."""
    if path.is_dir():
        if not is_bundle(path):
            current = path / "current"  # of a folder that `moec pull` installs into
            remedy = f"name the bundle: {current}" if is_bundle(current) else _REMEDY
            raise InputError(f"`{path}` holds no bundle: `moec.json` is missing", remedy)
        return path
    if path.is_file():
        raise InputError(f"`{path}` is a file, expected a bundle folder", f"if it is packed: moec unpack {path}")
    raise InputError(f"`{path}` does not exist, expected a bundle folder", _REMEDY)


def open_engine(
    path: Path,
    options: RuntimeOptions,
    kernels: str | None = None,
    before_load: Callable[[Bundle], None] | None = None,
    allow_partial: bool = False,
) -> Engine:
    """Open a bundle for a run.

    kernels: instruction set, or None for the best one.
    before_load: called with the opened bundle before memory is planned and weights are read.
    allow_partial: whether to open a bundle that is not certified.
    Raises InputError, BundleError, MemoryBudgetExceeded, OptionError, KernelUnavailable, and errors of `before_load`.
    """
    folder = bundle_folder(path)
    from moec.manifests.path_tables import why_no_paths
    from moec.runtime import kernels as runtime_kernels
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.memory.budget import require_memory_for_manifest

    if kernels is not None:
        runtime_kernels.select(kernels)
    require_memory_for_manifest(folder, options)
    bundle = open_bundle(folder, allow_partial=allow_partial)
    say_device(bundle, options)
    # Options that have nothing to go by, because the bundle has no data, or a model that has no paths.
    if bundle.manifest.calibration is not None:
        if options.prefetch == "path" and (no_paths := why_no_paths(bundle.manifest.model)):
            output.say(f"warning: `prefetch=path` has nothing to go by: {no_paths}")
    else:
        used = [f"`prefetch={options.prefetch}`"] if options.prefetch in ("path", "popularity") else []
        used += [f"`policy={options.policy}`"] if options.policy == "edgemoe" else []
        if used:
            output.say(
                f"warning: `{bundle.path}` was compiled without data and has no statistics, so {' and '.join(used)} "
                "begins with nothing to go by; compile it with `--data`"
            )
    if before_load is not None:
        before_load(bundle)
    return Engine(bundle, options, closes_bundle=True)


def verdict_of(bundle: Path) -> str:
    """Return for which tasks the verdict on a bundle holds; empty without a measured one."""
    from moec.evaluation.verdict_scope import verdict_scope
    from moec.manifests.bundle import QUALITY_NAME
    from moec.runtime.tuning.mode_records import load_record

    return verdict_scope(load_record(bundle / QUALITY_NAME))


def accelerator_facts(engine: Engine) -> dict[str, Any]:
    """Return counts and measured times of the accelerator for `--json`; no entry without one."""
    used = engine.accelerator
    return {} if used is None else {"accelerator": used.to_plain()}


def mode_facts(engine: Engine) -> dict[str, Any]:
    """Return the mode, the code path, and what a profile decides, for `--json`."""
    mode = {"mode": engine.mode.removeprefix("mode: "), "code_path": engine.code_path.to_plain()}
    return mode | device_facts()


def is_bundle(path: Path) -> bool:
    """Return whether a folder is a bundle.

    Raises BundleIncomplete if it has files that only bundles have, but no manifest.
    """
    from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME

    if (path / MANIFEST_NAME).exists():
        return True
    if (path / DENSE_NAME).exists() and (path / TABLES_NAME).exists():
        raise BundleIncomplete(f"`{path}` has no `{MANIFEST_NAME}`, so it is not a complete bundle", "copy it again")
    return False


def with_fitting_slots(use: Callable[[RuntimeOptions], R], options: RuntimeOptions, shrinks: bool = True) -> R:
    """Return the result of `use`, called with the options.

    shrinks: halve the slots until they fit into the memory budget.
    Raises the errors of `use`.
    """
    while True:
        try:
            return use(options)
        except MemoryBudgetExceeded:
            if not shrinks or options.slots == 1:
                raise
            options = replace(options, slots=options.slots // 2)

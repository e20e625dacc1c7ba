"""A finished bundle, measured again: the same data and checkpoint, other plans. The bundle does not change.

The checkpoint and the data are read again, with the options of the manifest. The plan is that of the bundle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from moec.evaluation.long_items import TRUNCATE
from moec.evaluation.tasks import TASKS
from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import CheckpointError, DataError, ManifestInvalid, OptionError
from moec.manifests.quant import BITWIDTHS, QuantSpec
from moec.profiles.device import DeviceProfile

from .bundle.plan_bundles import clear_trials
from .calibration.activation_paths import DEFAULT_PATH_KEYS, PathKeys
from .calibration.collect import training_digest
from .checkpoint.opening import open_checkpoint
from .families import lower
from .preflight.finished import plan_of
from .preflight.preparation import with_fitted_items, with_kept_layers
from .preflight.prepared import Prepared
from .request.options import DEFAULT_GROUP_SIZES, DEFAULT_TORCH_DEVICE, CompileOptions, Sensitivity, Talk
from .request.plan import CompilePlan
from .request.ports import OpenRuntime
from .request.request import CompileRequest
from .request.targets import Target
from .request.task_data import load_task_data
from .search.comparison import can_compare, compare_with_baselines
from .stages.compile_context import CompileContext, open_for_comparison
from .stages.measure import measure
from .workspace.output_lock import hold_measurements, hold_output


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """A finished bundle to measure again, and the inputs of its compile.

    bundle: the folder. Measurements are kept next to it until all are made, if no folder keeps them.
    manifest: manifest of the bundle.
    quality: content of its quality.json.
    source: checkpoint of its compile.
    data: task data of its compile.
    profile: the device. Its kernels decide the formats on offer.
    open_runtime: opens the runtime on plans, whose answers a loss is about.
    resume: whether to continue an interrupted measurement.
    memory_bytes: memory for the measurement; 0: 7/8 of the machine's.
    measurements: folder in which the compile kept its measurements, and which gets the new ones. None: none is used.
    """

    bundle: Path
    manifest: BundleManifest
    quality: Mapping[str, Any]
    source: str
    data: str
    profile: DeviceProfile
    open_runtime: OpenRuntime
    talk: Talk = field(default_factory=Talk)
    resume: bool = False
    memory_bytes: int = 0
    measurements: Path | None = None


@contextmanager
def opened_measurement(
    request: BundleRequest, suffix: str, sensitivity: Sensitivity, offered: tuple[QuantSpec, ...] = ()
) -> Iterator[tuple[CompileContext, CompilePlan]]:
    """Check checkpoint and data against the bundle, and open the journal. Yield its compile and the plan of the bundle.

    suffix: what the names of the measurement's files add to the name of the bundle. Other measurements of this kind
        are kept away, and temporary bundles lie there.
    sensitivity: how losses of units are predicted. With kept measurements: as in the compile.
    offered: formats in which units are measured. Empty: those of the compile.
    Raises OptionError if the bundle has no measurements, or if one layer does not fit in memory.
    Raises CheckpointError or DataError if the checkpoint or the data are not those of the compile.
    Raises the errors of a compile.
    """
    options, talk = options_of(request, sensitivity), request.talk
    output = request.bundle.with_name(request.bundle.name + suffix)
    compiled = CompileRequest(
        source=request.source, output=output, options=options, profile=request.profile,
        open_runtime=request.open_runtime, talk=talk, resume=request.resume,
        memory_bytes=request.memory_bytes, measurements=request.measurements,
    )  # fmt: skip
    checkpoint = open_checkpoint(request.source)
    lowering = lower(checkpoint)
    splits, shots = load_task_data(options, talk.note)
    prepared = with_fitted_items(Prepared(compiled, checkpoint, lowering, splits, shots, offered=offered))
    _check_data(request, prepared)
    prepared = with_kept_layers(prepared)
    talk.note("hashing the checkpoint")
    # Refuse another checkpoint than the bundle's.
    expected = {entry.name: entry.sha256 for entry in request.manifest.source.files}
    present = {entry.name: entry.sha256 for entry in checkpoint.source_files()}
    wrong = sorted(name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name))
    if wrong:
        raise CheckpointError(
            f"`{request.source}` is not the checkpoint that `{request.bundle}` was compiled from: `{wrong[0]}` differs",
            "name that checkpoint with `--model`",
        )
    plan, disk = plan_of(request.manifest), compiled.disk
    identity = hashlib.sha256(f"{prepared.identity()} {plan.digest}".encode()).hexdigest()
    with hold_measurements(request.measurements, disk, talk.note), hold_output(output, disk, talk.note):
        clear_trials(output, disk)
        with open_for_comparison(prepared, identity) as context:
            yield context, plan


def options_of(request: BundleRequest, sensitivity: Sensitivity) -> CompileOptions:
    """Return the options of the bundle's compile that affect measurements.

    Raises OptionError if its compile measured nothing, ManifestInvalid if no compile wrote such options.
    """
    try:
        kind, value = request.quality["target"]["kind"], float(request.quality["target"]["value"])
        if kind == "uniform":
            raise OptionError(
                f"`{request.bundle}` has one format by request: its compile measured no plan",
                "take a bundle that was compiled to a loss, a KL or a size",
            )
        if request.manifest.calibration is None:
            raise OptionError(
                f"`{request.bundle}` was compiled without data: nothing of it was measured",
                "compile it with `--data`",
            )
        _refuse_changed_tasks(request)
        options = _options(request.manifest.options, Target(kind, value), request.data, sensitivity)
        return options if request.measurements is None else _as_compiled(options, request.manifest.options)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestInvalid(
            f"`{request.bundle}` does not record how it was compiled: {error}", "compile it again"
        ) from error


_CHANGES_OF_TASKS = ("chat", "system", "prompt_template", "metric", "lower_is_better")


def _refuse_changed_tasks(request: BundleRequest) -> None:
    """Raise OptionError for a bundle whose tasks are not the project's own: their files are not in the bundle."""
    changed = [name for name in _CHANGES_OF_TASKS if name in request.manifest.options]
    files = [name for name in request.manifest.options["tasks"].split(",") if name and name not in TASKS]
    if changed or files:
        change = f"the task file `{files[0]}.toml`" if files else f"`--{changed[0].replace('_', '-')}`"
        raise OptionError(
            f"`{request.bundle}` was compiled with {change}, which a measurement of the bundle cannot repeat",
            "measure in the compile: `moec compile --comparisons`",
        )


def _options(plain: Mapping[str, str], target: Target, data: str, sensitivity: Sensitivity) -> CompileOptions:
    """Return the options.

    plain: options as `CompileOptions.to_plain` writes them.
    Raises KeyError, ValueError, OptionError.
    """
    groups = tuple(int(size) for size in plain["group_sizes"].split(","))
    return CompileOptions(
        target=target,
        data=data,
        tasks=tuple(name for name in plain["tasks"].split(",") if name),
        bits=tuple(bits for bits in BITWIDTHS if f"{bits:g}" in plain["bits"].split(",")),
        group_sizes=() if groups == DEFAULT_GROUP_SIZES else groups,
        quantizer=plain["quantizer"],
        shots=int(plain["shots"]),
        limit=None if plain["limit"] == "none" else int(plain["limit"]),
        seed=int(plain["seed"]),
        long_items=plain.get("long_items", TRUNCATE),
        sensitivity=sensitivity,
        comparisons=True,
    )


def _as_compiled(options: CompileOptions, plain: Mapping[str, str]) -> CompileOptions:
    """Return options with everything on which kept measurements depend, as the compile had it.

    plain: as for `_options`. Raises KeyError, ValueError, OptionError.
    """
    dense, low, prune = plain["dense_bits"], plain.get("fallback_bits"), plain.get("prune")
    return replace(
        options,
        sensitivity=cast("Sensitivity", plain["sensitivity"]),
        dense_bits=None if dense == "searched" else int(dense),
        fallback_bits=None if low is None else int(low),
        prune=None if prune is None else prune == "true",
        path_keys=cast("PathKeys", plain.get("path_keys", DEFAULT_PATH_KEYS)),
        torch_device=plain.get("torch_device", DEFAULT_TORCH_DEVICE),
    )


def _check_data(request: BundleRequest, prepared: Prepared) -> None:
    """Refuse other data than that of the bundle's compile. An earlier version recorded the train items alone."""
    calibration, options = request.manifest.calibration, request.manifest.options
    recorded = options.get("data_sha256", prepared.options_plain()["data_sha256"])
    if (
        calibration is None
        or calibration.data_sha256 != training_digest(prepared.splits)
        or recorded != prepared.options_plain()["data_sha256"]
    ):
        raise DataError(
            f"`{request.data}` is not the data that `{request.bundle}` was compiled with: its items differ",
            "name that data with `--data`",
        )


COMPARISON_SUFFIX = ".comparison"


def compare_bundle(request: BundleRequest) -> dict[str, Any]:
    """Measure the best uniform format and EdgeMoE's search. Return the entry `comparison` of quality.json.

    Raises OptionError if no baseline exists.
    Raises the errors of `opened_measurement`.
    """
    # The plan is there: predictions decide nothing, and gradients take long.
    with opened_measurement(request, COMPARISON_SUFFIX, "proxy") as (context, plan):
        specs, target = context.prepared.specs, context.prepared.options.target
        if not can_compare(plan, specs):
            raise OptionError(
                f"`{request.bundle}` has nothing to be compared with: no format below 16 bits fits every expert",
                "offer others with `--bits` when you compile",
            )
        trials = measure(context).trials
        return compare_with_baselines(plan, specs, trials, trials.store, target, request.talk).to_json()

"""A compile from beginning to end, on one page. Each stage is a call that takes and returns values.

checkpoint -> preflight -> measure -> price -> search -> compare -> write -> certify -> publish -> bundle

`stages/planning.py` goes on inside `make_plan`, `stages/bundle.py` inside the calls after it.
"""

from __future__ import annotations

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.files.implied_names import is_implied_folder

from .bundle.plan_bundles import clear_trials
from .bundle.publish import check_replaceable, publish_directory, recover_replaced
from .forecast.long_compile import tell_forecast
from .preflight.finished import complete_earlier_run, may_be_finished, note_certified
from .preflight.preparation import prepare
from .preflight.prepared import Prepared
from .request.plan import CompileResult
from .request.request import CompileRequest
from .stages.bundle import complete_bundle, complete_measurements, report, write_certified
from .stages.compile_context import Certified, open_for_compile, open_for_plan, used_popularity
from .stages.planning import make_curve, make_plan
from .walker.torch_device import device_errors
from .workspace.output_lock import hold_measurements, hold_output
from .workspace.work_folder import check_partial, removed_on_failure


def compile_checkpoint(request: CompileRequest, like: Prepared | None = None) -> CompileResult:
    """Run all stages. Afterwards `output` holds a complete bundle, or what it held before.

    With `plan_only` no bundle is written. With `resume` the stages of an interrupted run of the same inputs are reused.
    like: the same request for another device, checked; None: checkpoint and data are read.
    Raises MoecError.
    """
    measurements = (
        request.measurements if request.shared is None else None
    )  # for several devices, one lock holds for all
    lock = hold_measurements(measurements, request.disk, request.talk.note)
    with device_errors(request.options.torch_device), lock:
        if request.plan_only:
            return _plan(request, like)
        with hold_output(request.output, request.disk, request.talk.note):
            return _compile(request, like)


def _plan(request: CompileRequest, like: Prepared | None) -> CompileResult:
    """Return the plan, and the curve of a sweep."""
    prepared = prepare(request, like)
    with open_for_plan(prepared) as context:
        planned = make_plan(context)
        curve = make_curve(prepared, planned, request.sweep) if request.sweep else None
    quality = report(prepared, planned, Certified(), None)
    return CompileResult(None, planned.plan, quality, curve, used_popularity(prepared, planned.statistics))


def _compile(request: CompileRequest, like: Prepared | None) -> CompileResult:
    """Write a bundle. The output is held."""
    output, disk = request.output, request.disk
    partial = output.with_name(output.name + PARTIAL_SUFFIX)
    recover_replaced(disk, output)
    # An output that exists is refused before any work. One that may be the result of these inputs is refused later,
    # because the identity of the inputs is known only after `prepare`.
    may_be_result = may_be_finished(request)
    if not may_be_result:
        check_replaceable(output, request.overwrite)
    if request.measurements is None:
        is_implied_folder(request.work)  # refuses a link
    check_partial(partial)
    clear_trials(output, disk)
    prepared = prepare(request, like)
    if may_be_result:
        finished = complete_earlier_run(prepared)
        if finished is not None:
            return finished
        check_replaceable(output, request.overwrite)
    with open_for_compile(prepared) as context:
        disk.remove_tree(partial)
        tell_forecast(prepared, context.decisions)
        planned = make_plan(context)
        with removed_on_failure(disk, partial):
            planned, manifest, certified = write_certified(context, planned, partial)
            certified = complete_measurements(context, planned, certified, partial)
            quality = report(prepared, planned, certified, manifest)
            complete_bundle(prepared, manifest, certified, quality, partial)
            note_certified(context.decisions, request, partial)
            publish_directory(disk, partial, output, request.overwrite)
        popularity = used_popularity(prepared, planned.statistics)
        result = CompileResult(output, planned.plan, quality, popularity=popularity, device=manifest.device)
        request.talk.published(result)
    return result

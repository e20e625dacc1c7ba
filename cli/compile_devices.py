"""Progress and results of `moec compile --device a,b,c`. The compiles are in `compiler/devices.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moec.manifests.errors import OptionError

from .options.profile_defaults import run_settings, run_text
from .terminal import output
from .terminal.compile_log import CompileLog, stage_table
from .terminal.compile_result import print_result

if TYPE_CHECKING:
    from moec.compiler.request.plan import CompileResult
    from moec.compiler.request.request import CompileRequest
    from moec.profiles.device import DeviceProfile

_LITTLE = 1.01
"""Ratio of two predicted times that counts as equal."""
MakeRequest = Callable[[str, Path, CompileLog], "CompileRequest"]
"""(device, output, log) -> the request of one device."""


def compile_all(
    devices: Sequence[str],
    base: Path,
    make_request: MakeRequest,
    check_output: Callable[[Path], None],
    is_plan: bool,
    as_json: bool,
) -> None:
    """Compile for all devices, and print the results and the predicted speed of each bundle on each device.

    base: each output is `BASE-DEVICE`.
    check_output: raises an error if the outputs of a bundle cannot be written.
    is_plan: no bundle is written.
    Raises OptionError, InputError, and the errors of a compile.
    """
    from moec.compiler.devices import check_devices, compile_for_devices, predictions

    if not all(device.strip() for device in devices):
        raise OptionError("`--device` has an empty name", "write `--device raspberry-pi-5,laptop`")
    logs, requests = list[CompileLog](), list["CompileRequest"]()
    for device in devices:
        log = CompileLog(base)
        request = make_request(device.strip(), base, log)
        request.output = base.with_name(f"{base.name}-{request.profile.name}")
        log.destination = request.output
        logs.append(log)
        requests.append(request)
    for request in requests:
        check_output(request.output)
    checked = check_devices(requests)
    results, compiles = [], compile_for_devices(requests, base, checked)
    for request, log in zip(requests, logs, strict=True):
        with log:
            results.append(next(compiles))
        if not as_json:
            output.data(f"device   {request.profile.name}")
            stages = stage_table(log.stages()) if is_plan else ""
            print_result(results[-1], stages, run_on(request.profile, results[-1]))
            output.data("")
    by_device = {request.profile.name: result for request, result in zip(requests, results, strict=True)}
    sizes = {name: result.plan.expert_packed_bytes for name, result in by_device.items()}
    predicted = predictions(requests, results)
    if as_json:
        qualities = {name: result.quality for name, result in by_device.items()}
        output.data_json({"devices": qualities, "predicted_token_ns": predicted})
        return
    output.data(device_table(predicted, sizes))
    for sentence in device_sentences(predicted, sizes):
        output.data(sentence)


def run_on(profile: DeviceProfile, result: CompileResult) -> str:
    """Return the defaults of a run on the device of a bundle; empty for the probed host, or without a bundle."""
    if profile.is_probed or result.device is None:
        return ""
    return f"on {profile.name} with {run_text(run_settings(profile), result.device.recommended_cache_bytes)}"


def device_table(predicted: Sequence[Mapping[str, Any]], expert_bytes: Mapping[str, int]) -> str:
    """Return a row per bundle and a column per device.

    predicted: `device` and `token_ns` by device, of each bundle.
    expert_bytes: packed bytes of the routed experts, by device.
    """
    devices = [str(row["device"]) for row in predicted]
    header = ("bundle for", "expert bytes", *(f"predicted TPOT on {name}" for name in devices))
    rows = [
        (row["device"], f"{expert_bytes[row['device']]:,}", *(_time(row["token_ns"][name]) for name in devices))
        for row in predicted
    ]
    return output.table(rows, header)


def device_sentences(predicted: Sequence[Mapping[str, Any]], expert_bytes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each device on which the bundle of another device is predicted to be faster, and why."""
    by_device = {str(row["device"]): row["token_ns"] for row in predicted}
    sentences = []
    for name, times_ns in by_device.items():
        fitting = {other: others[name] for other, others in by_device.items() if others[name] is not None}
        best = min(fitting, key=lambda other: fitting[other])
        if times_ns[name] is None or times_ns[name] <= _LITTLE * fitting[best]:
            continue
        fewer = expert_bytes[name] - expert_bytes[best]
        reason = f"it has {fewer:,} expert bytes less" if fewer > 0 else "its popular experts are smaller"
        sentences.append(
            f"on {name} the bundle for {best} is predicted to be faster, {_time(fitting[best])} against "
            f"{_time(times_ns[name])}: {reason}; trials of both plans keep the target"
        )
    return sentences


def _time(token_ns: int | None) -> str:
    return "does not fit" if token_ns is None else output.human_ms(token_ns)

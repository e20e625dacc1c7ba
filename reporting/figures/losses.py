"""The promise of a bundle, loss and KL over bytes of plans, baselines and the bundle, and a table of the plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moec.evaluation.verdict_scope import verdict_scope
from moec.manifests.bundle import BundleManifest
from moec.manifests.path_tables import why_no_paths

from ..curves import Curve
from ..svg.chart import Chart, Point, Scale, Series, scale_of
from ..text import (
    figure,
    nats_text,
    note,
    number,
    paragraph,
    section,
    share_text,
    size_text,
    size_unit,
    table,
    tick_share,
)

_OWN, _REFUSED, _SWAPS, _OTHERS = 0, 6, 5, 1
_OF_THE_SEARCH = ("search", "swaps", "plan", "most precise", "sweep")
_SHOWN_TARGETS = 3.0
"""Losses above this multiple of the target are not drawn. They would hide the others."""
_BASELINE_COLOURS = (1, 2, 3, 4)
_LEAST_KL = 1e-9
_MOST_ROWS = 1000
_VERDICTS = {
    "supported": "The promise is supported: at 95 % confidence the loss is inside the target.",
    "met": "The measured loss is inside the target. The items are too few to support it at 95 % confidence.",
    "missed": "The measured loss exceeds the target, but not at 95 % confidence.",
    "refuted": "The promise is refuted: at 95 % confidence the loss exceeds the target.",
    "measured": "The target was a size. The loss was measured and not promised.",
    "not measured": "The quality was not measured.",
}


def loss_section(quality: Mapping[str, Any], curves: Sequence[Curve]) -> str:
    """Return the section with loss over bytes and KL over bytes."""
    parts = []
    losses = loss_chart(quality, curves)
    divergences = kl_chart(quality, curves)
    if losses is not None:
        parts.append(
            figure(
                losses.to_svg(),
                "Relative loss of the task over the bytes of the routed experts, with 95 % intervals. Plans of the "
                "search are measured on validation items, the bundle on held-out ones. Losses above three times the "
                "target are not drawn.",
            )
        )
    if divergences is not None:
        parts.append(
            figure(
                divergences.to_svg(),
                "Mean KL to the checkpoint on answer tokens of validation items, over the bytes of the routed experts. "
                "Lower and further left is better.",
            )
        )
    parts += [_by_part(quality)] if quality.get("kl_by_part") else []
    return section("loss", "Loss over bytes", *(parts or [note("No plan was measured: the target was a size.")]))


_MAX_PARTS = 16
"""Rows of parts. A compile writes at most six."""


def _by_part(quality: Mapping[str, Any]) -> str:
    """Return the table of each part's bytes and share of the predicted KL, and of the measured KL of all parts."""
    parts, known = quality["kl_by_part"]["predicted"][:_MAX_PARTS], quality["kl_by_part"]["validation_kl"]
    whole = sum(number(row["kl"]) for row in parts) or 1.0
    rows = [
        (str(row["part"]), f"{int(number(row['bytes'])):,}", share_text(number(row["kl"]) / whole, 1), "")
        for row in parts
    ]
    if known is not None:
        rows.append(("all, validation texts, activations in 32 bits", "", "", nats_text(number(known))))
    held_out = {name: task["kl"] for name, task in quality["tasks"].items()} | quality.get("held_out_kl", {})
    for name, kl in held_out.items():
        rows.append((f"all, held-out texts of {name}, activations in 8 bits", "", "", nats_text(number(kl["mean"]))))
    told = (
        "The KL of a part is predicted on all tokens, as if it alone were quantized, so only shares compare. That of "
        "all parts is measured on answers: by torch, and by the runtime, which rounds activations to 8 bits."
    )
    return paragraph(told) + table(("part", "bytes", "share of the predicted KL", "measured KL"), rows)


def loss_chart(quality: Mapping[str, Any], curves: Sequence[Curve] = ()) -> Chart | None:
    """Return the chart of losses of the first task; None without a measured loss."""
    target, accepted, refused, others = quality["target"], list[Point](), list[Point](), list[Point]()
    most = _SHOWN_TARGETS * number(target["value"]) if target["kind"] == "loss" else float("inf")
    for trial in quality["trials"]:
        for loss in list(trial["losses"].values())[:1]:
            size = int(number(trial["expert_packed_bytes"]))
            point = _loss_point(size, loss, f"{trial['purpose']}, {'accepted' if trial['accepted'] else 'refused'}")
            if point.y <= most:
                is_own = trial["purpose"] in _OF_THE_SEARCH
                (others if not is_own else accepted if trial["accepted"] else refused).append(point)
    certified = list[Point]()
    for name, task in list(quality["tasks"].items())[:1]:
        if task.get("loss") is not None:
            size = int(number(quality["sizes"]["expert_packed_bytes"]))
            certified.append(_loss_point(size, task["loss"], f"this bundle, {name}, held-out items"))
    series = [
        Series("plan of a baseline", others, _OTHERS, "square"),
        Series("plan of the search, refused", refused, _REFUSED, "ring"),
        Series("plan of the search, kept", accepted, _OWN, "dot"),
        *_curve_series(curves, lambda point: point.loss),
        Series("this bundle, certificate", certified, _OWN, "diamond"),
    ]
    points = [point for row in series for point in row.points]
    if not points:
        return None
    level = None
    values = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    if target["kind"] == "loss":
        value = number(target["value"])
        level = (value, f"target {share_text(value)}")
        values.append(value)
    x = _bytes_scale(points)
    y = scale_of(values, "relative loss", tick_share, from_zero=True)
    return Chart("Relative loss over bytes of the experts", x, y, series, level)


def kl_chart(quality: Mapping[str, Any], curves: Sequence[Curve] = ()) -> Chart | None:
    """Return the chart of KL over bytes; None without a measured KL."""
    searched, swapped = list[Point](), list[Point]()
    for trial in quality["trials"]:
        if trial["kl"] is None or trial["purpose"] not in ("search", "swaps", "plan", "sweep"):
            continue
        point = _kl_point(int(number(trial["expert_packed_bytes"])), number(trial["kl"]["mean"]), trial["purpose"])
        (swapped if trial["purpose"] == "swaps" else searched).append(point)
    series, certified = list[Series](), list[Point]()
    comparison = quality.get("comparison")
    for colour, baseline in zip(_BASELINE_COLOURS, comparison["baselines"] if comparison else [], strict=False):
        points = [_kl_point(int(number(size)), number(kl), baseline["name"]) for size, kl in baseline["frontier"]]
        series.append(Series(str(baseline["name"]), points, colour, "square", is_line=True))
    if comparison is not None:
        size = int(number(quality["sizes"]["expert_packed_bytes"]))
        certified.append(_kl_point(size, number(comparison["plan_kl"]), "this bundle"))
    series += [
        Series("swaps at equal bytes", swapped, _SWAPS, "cross"),
        Series("plan of the search", searched, _OWN, "dot"),
        *_curve_series(curves, lambda point: point.kl),
        Series("this bundle", certified, _OWN, "diamond"),
    ]
    points = [point for row in series for point in row.points]
    if not points:
        return None
    x = _bytes_scale(points)
    y = scale_of([point.y for point in points], "KL, nats per token", nats_text, is_log=True)
    return Chart("KL over bytes of the experts", x, y, series)


def _bytes_scale(points: Sequence[Point]) -> Scale:
    sizes = [point.x for point in points]
    return scale_of(sizes, "bytes of the routed experts", size_text, is_log=True, unit=size_unit(max(sizes)))


def _loss_point(size: int, loss: Mapping[str, Any], title: str) -> Point:
    value = number(loss["loss"])
    low, high = ((None if end is None else number(end)) for end in loss["interval95"])
    return Point(size, value, f"{title}: {size:,} bytes, loss {share_text(value)}", low, high)


def _kl_point(size: int, kl: float, title: str) -> Point:
    return Point(size, max(kl, _LEAST_KL), f"{title}: {size:,} bytes, KL {nats_text(kl)}")


def _curve_series(curves: Sequence[Curve], value: Any) -> list[Series]:
    """Return a dashed line for each curve that has such values."""
    series = []
    for number_of, curve in enumerate(curves):
        points = [
            Point(point.expert_bytes, value(point), f"{curve.name}: {point.expert_bytes:,} bytes")
            for point in curve.points
            if value(point) is not None and value(point) > 0
        ]
        if points:
            series.append(Series(curve.name, points, (number_of + 1) % 7, "dot", is_line=True, is_dashed=True))
    return series


def trials_section(quality: Mapping[str, Any]) -> str:
    """Return the section with a table of all trials."""
    trials = quality["trials"]
    if not trials:
        return section("trials", "Every plan that was measured", note("None: the target named the formats."))
    rows = [_trial_row(at, trial) for at, trial in enumerate(trials[:_MOST_ROWS], 1)]
    header = ("", "purpose", "expert bytes", "bits per weight", "KL", "loss", "items", "verdict")
    more = "" if len(trials) <= _MOST_ROWS else note(f"{len(trials) - _MOST_ROWS} further trials are in quality.json.")
    shown = f"<details><summary>{len(trials)} measurements</summary>{table(header, rows, 'trials')}{more}</details>"
    return section("trials", "Every plan that was measured", shown)


def _trial_row(at: int, trial: Mapping[str, Any]) -> tuple[str, ...]:
    losses = list(trial["losses"].values())
    accepted = trial["accepted"]
    return (
        str(at),
        str(trial["purpose"]),
        f"{int(number(trial['expert_packed_bytes'])):,}",
        f"{number(trial['bits_per_weight']):.3f}",
        "" if trial["kl"] is None else nats_text(number(trial["kl"]["mean"])),
        ", ".join(share_text(number(loss["loss"])) for loss in losses),
        ", ".join(f"{int(number(loss['n'])):,}" for loss in losses),
        "" if accepted is None else "kept" if accepted else "refused",
    )


def promise_section(manifest: BundleManifest, quality: Mapping[str, Any] | None) -> str:
    """Return the section with target, verdict, measured loss and sizes."""
    title = "What was promised, and how it was shown"
    model, cost = manifest.model, manifest.cost
    layer = model.layers[model.expert_layers[-1]].experts
    left_out = sum(entry.is_pruned for entry in manifest.experts)
    facts = [
        ("model", f"{model.family}, {model.num_layers} layers, {layer.count} experts, {layer.top_k} for each token"),
        ("compiled for", manifest.device.profile),
        ("target", target_text(quality)),
        ("experts", f"{size_text(cost.expert_packed_bytes)}, {cost.expert_bits_per_weight:.3f} bits per weight"),
        ("left out", f"{left_out} of {len(manifest.experts)} experts"),
        ("other weights", size_text(cost.dense_packed_bytes)),
        ("read per token", f"{size_text(cost.expected_read_bytes_per_token)} with an empty cache"),
    ]
    no_paths = why_no_paths(model) if manifest.calibration is not None else ""
    facts += [("path table", no_paths.removeprefix("no path table: "))] if no_paths else []
    parts = [table(("", ""), facts, "facts")]
    if quality is None:
        return section("promise", title, paragraph(_VERDICTS["not measured"]), *parts)
    verdict = str(quality["verdict"])
    css = verdict.replace(" ", "-") if verdict in _VERDICTS else "unknown"
    parts.insert(0, f'<p class="verdict {css}">{_VERDICTS.get(verdict, "The verdict is unknown.")}</p>')
    scope = verdict_scope(quality)
    parts[1:1] = [paragraph(f"{scope[0].upper()}{scope[1:]}.")] if scope else []
    rows = [_task_row(name, task) for name, task in quality["tasks"].items()]
    if rows:
        header = (
            "task",
            "metric",
            "held-out items",
            "baseline",
            "this bundle",
            "loss",
            "95 % interval",
            "KL",
            "verdict",
        )
        parts.append(table(header, rows))
        parts.append(
            paragraph(
                "Calibration, search and this certificate read disjoint items. The interval is paired: baseline and "
                "bundle answered the same items."
            )
        )
    parts += [_tested(quality["tested"])] if quality.get("tested") else []
    parts += [_gain(quality)] if quality.get("comparison") else []
    return section("promise", title, *parts)


def target_text(quality: Mapping[str, Any] | None) -> str:
    """Return the target in words."""
    if quality is None:
        return "none"
    kind, value = quality["target"]["kind"], quality["target"]["value"]
    if kind == "loss":
        return f"a relative loss of at most {share_text(number(value))}"
    if kind == "kl":
        return f"a mean KL of at most {nats_text(number(value))} nats per token"
    return f"{kind} {value}"


def _task_row(name: str, task: Mapping[str, Any]) -> tuple[str, ...]:
    loss, verdict = task.get("loss"), task.get("verdict")
    ends = [] if loss is None else loss["interval95"]
    interval = " to ".join("no bound" if end is None else share_text(number(end)) for end in ends)
    kl = task.get("kl")
    return (
        name,
        str(task["metric"]),
        f"{int(number(task['n'])):,}",
        f"{number(task['baseline']):.4g}",
        f"{number(task['value']):.4g}",
        "" if loss is None else share_text(number(loss["loss"])),
        interval,
        "" if kl is None else nats_text(number(kl["mean"])),
        "" if verdict is None else str(verdict["status"]),
    )


_MAX_TESTED = 16
"""Rows of tested plans. A compile writes at most three."""


def _tested(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return the plans that were tested in turn, until one was supported."""
    rows = []
    for plan in plans[:_MAX_TESTED]:
        kind, text = ("losses", share_text) if "losses" in plan else ("kl", nats_text)
        bounds = [number(bound) for bound in plan["bounds"].values() if bound is not None]
        rows.append(
            (
                f"{number(plan['bits_per_weight']):.3f}",
                f"{int(number(plan['expert_packed_bytes'])):,}",
                ", ".join(text(number(value)) for value in plan[kind].values()),
                ", ".join(map(text, bounds)) if len(bounds) == len(plan["bounds"]) else "no bound",
                share_text(0.05 * number(plan["share_of_error"])),
                str(plan["verdict"]),
            )
        )
    header = ("plan, bits per weight", "expert bytes", "loss or KL", "bound", "error of the bound", "verdict")
    told = "These plans were listed before held-out items were read. They were tested in turn, until one was supported."
    return paragraph(told) + table(header, rows)


def _gain(quality: Mapping[str, Any]) -> str:
    """Return the bytes of the baselines of the search that keep the same target."""
    bundle_bytes = int(number(quality["sizes"]["expert_packed_bytes"]))
    rows = [("this bundle", f"{bundle_bytes:,}", "", "")]
    for baseline in quality["comparison"]["baselines"]:
        size, equal = baseline.get("expert_packed_bytes"), baseline.get("gain_at_equal_kl")
        at_target = baseline.get("gain_at_target")
        rows.append(
            (
                str(baseline["name"]),
                "none keeps it" if size is None else f"{int(number(size)):,}",
                "" if at_target is None else share_text(number(at_target), 1),
                "" if equal is None else share_text(number(equal), 1),
            )
        )
    return table(("plan", "expert bytes at the target", "saved by this bundle", "saved at equal KL"), rows)

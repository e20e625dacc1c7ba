"""The promise of a bundle, and how it was shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moec.evaluation.verdict_scope import verdict_scope
from moec.manifests.bundle import BundleManifest
from moec.manifests.path_tables import why_no_paths

from ..text import nats_text, number, paragraph, section, share_text, size_text, table

_VERDICTS = {
    "supported": "The promise is supported: at 95 % confidence the loss is inside the target.",
    "met": "The measured loss is inside the target. The items are too few to support it at 95 % confidence.",
    "missed": "The measured loss exceeds the target, but not at 95 % confidence.",
    "refuted": "The promise is refuted: at 95 % confidence the loss exceeds the target.",
    "measured": "The target was a size. The loss was measured and not promised.",
    "not measured": "The quality was not measured.",
}


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

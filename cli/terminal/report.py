"""quality.json as text: tables and a heat map for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, log2
from typing import Any

from . import output

Quality = Mapping[str, Any]
_PROJECTIONS = ("gate", "up", "down")
_percent = partial(output.human_share, decimals=2)
_MAP_BLOCKS, _MOST_EXPERTS = 64, 24
"""Columns of a map of blocks, and largest number of experts whose digits fit into 110 columns."""
_LARGEST_BITS = 16
_SIGNS = {"t": "three values", "0": "left out", "F": "16 bits"}


def plan_heat_map(quality: Quality) -> str:
    """Return the bits of every unit: a line per layer, two or three signs per expert.

    The signs are those of gate (if it exists), up and down. If a layer has too many experts for a line, the result is
    a map of their averages.
    """
    units, body = quality["bits"]["units"], list[str]()
    layers = [
        [units[name][layer] for name in _PROJECTIONS if units[name][layer]] for layer in range(len(units["down"]))
    ]
    if max(map(len, units["down"]), default=0) > _MOST_EXPERTS:
        body = [heat_map([[sum(bits) / len(bits) for bits in zip(*layer, strict=True)] for layer in layers])]
    else:
        rows = [" ".join("".join(map(_digit, bits)) for bits in zip(*layer, strict=True)) for layer in layers]
        *first, last = _PROJECTIONS[-max(map(len, layers)) :]
        used = set("".join(rows))
        signs = ", ".join(f"{sign} = {meaning}" for sign, meaning in _SIGNS.items() if sign in used)
        body = [f"whole bits of {', '.join(first)} and {last} for each expert" + (f" ({signs})" if signs else "")]
        body += [f"layer {number:>3}  {row or 'no routed experts'}" for number, row in enumerate(rows)]
    body.append("formats    " + ", ".join(f"{name} x{count}" for name, count in quality["bits"]["formats"].items()))
    down = [bits for row in units["down"] for bits in row]
    if left_out := down.count(0):
        body.append(f"left out   {left_out} of {len(down)} experts (`--keep-experts` keeps all)")
    return "\n".join(body)


def heat_map(bits: Sequence[Sequence[float]]) -> str:
    """Return a line per layer, with a block per expert and the layer's average. With many experts a block is several.

    An expert that is left out has a dot in place of a block.
    bits: mean bits of every expert of every layer, [L][E].
    """
    per_cell = -(-max(map(len, bits)) // _MAP_BLOCKS)
    merged = f"; a block is {per_cell} experts" if per_cell > 1 else ""
    cells = [[row[at : at + per_cell] for at in range(0, len(row), per_cell)] for row in bits]
    left_out = f", {output.dot()} left out" if any(not any(cell) for row in cells for cell in row) else ""
    scale = f"{output.block(0)} 1, {output.block(1)} {_LARGEST_BITS}"
    lines = [f"bits per layer and expert ({scale}{left_out}{merged})"]
    for layer, row in enumerate(bits):
        blocks = "".join(
            # The height is logarithmic, from 1 to _LARGEST_BITS.
            output.block(log2(max(1.0, min(sum(cell) / len(cell), _LARGEST_BITS))) / log2(_LARGEST_BITS))
            if any(cell)
            else output.dot()
            for cell in cells[layer]
        )
        average = f"{blocks}  {sum(row) / len(row):.2f}" if row else "no routed experts"
        lines.append(f"layer {layer:>{len(str(len(bits) - 1))}}  {average}")
    return "\n".join(lines)


def _digit(bits: float) -> str:
    whole = int(bits)
    if 1.6 < bits < 2:
        return "t"
    return "F" if whole >= 16 else str(min(whole, 9))


def loss_table(quality: Quality) -> str:
    """Return the table of baseline and bundle per task; empty without tasks."""
    rows = []
    for name, task in quality["tasks"].items():
        loss, kl = task["loss"], task["kl"]
        low, high = (None, None) if loss is None else loss["interval95"]
        share = "-" if loss is None else f"{_percent(loss['loss'])} ({_percent(low)} to {_percent(high)})"
        status = "-" if task["verdict"] is None else task["verdict"]["status"]
        scores = f"{task['baseline']:.4f}", f"{task['value']:.4f}", share, f"{kl['mean']:.4f}", f"{kl['agreement']:.2%}"
        rows.append([name, task["metric"], str(task["n"]), *scores, status])
    for name, kl in quality.get("held_out_kl", {}).items():
        figures = f"{kl['mean']:.4f}", f"{kl['agreement']:.2%}"
        rows.append([name, "KL alone", str(kl["items"]), "-", "-", "-", *figures, "-"])
    if not rows:
        return ""
    header = ["task", "metric", "items", "baseline", "bundle", "relative loss (95 %)", "KL", "top-1 agree", "verdict"]
    precision = quality.get("baseline_precision")  # of a checkpoint that stores its weights quantized
    stored = f"\nbaseline: the checkpoint's own weights, stored as {precision}" if precision else ""
    return output.table(rows, header) + stored


def comparison_table(quality: Quality) -> str:
    """Return the table of bytes of routed experts: this bundle, 16 bits, and the baselines of the search."""
    sizes = quality["sizes"]
    ours, sixteen = sizes["expert_packed_bytes"], sizes["expert_16bit_bytes"]
    target, bits_per_weight = quality["target"], f"{sizes['expert_bits_per_weight']:.3f}"
    if target["kind"] == "uniform" and float(bits_per_weight) > target["value"]:
        bits_per_weight += f" ({target['value']:g} and scales)"
    rows = [
        ["this bundle", _bytes(ours), bits_per_weight, "", ""],
        ["16 bits", _bytes(sixteen), "16.000", _percent(1 - ours / sixteen), ""],
    ]
    comparison = quality["comparison"] or {}
    for baseline in comparison.get("baselines", []):
        size, bits = baseline["expert_packed_bytes"], baseline["bits_per_weight"]
        row = [baseline["name"], "none keeps the target" if size is None else _bytes(size)]
        row += ["-" if bits is None else f"{bits:.3f}", _percent(baseline["gain_at_target"])]
        rows.append([*row, _percent(baseline["gain_at_equal_kl"])])
    header = ["routed experts", "bytes", "bits per weight", "saved at target", "saved at equal KL"]
    table, left_out = output.table(rows, header), comparison.get("left_out", [])
    return f"{table}\nnot compared with {', '.join(left_out)}: `moec compare` does" if left_out else table


def curve_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a sweep: per loss the bytes, the measured loss, and the bytes of the baselines."""
    names = next((list(point["baselines"]) for point in curve if point["baselines"]), [])
    rows = []
    for point in curve:
        size = point["expert_packed_bytes"]
        measured = "; ".join(_percent(estimate["loss"]) for estimate in point["losses"].values()) or "-"
        row = [_percent(point["target"]), "none keeps it" if size is None else _bytes(size)]
        row += ["-" if size is None else f"{point['bits_per_weight']:.3f}", measured]
        for name in names:
            other = point["baselines"].get(name)
            gain = None if not other or size is None else 1 - size / other
            row.append("-" if other is None else f"{_bytes(other)} ({_percent(gain)})")
        rows.append(row)
    header = ["loss", "expert bytes", "bits per weight", "measured", *(f"{name} (saved)" for name in names)]
    return output.table(rows, header)


def verdict_line(quality: Quality) -> str:
    """Return the last line of a report: the verdict in words, and the tasks that it is for."""
    from moec.evaluation.verdict_scope import verdict_scope

    verdict, target = quality["verdict"], quality["target"]
    kind, more = target["kind"], ""
    if verdict == "not measured" and kind in ("loss", "kl"):
        return "the plan alone: nothing is proven before a bundle is certified on held-out items"
    if kind == "uniform":
        return "no quality was measured: `moec eval` does"
    if verdict in ("measured", "not measured"):
        return f"no loss target was asked for: quality is {verdict}"
    tasks = quality["tasks"].values()
    if kind == "kl":
        means = [kl["mean"] for kl in (*(task["kl"] for task in tasks), *quality.get("held_out_kl", {}).values())]
        most, worst = f"{target['value']:g}", f"{max(means):.4f}"
        sentences = {
            "supported": f"supported: on held-out answers the KL is at most {most} nats per token, at 95 % confidence",
            "met": f"met, not supported: the KL measured, {worst}, is within {most}, its 95 % bound is not",
            "missed": f"missed: the KL measured on held-out answers, {worst}, is above {most}",
            "refuted": f"refuted: the KL on held-out answers, {worst}, is above {most}, at 95 % confidence",
        }
        if verdict in ("met", "missed") and (tested := quality.get("tested")):
            supported = f"{max(tested[-1]['bounds'].values()):.3g}"
            more = f"; these texts support about {supported}: moec compile ... --kl {supported}"
    else:
        share, sure = _percent(target["value"]), _percent(target.get("confidence", 0.95)).replace(".00", "")
        sentences = {
            "supported": f"supported: on held-out items the loss is at most {share}, at {sure} confidence",
            "met": f"met, not supported: the loss measured is within {share}, its 95 % bound is not",
            "missed": f"missed: the loss measured on held-out items is above {share}",
            "refuted": f"refuted: the loss on held-out items is above {share}, at {sure} confidence",
        }
        verdicts = [task["verdict"] for task in tasks if task["verdict"] is not None]
        if needed := [verdict["items_needed"] for verdict in verdicts if verdict["items_needed"]]:
            more = f"; about {max(needed)} items would decide"
        if verdict in ("met", "missed") and (bound := _worst_bound(quality)) is not None:
            more += f", and these items support about {bound}: moec compile ... --loss {bound}"
    scope = verdict_scope(quality)
    return f"{sentences[verdict]}{more}" + (f" ({scope})" if scope else "")


def _worst_bound(quality: Quality) -> str | None:
    """Return the largest bound of a loss that was tested last, rounded up to 0.1 %; None without one below 100 %."""
    tested = quality.get("tested")
    losses = [task["loss"] for task in quality["tasks"].values() if task["loss"] is not None]
    bounds = [(loss.get("bounds") or (None, loss["upper95"]))[1] for loss in losses]
    if tested:
        bounds = list(tested[-1]["bounds"].values())
    if not bounds or any(bound is None or not 0 < bound < 1 for bound in bounds):
        return None
    return f"{ceil(1000 * max(bounds)) / 10:g}%"


def _bytes(count: float) -> str:
    return f"{count:,.0f}"

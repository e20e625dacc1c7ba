"""quality.json as text: tables and a heat map for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

from . import output

Quality = Mapping[str, Any]
_PROJECTIONS = ("gate", "up", "down")
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
        body = [heat_map([[sum(bits) / len(bits) for bits in zip(*own, strict=True)] for own in layers])]
    else:
        rows = [" ".join("".join(map(_digit, bits)) for bits in zip(*own, strict=True)) for own in layers]
        body = [_legend(max(map(len, layers)), set("".join(rows)))]
        body += [f"layer {layer:>3}  {row or 'no routed experts'}" for layer, row in enumerate(rows)]
    formats = ", ".join(f"{name} x{count}" for name, count in quality["bits"]["formats"].items())
    return "\n".join([*body, f"formats    {formats}", *_left_out(units["down"])])


def _legend(projections: int, used: set[str]) -> str:
    """Return the line above the bits of every unit. It explains the signs that occur."""
    *first, last = _PROJECTIONS[-projections:]
    signs = ", ".join(f"{sign} = {meaning}" for sign, meaning in _SIGNS.items() if sign in used)
    return f"whole bits of {', '.join(first)} and {last} for each expert" + (f" ({signs})" if signs else "")


def _left_out(down: Sequence[Sequence[float]]) -> list[str]:
    """Return a line on experts that take no bytes, if there are any.

    down: bits of the down projections, [L][E].
    """
    flat = [bits for row in down for bits in row]
    count = flat.count(0)
    return [f"left out   {count} of {len(flat)} experts (`--keep-experts` keeps all)"] if count else []


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
            output.block(_height(sum(cell) / len(cell))) if any(cell) else output.dot() for cell in cells[layer]
        )
        average = f"{blocks}  {sum(row) / len(row):.2f}" if row else "no routed experts"
        lines.append(f"layer {layer:>{len(str(len(bits) - 1))}}  {average}")
    return "\n".join(lines)


def _height(bits: float) -> float:
    """Return the height of a block, 0 to 1, for an average of bits, on a logarithmic scale from 1 to 16."""
    return log2(max(1.0, min(bits, _LARGEST_BITS))) / log2(_LARGEST_BITS)


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
        rows.append(
            [
                name,
                task["metric"],
                str(task["n"]),
                f"{task['baseline']:.4f}",
                f"{task['value']:.4f}",
                share,
                f"{kl['mean']:.4f}",
                f"{kl['agreement']:.2%}",
                "-" if task["verdict"] is None else task["verdict"]["status"],
            ]
        )
    for name, found in quality.get("held_out_kl", {}).items():
        figures = f"{found['mean']:.4f}", f"{found['agreement']:.2%}"
        rows.append([name, "KL alone", str(found["items"]), "-", "-", "-", *figures, "-"])
    header = ["task", "metric", "items", "baseline", "bundle", "relative loss (95 %)", "KL", "top-1 agree", "verdict"]
    return "\n".join([output.table(rows, header), *_baseline_line(quality)]) if rows else ""


def _baseline_line(quality: Quality) -> list[str]:
    """Return a line on the baseline if the checkpoint stores its weights quantized."""
    precision = quality.get("baseline_precision")
    return [f"baseline: the checkpoint's own weights, stored as {precision}"] if precision else []


def comparison_table(quality: Quality) -> str:
    """Return the table of bytes of routed experts: this bundle, 16 bits, and the baselines of the search."""
    sizes = quality["sizes"]
    ours, sixteen = sizes["expert_packed_bytes"], sizes["expert_16bit_bytes"]
    target, bits_per_weight = quality["target"], f"{sizes['expert_bits_per_weight']:.3f}"
    if target["kind"] == "uniform" and float(bits_per_weight) > target["value"]:
        bits_per_weight += f" ({target['value']:g} and scales)"
    rows = [
        ["this bundle", _bytes(ours), bits_per_weight, "", ""],
        [
            "16 bits",
            _bytes(sixteen),
            "16.000",
            _percent(1 - ours / sixteen),
            "",
        ],
    ]
    if quality["comparison"] is not None:
        for baseline in quality["comparison"]["baselines"]:
            size = baseline["expert_packed_bytes"]
            bits = baseline["bits_per_weight"]
            rows.append(
                [
                    baseline["name"],
                    "none keeps the target" if size is None else _bytes(size),
                    "-" if bits is None else f"{bits:.3f}",
                    _percent(baseline["gain_at_target"]),
                    _percent(baseline["gain_at_equal_kl"]),
                ]
            )
    header = ["routed experts", "bytes", "bits per weight", "saved at target", "saved at equal KL"]
    table = output.table(rows, header)
    left_out = (quality["comparison"] or {}).get("left_out", [])
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
    """Return the last line of a report: the verdict in words."""
    verdict = quality["verdict"]
    kind = quality["target"]["kind"]
    if verdict == "not measured" and kind in ("loss", "kl"):
        return "the plan alone: nothing is proven before a bundle is certified on held-out items"
    if kind == "uniform":
        return "`--uniform` measures no quality: `moec eval` does"
    if verdict in ("measured", "not measured"):
        return f"no loss target was asked for: quality is {verdict}"
    if kind == "kl":
        return _kl_verdict_line(quality)
    share = _percent(quality["target"]["value"])
    sure = _percent(quality["target"].get("confidence", 0.95)).replace(".00", "")
    sentences = {
        "supported": f"supported: on held-out items the loss is at most {share}, at {sure} confidence",
        "met": f"met, not supported: the loss measured is within {share}, its 95 % bound is not",
        "missed": f"missed: the loss measured on held-out items is above {share}",
        "refuted": f"refuted: the loss on held-out items is above {share}, at {sure} confidence",
    }
    needed = [
        task["verdict"]["items_needed"]
        for task in quality["tasks"].values()
        if task["verdict"] is not None and task["verdict"]["items_needed"]
    ]
    more = f"; about {max(needed)} items would decide" if needed else ""
    return f"{sentences[verdict]}{more}{_scope(quality)}"


def _kl_verdict_line(quality: Quality) -> str:
    measured = [task["kl"]["mean"] for task in quality["tasks"].values()]
    measured += [found["mean"] for found in quality.get("held_out_kl", {}).values()]
    target, worst = f"{quality['target']['value']:g}", f"{max(measured):.4f}"
    sentences = {
        "supported": f"supported: on held-out answers the KL is at most {target} nats per token, at 95 % confidence",
        "met": f"met, not supported: the KL measured, {worst}, is within {target}, its 95 % bound is not",
        "missed": f"missed: the KL measured on held-out answers, {worst}, is above {target}",
        "refuted": f"refuted: the KL on held-out answers, {worst}, is above {target}, at 95 % confidence",
    }
    return f"{sentences[quality['verdict']]}{_scope(quality)}"


def _scope(quality: Quality) -> str:
    """Return the tasks of the verdict as an addition to its line."""
    from moec.evaluation.verdict_scope import verdict_scope

    scope = verdict_scope(quality)
    return f" ({scope})" if scope else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}".replace("%", " %")


def _bytes(count: float) -> str:
    return f"{count:,.0f}"

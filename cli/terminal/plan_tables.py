"""An exported plan as text: formats by layer, sizes, and the measured cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import output

_PROJECTIONS = ("gate", "up", "down")


def plan_page(facts: Mapping[str, Any]) -> str:
    """Return the page of a plan.

    facts: what `compiler/export/plan_summary.py` returns.
    """
    parts = [_format_table(facts), _size_table(facts)]
    if facts["measured"] is not None:
        parts.append(_cost_table(facts["engine"], facts["measured"]))
    return "\n\n".join(parts)


def _format_table(facts: Mapping[str, Any]) -> str:
    names = [name for name in _PROJECTIONS if any(name in row for row in facts["layers"])]
    rows = [[row["layer"], *(_formats(row.get(name, {})) for name in names)] for row in facts["layers"]]
    return output.table(rows, ["layer", *names])


def _formats(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _size_table(facts: Mapping[str, Any]) -> str:
    rows = [
        [name, output.human_bytes(facts[f"{key}expert_bytes"]), f"{facts[f'{key}bits_per_weight']:.3f}"]
        for name, key in (("bundle", "bundle_"), (facts["engine"], ""))
    ]
    dense = dict[str, int]()
    for name in facts["dense"].values():
        dense[name] = dense.get(name, 0) + 1
    kept = ", ".join(f"{count} x {name}" for name, count in dense.items())
    return output.table(rows, ["routed experts", "bytes", "bits per weight"]) + f"\ndense weights   {kept}"


def _cost_table(engine: str, measured: Mapping[str, Any]) -> str:
    """Return the table of KL and loss, and the sentence on what they are about."""
    tasks = list(measured["bundle"]["losses"])
    rows = []
    for name, key in (("bundle", "bundle"), (f"plan for {engine}", "plan")):
        own = measured[key]
        kl = own["kl"]
        losses = [_loss(own["losses"].get(task)) for task in tasks]
        size = output.human_bytes(own["expert_packed_bytes"])
        rows.append([name, size, f"{kl['mean']:.5f}", f"{kl['agreement']:.2%}", *losses])
    header = ["measured in our formats", "expert bytes", "KL", "top-1 agree", *(f"loss of {task}" for task in tasks)]
    tried = ", ".join(f"{kl:.5f} {way}" for way, kl in measured["tried"].items())
    chosen = f"The formats are those of the least KL: {tried}.\n" if len(measured["tried"]) > 1 else ""
    return (
        f"{output.table(rows, header)}\n{chosen}"
        f"KL in nats per token to the checkpoint, on {measured['items']} validation items. Each matrix is quantized\n"
        f"in a format of ours with about the bits of {engine}'s. The quantizer of {engine} differs, so its KL does too."
    )


def _loss(estimate: Mapping[str, Any] | None) -> str:
    return "-" if estimate is None else output.human_share(estimate["loss"])

"""quality.json and the model card: the content of the bundle, its size, and the evidence for its quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.evaluation.statistics import ERROR, judge_divergence
from moec.evaluation.verdict_scope import verdict_scope
from moec.manifests.bundle import BundleManifest, CostSummary
from moec.manifests.codec import to_plain
from moec.manifests.hobbit_thresholds import unimportance_quantiles
from moec.manifests.model import PROJECTIONS, UnitKey

from ..calibration.collect import ActivationStatistics
from ..request.plan import CompilePlan
from ..request.targets import Target
from ..search.comparison import Comparison
from ..sensitivity.sensitivity import SensitivityTable
from ..sensitivity.trials import Trial
from .certify import DivergenceCertificate, TaskCertificate

QUALITY_VERSION = 1


def quality_report(
    plan: CompilePlan,
    target: Target,
    cost: CostSummary,
    *,
    confidence: float | None = None,
    certificates: Mapping[str, TaskCertificate] | None = None,
    divergences: Mapping[str, DivergenceCertificate] | None = None,
    comparison: Comparison | None = None,
    trials: Sequence[Trial] = (),
    sensitivity: SensitivityTable | None = None,
    losses: Mapping[str, Any] | None = None,
    statistics: ActivationStatistics | None = None,
    modes: Mapping[str, Any] | None = None,
    share: float = 1.0,
) -> dict[str, Any]:
    """Return the content of quality.json as plain values. Without time, host and path, equal compiles give equal bytes.

    confidence: of the verdict; None: 95 %.
    certificates: task -> loss and KL on held-out items.
    divergences: task -> KL on held-out answers, for a reference that generates no answers.
    comparison: the baselines of the search, or None.
    trials: every plan that the search measured.
    sensitivity: predicted losses, or None without a search.
    losses: predicted losses of every expert in one format, or None.
    statistics: popularity and routes, or None without calibration.
    modes: cost of the lossy modes of the runtime, or None.
    share: of the error, if the plan is one of a list.
    """
    tasks, answers = certificates or {}, divergences or {}
    return {
        "version": QUALITY_VERSION,
        "target": {
            "kind": target.kind,
            "value": target.value,
            **({} if confidence is None else {"confidence": confidence}),
        },
        "verdict": overall_verdict(target, tasks, answers, share),
        "tasks": {name: certificate.to_json() for name, certificate in tasks.items()},
        "held_out_kl": {
            name: {"items": certificate.items, **certificate.divergence.to_json()}
            for name, certificate in answers.items()
        },
        "sizes": _sizes(plan, cost),
        "bits": _bits(plan),
        "comparison": None if comparison is None else comparison.to_json(),
        "sensitivity": None if sensitivity is None else _sensitivity(sensitivity, losses),
        "statistics": None if statistics is None else _statistics(statistics),
        "trials": [trial.to_json() for trial in trials],
        **({} if modes is None else {"modes": dict(modes)}),
    }


def overall_verdict(
    target: Target,
    certificates: Mapping[str, TaskCertificate],
    divergences: Mapping[str, DivergenceCertificate] | None = None,
    share: float = 1.0,
) -> str:
    """Return the weakest verdict of all tasks: supported, met, missed, refuted.

    Targets other than loss and KL: `measured` or `not measured`.
    share: of the error of a KL. Certificates of a loss have theirs.
    """
    others = divergences or {}
    if target.kind not in ("loss", "kl"):
        return "measured" if certificates or others else "not measured"
    order = ("supported", "met", "missed", "refuted")
    if target.kind == "kl":
        measured = [(c.divergence, c.value.n) for c in certificates.values()]
        measured += [(c.divergence, c.items) for c in others.values()]
        verdicts = [judge_divergence(summary, target.value, items, ERROR * share) for summary, items in measured]
    else:
        verdicts = [c.verdict.status for c in certificates.values() if c.verdict is not None]
    return max(verdicts, key=order.index, default="not measured")


def _sizes(plan: CompilePlan, cost: CostSummary) -> dict[str, Any]:
    sixteen_bit = 2 * plan.expert_weights
    return {
        **to_plain(cost),
        "expert_16bit_bytes": sixteen_bit,
        "dense_16bit_bytes": 2 * sum(int(np.prod(shape)) for shape in plan.model.dense_shapes().values()),
        "expert_share_of_16bit": plan.expert_packed_bytes / sixteen_bit,
    }


def _bits(plan: CompilePlan) -> dict[str, Any]:
    """Return bits per weight of every unit, scales included, [L][E] per projection, and the dense formats."""
    model = plan.model
    grids: dict[str, list[list[float]]] = {}
    for projection in PROJECTIONS:
        grids[projection] = [
            [
                plan.units[UnitKey(index, expert, projection)].bits_per_weight(model.unit_shape(index, projection)[1])
                for expert in range(layer.experts.count if projection in layer.experts.projections else 0)
            ]
            for index, layer in enumerate(model.layers)
        ]
    counts: dict[str, int] = {}
    for spec in plan.units.values():
        counts[str(spec)] = counts.get(str(spec), 0) + 1
    dense = {name: str(spec) for name, spec in plan.dense.items()}
    return {"units": grids, "formats": dict(sorted(counts.items())), "dense": dense}


def _sensitivity(table: SensitivityTable, experts: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        **({} if experts is None else {"experts": dict(experts)}),
        "gains": {p: table.gains[:, column].tolist() for column, p in enumerate(PROJECTIONS)},
        "dense_gains": dict(table.dense_gains),
        "corrections": table.corrections.tolist(),
    }


def _statistics(statistics: ActivationStatistics) -> dict[str, Any]:
    """Return statistics of popularity and routes.

    popularity: shares, per layer.
    popularity_entropy: entropy over its maximum, per layer.
    lower_half_share: share of a token's weight in the lower-ranked half of its experts, per layer.
    unimportance_deciles: nine deciles of experts' unimportance over all layers, see calibration. Empty for top-1.
    paths: how well routes can be predicted, and the keys that are kept if this decided.
    """
    counts = np.asarray(statistics.popularity, np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-30)), axis=1) / np.log(max(shares.shape[1], 2))
    return {
        "popularity": shares.tolist(),
        "popularity_entropy": entropy.tolist(),
        "lower_half_share": statistics.lower_half.tolist(),
        "unimportance_deciles": unimportance_deciles(statistics.unimportance),
        "paths": {
            **statistics.path_report.to_json(),
            **({"kept": statistics.paths_kept} if statistics.paths_kept else {}),
        },
    }


def unimportance_deciles(counts: NDArray[np.int64]) -> list[float]:
    """Return the nine deciles of counts [L, bins], or an empty list without counts."""
    return unimportance_quantiles(counts.sum(axis=0).tolist(), [tenth / 10 for tenth in range(1, 10)])


_HOW_TO_RUN = (
    "`quality.json` holds formats, statistics and every trial of the search. `moec.json` holds the layout.",
    "",
    "```",
    "moec verify FOLDER",
    'moec run FOLDER --prompt "..." --expert-cache 50%',
    "```",
    "",
)


def model_card(manifest: BundleManifest, quality: Mapping[str, Any], pictures: Mapping[str, str] | None = None) -> str:
    """Return the README.md of the bundle: its content, its size, how to run it.

    pictures: file names of pictures, and what they show.
    """
    scope = verdict_scope(quality) or quality["verdict"]
    sizes, routed = quality["sizes"], manifest.model.layers[manifest.model.expert_layers[-1]].experts
    pruned = sum(map(len, manifest.pruned_experts))
    lines = [
        f"# {manifest.name}, compiled by moec",
        "",
        f"{manifest.model.family}, {manifest.model.num_layers} layers, "
        f"{routed.count} experts, top-{routed.top_k}; "
        f"target: {manifest.options.get('target', 'none')}; verdict: {scope}.",
        "",
        "| | bytes |",
        "|---|---|",
        f"| routed experts, {sizes['expert_bits_per_weight']:.3f} bits per weight | {sizes['expert_packed_bytes']:,} |",
        *([f"| left out, of {len(manifest.experts)} routed experts | {pruned} experts |"] if pruned else []),
        f"| routed experts at 16 bits | {sizes['expert_16bit_bytes']:,} |",
        f"| all other weights | {sizes['dense_packed_bytes']:,} |",
        f"| expert bytes read per token with an empty cache | {sizes['expected_read_bytes_per_token']:,} |",
        "",
    ]
    if quality["tasks"]:
        lines += [
            "| task | metric | baseline | this bundle | relative loss (95 %) | verdict |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_card_row(name, task) for name, task in quality["tasks"].items()]
        lines.append("")
    for name, answers in quality["held_out_kl"].items():
        lines += [
            f"KL to the checkpoint on {answers['items']} held-out answers of {name}: {answers['mean']:.4f} nats.",
            "",
        ]
    precision = quality.get("baseline_precision")
    if precision:
        codes = quality["own_codes"]
        rounded = codes.get("rounded_scales", 0)
        scales = f" The scales of {rounded} are rounded to 16 bits." if rounded else ""
        lines += [
            f"The checkpoint stores weights as {precision}; what they decode to is the baseline. "
            f"{codes['held']} of {codes['of']} expert projections keep the checkpoint's own codes.{scales}",
            "",
        ]
    for name, title in (pictures or {}).items():
        lines += [f"![{title}]({name})", ""]
    return "\n".join([*lines, *_HOW_TO_RUN])


def _card_row(name: str, task: Mapping[str, Any]) -> str:
    verdict = "-" if task["verdict"] is None else task["verdict"]["status"]
    return (
        f"| {name} ({task['n']} items) | {task['metric']} | {task['baseline']:.4f} | {task['value']:.4f} | "
        f"{_loss_text(task['loss'])} | {verdict} |"
    )


def _loss_text(loss: Mapping[str, Any] | None) -> str:
    if loss is None:
        return "-"
    low, high = ("?" if bound is None else f"{bound:.2%}" for bound in loss["interval95"])
    return f"{loss['loss']:.2%} ({low} to {high})"

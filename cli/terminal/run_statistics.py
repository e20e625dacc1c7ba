"""Statistics of one generation as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from moec.runtime.trace.statistics import RunStatistics


def statistics_block(statistics: RunStatistics, decisions: dict[str, Any] | None = None) -> str:
    """Return the statistics of one generation as text.

    decisions: counts of the lossy modes, or None.
    """
    rate = "-" if statistics.tokens_per_s is None else f"{statistics.tokens_per_s:.1f} tokens/s"
    return output.facts(
        [
            ("tokens", f"{statistics.tokens} after a prompt of {statistics.prompt_tokens}"),
            ("first token (TTFT)", output.human_ms(statistics.ttft_ns)),
            (
                "per token (TPOT)",
                f"p50 {output.human_ms(statistics.tpot_p50_ns)}, p95 {output.human_ms(statistics.tpot_p95_ns)}, {rate}",
            ),
            (
                "expert cache",
                f"hit rate {output.human_share(statistics.hit_rate)}, {statistics.misses} misses in "
                f"{statistics.lookups} lookups, {statistics.rereads} rereads",
            ),
            ("read per token", output.human_bytes(statistics.bytes_read_per_token)),
            ("stall", output.human_ms(statistics.stall_ns)),
            *_shares_fact(statistics),
            (
                "prefetch",
                f"precision {output.human_share(statistics.prefetch_precision)}, recall "
                f"{output.human_share(statistics.prefetch_recall)}, {statistics.prefetch_hits} hits",
            ),
            *([] if decisions is None else [("decisions", decisions_text(decisions))]),
            ("peak memory", output.human_bytes(statistics.peak_memory_bytes)),
        ]
    )


def _shares_fact(statistics: RunStatistics) -> list[tuple[str, str]]:
    shares = statistics.decode_shares
    if shares is None:
        return []
    parts = (("stall", shares.stall), ("experts", shares.experts), ("dense", shares.dense), ("other", shares.other))
    return [
        ("time of decode", ", ".join(f"{name} {output.human_share(share)}" for name, share in parts)),
        ("storage busy", output.human_share(shares.storage_busy)),
    ]


def decisions_text(decisions: dict[str, Any] | None) -> str:
    """Return the shares of a mode's decisions as text; `-` without decisions."""
    names = ("low", "skipped", "replaced", "dropped", "fallback", "foretold_right", "prompt_low", "prompt_skipped")
    told = [] if decisions is None else [(name, decisions.get(f"{name}_share")) for name in names]
    return ", ".join(f"{name.replace('_', ' ')} {output.human_share(value)}" for name, value in told if value) or "-"

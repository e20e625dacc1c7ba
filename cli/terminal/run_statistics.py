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
    time, percent, shares = output.human_ms, output.human_share, statistics.decode_shares
    rate = "-" if statistics.tokens_per_s is None else f"{statistics.tokens_per_s:.1f} tokens/s"
    hits = f"hit rate {percent(statistics.hit_rate)}, {statistics.misses} misses in {statistics.lookups} lookups"
    ahead = f"precision {percent(statistics.prefetch_precision)}, recall {percent(statistics.prefetch_recall)}"
    pairs = [
        ("tokens", f"{statistics.tokens} after a prompt of {statistics.prompt_tokens}"),
        ("first token (TTFT)", time(statistics.ttft_ns)),
        ("per token (TPOT)", f"p50 {time(statistics.tpot_p50_ns)}, p95 {time(statistics.tpot_p95_ns)}, {rate}"),
        ("expert cache", f"{hits}, {statistics.rereads} rereads"),
        ("read per token", output.human_bytes(statistics.bytes_read_per_token)),
        ("stall", time(statistics.stall_ns)),
    ]
    if shares is not None:
        named = {name: percent(getattr(shares, name)) for name in ("stall", "experts", "dense", "other")}
        pairs.append(("time of decode", ", ".join(f"{name} {share}" for name, share in named.items())))
        pairs.append(("storage busy", percent(shares.storage_busy)))
    pairs.append(("prefetch", f"{ahead}, {statistics.prefetch_hits} hits"))
    if decisions is not None:
        pairs.append(("decisions", decisions_text(decisions)))
    return output.facts([*pairs, ("peak memory", output.human_bytes(statistics.peak_memory_bytes))])


def decisions_text(decisions: dict[str, Any] | None) -> str:
    """Return the shares of a mode's decisions as text; `-` without decisions."""
    names = ("low", "skipped", "replaced", "dropped", "fallback", "foretold_right", "prompt_low", "prompt_skipped")
    shares = {} if decisions is None else {name: decisions.get(f"{name}_share") for name in names}
    texts = [f"{name.replace('_', ' ')} {output.human_share(share)}" for name, share in shares.items() if share]
    return ", ".join(texts) or "-"

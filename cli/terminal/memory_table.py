"""The memory of a server as a table: what each part takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import human_bytes

if TYPE_CHECKING:
    from moec.serving.memory_shares import MemoryShares


def memory_table(shares: MemoryShares, context: int) -> str:
    """Return a line for each part of the memory, after a line with their sum. context: tokens of a slot."""
    slots, slot = shares["slots"], human_bytes(shares["slot_bytes"])
    is_elastic = shares["unused_bytes"] is not None
    parts = [
        (shares["process_bytes"], "process, with tokenizer and manifest"),
        (shares["server_bytes"], "server: requests, log probabilities, grammars"),
        (shares["dense_bytes"], "dense weights"),
        (shares["tables_bytes"], "tables for reading ahead"),
        (shares["buffers_bytes"], "buffers of the longest pass"),
        (shares["accelerator_bytes"], "host memory of the accelerator"),
        (
            slots * shares["slot_bytes"],
            f"{slots} slot{'s' * (slots > 1)} of {slot}: keys and values of {context} tokens, "
            "kept for the next turn of a conversation",
        ),
        (shares["experts_bytes"], "expert cache" + is_elastic * "; it also takes what slots and buffers leave free"),
        (shares["unused_bytes"] or 0, "not used"),
    ]
    rows = [(human_bytes(size), text) for size, text in parts if size > 0]
    whole = human_bytes(sum(size for size, _ in parts if size > 0))
    name = "memory budget" if is_elastic else "memory at most"
    width = max(len(size) for size, _ in rows)
    return "\n".join([f"{name} {whole}", *(f"  {size.rjust(width)}  {text}" for size, text in rows)])

"""The memory of a server, divided: what each part takes of the budget."""

from __future__ import annotations

from typing import TypedDict

from moec.runtime.engine.engine import Engine


class MemoryShares(TypedDict):
    """Bytes of each part, as `/props` has them. All parts together are the budget."""

    process_bytes: int  # interpreter, libraries, tokenizer, manifest
    server_bytes: int  # HTTP, requests, log probabilities, and grammars of answers
    dense_bytes: int
    experts_bytes: int  # expert cache
    slot_bytes: int  # keys and values of one slot, which stay for the next turn of a conversation
    slots: int
    buffers_bytes: int  # the longest pass
    tables_bytes: int  # tables for reading ahead
    accelerator_bytes: int  # memory of the host that an accelerator needs
    unused_bytes: int | None  # for passes that need less to keep more experts; None without a budget


def memory_shares(engine: Engine) -> MemoryShares:
    """Return how the memory of an engine and its server is divided."""
    plan, slots, server = engine.memory, engine.options.slots, engine.options.other_bytes
    return {
        "process_bytes": plan.process_bytes - server,
        "server_bytes": server,
        "dense_bytes": plan.dense_bytes,
        "experts_bytes": plan.cache_bytes,
        "slot_bytes": plan.kv_bytes // slots,
        "slots": slots,
        "buffers_bytes": plan.scratch_bytes,
        "tables_bytes": plan.tables_bytes,
        "accelerator_bytes": plan.accelerator_bytes,
        "unused_bytes": None if plan.budget_bytes is None else plan.budget_bytes - plan.fixed_bytes - plan.cache_bytes,
    }

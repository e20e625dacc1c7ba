"""The memory of a server, divided: what each part takes of the budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from moec.runtime.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Bytes of each part. All parts together are the budget.

    process_bytes: interpreter, libraries, tokenizer, manifest.
    server_bytes: HTTP, requests, log probabilities, and grammars of answers.

    dense_bytes: dense weights.
    experts_bytes: expert cache.
    slot_bytes: keys and values of one slot. They stay for the next turn of a conversation.
    slots: number of slots.

    buffers_bytes: the longest pass.
    tables_bytes: tables for reading ahead.
    accelerator_bytes: memory of the host that an accelerator needs.
    unused_bytes: rest of the budget, for passes that need less to keep more experts; None without a budget.
    """

    process_bytes: int
    server_bytes: int
    dense_bytes: int
    experts_bytes: int
    slot_bytes: int
    slots: int
    buffers_bytes: int
    tables_bytes: int
    accelerator_bytes: int
    unused_bytes: int | None

    def to_plain(self) -> dict[str, int | None]:
        """Return the values for `/props`."""
        return asdict(self)


def memory_shares(engine: Engine) -> MemoryShares:
    """Return how the memory of an engine and its server is divided."""
    plan, slots, server = engine.memory, engine.options.slots, engine.options.other_bytes
    unused = None if plan.budget_bytes is None else plan.budget_bytes - plan.fixed_bytes - plan.cache_bytes
    return MemoryShares(
        process_bytes=plan.process_bytes - server,
        server_bytes=server,
        dense_bytes=plan.dense_bytes,
        experts_bytes=plan.cache_bytes,
        slot_bytes=plan.kv_bytes // slots,
        slots=slots,
        buffers_bytes=plan.scratch_bytes,
        tables_bytes=plan.tables_bytes,
        accelerator_bytes=plan.accelerator_bytes,
        unused_bytes=unused,
    )

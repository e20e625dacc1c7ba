"""Plain text, scored by teacher forcing: exp(sum of NLL / sum of tokens) over all texts."""

from __future__ import annotations

from .base import Task

PERPLEXITY = Task(
    name="perplexity",
    input_field="text",
    answer_field=None,
    lead="",
    cue="",
    metrics=("perplexity",),
    score=None,
    higher_is_better=False,
    score_range=None,
    max_new_tokens=0,
    document_field="text",
)

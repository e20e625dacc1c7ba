"""Summaries of dialogues (SAMSum's form) and of documents (XSum's form). The primary metric is Rouge-2."""

from __future__ import annotations

from ..metrics import ROUGE_KINDS, rouge
from .base import Task

SAMSUM = Task(
    name="samsum",
    input_field="dialogue",
    answer_field="summary",
    lead="Dialogue:\n",
    cue="\nSummary:",
    metrics=ROUGE_KINDS,
    score=rouge,
    higher_is_better=True,
    score_range=1.0,
    max_new_tokens=96,
    stop=("\n\n", "\nDialogue:"),
    document_field="dialogue",
)

XSUM = Task(
    name="xsum",
    input_field="document",
    answer_field="summary",
    lead="Document:\n",
    cue="\nSummary:",
    metrics=ROUGE_KINDS,
    score=rouge,
    higher_is_better=True,
    score_range=1.0,
    max_new_tokens=64,
    stop=("\n\n", "\nDocument:"),
    document_field="document",
)

"""Task data: JSON lines."""

from __future__ import annotations

from moec.evaluation.text_files import read_jsonl
from moec.manifests.errors import DataError
from tests.fuzz.targets.scratch import file_of


def target(data: bytes) -> None:
    try:
        rows = list(read_jsonl(file_of("rows.jsonl", data)).read(()))
    except DataError:
        return
    if not rows or not all(isinstance(row, dict) for _, row in rows):
        raise AssertionError("accepted rows are not objects")


def seeds() -> list[bytes]:
    return [b'{"text": "a b"}\n\n{"question": "1?", "answer": "#### 1"}\n', b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}']

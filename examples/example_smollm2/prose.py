"""Paragraphs of HTML pages, and their division into splits by document."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

from example_smollm2.sources import Source

SPLITS = ("train", "validation", "test", "unseen")
_TRAIN_PARTS, _PARTS = 16, 20
_WORDS_AT_LEAST = 12
_LETTERS_AT_LEAST = 0.85
_LEFT_OUT = {"script", "style", "pre", "table", "title"}
_BLOCKS = {"p", "dd", "dt", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "div", "td"}


@dataclass(frozen=True)
class Document:
    """One page.

    source: package.
    page: name of the file.
    paragraphs: running text, in order.
    """

    source: str
    page: str
    paragraphs: list[str]


class _Paragraphs(HTMLParser):
    """Collects the text of block elements. Code, tables and titles are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._text: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag in _LEFT_OUT
        if tag in _BLOCKS:
            self.end()

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in _LEFT_OUT and self._depth > 0
        if tag in _BLOCKS:
            self.end()

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self._text.append(data)

    def end(self) -> None:
        """End a paragraph."""
        text = re.sub(r"\s+", " ", "".join(self._text)).strip()
        self._text = []
        if text:
            self.found.append(text)


def paragraphs_of(html: str) -> list[str]:
    """Return the paragraphs of running text: enough words, and hardly anything but letters."""
    parser = _Paragraphs()
    parser.feed(html)
    parser.end()
    return [text for text in parser.found if _is_prose(text)]


def _is_prose(text: str) -> bool:
    letters = sum(sign.isalpha() or sign == " " for sign in text)
    return len(text.split()) >= _WORDS_AT_LEAST and letters >= _LETTERS_AT_LEAST * len(text)


def split_of(source: Source, page: str) -> str:
    """Return the split of a page. It depends on its name alone, so that another page moves none."""
    if source.is_unseen:
        return "unseen"
    part = hashlib.sha256(f"{source.package}/{page}".encode()).digest()[0] % _PARTS
    return "train" if part < _TRAIN_PARTS else SPLITS[1 + part % 2]


def read_documents(pages: dict[Source, list[Path]]) -> dict[str, list[Document]]:
    """Return the documents of each split. A paragraph that occurs twice stays where it occurs first."""
    splits: dict[str, list[Document]] = {name: [] for name in SPLITS}
    seen: set[str] = set()
    for source, paths in pages.items():
        for path in paths:
            kept = []
            for text in paragraphs_of(path.read_text(encoding="utf-8", errors="replace")):
                key = re.sub(r"\W+", " ", text.lower())
                if key not in seen:
                    seen.add(key)
                    kept.append(text)
            if kept:
                splits[split_of(source, path.name)].append(Document(source.package, path.name, kept))
    return splits


def write_documents(splits: dict[str, list[Document]], folder: Path) -> None:
    """Write one file of JSON Lines for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in splits.items():
        write_lines(folder / f"{name}.jsonl", [asdict(document) for document in documents])


def load_documents(folder: Path, split: str) -> list[Document]:
    """Return the documents of a split."""
    lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document(**json.loads(line)) for line in lines]


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON Lines and rename the file into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(new, path)

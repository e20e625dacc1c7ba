"""Upper bound for the steps of a tokenizer's regular expression, from its form alone.

The library that runs them (Oniguruma) tries alternatives one after the other, so a pattern such as `(a+)+$` takes
exponentially many steps. A pattern is accepted if its steps at each position of a text are provably at most
proportional to the length of the text. The grammar is the part of Oniguruma's Ruby syntax that published tokenizers
use. Everything else is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..files.limits import MAX_PATTERN_CHARACTERS, MAX_PATTERN_STEPS

_MAX_DEPTH = 16
_MAX_COUNT = 10**9
_INTERVAL = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_GROUP = re.compile(r"\((?:\?(?:(?P<look><?[=!])|(?P<atomic>>)|(?P<flags>[im]*(?:-[im]+)?)(?P<end>[:)])))?")
_ESCAPE = re.compile(
    r"\\(?:(?P<assertion>[bBAzZ])|[sSdDwWhHrntfve]|[pP]\{\^?[\w &-]{1,40}\}|x\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}"
    r"|u[0-9A-Fa-f]{4}|[^\w])"
)
_POSIX_NAME = re.compile(r"\[:\^?[a-z]{1,10}:\]")


class CostlyPattern(Exception):
    """A pattern that is not accepted. The message follows the pattern in a sentence."""


@dataclass(frozen=True, slots=True)
class _Character:
    """One character: a letter, an escape, a class."""


@dataclass(frozen=True, slots=True)
class _Assertion:
    """A position, such as the beginning of a line."""


@dataclass(frozen=True, slots=True)
class _Group:
    alternatives: tuple[tuple[_Node, ...], ...]
    kind: Literal["plain", "atomic", "look"]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A repeated node.

    high: None without an upper bound.
    """

    node: _Node
    low: int
    high: int | None
    is_possessive: bool


_Node = _Character | _Assertion | _Group | _Repeat


@dataclass(frozen=True, slots=True)
class _Count:
    """A number that is at most `constant + linear * n` for a text of n characters.

    is_beyond: whether it may be larger.
    """

    constant: int = 1
    linear: int = 0
    is_beyond: bool = False

    def times(self, other: _Count) -> _Count:
        linear = self.constant * other.linear + self.linear * other.constant
        is_beyond = self.is_beyond or other.is_beyond or self.linear * other.linear > 0
        return _Count(self.constant * other.constant, linear, is_beyond).capped()

    def plus(self, other: _Count) -> _Count:
        is_beyond = self.is_beyond or other.is_beyond
        return _Count(self.constant + other.constant, self.linear + other.linear, is_beyond).capped()

    def power(self, exponent: int) -> _Count:
        result = _Count()
        for _ in range(min(exponent, 64)):
            result = result.times(self)
        return result

    def capped(self) -> _Count:
        return _Count(min(_MAX_COUNT, self.constant), min(_MAX_COUNT, self.linear), self.is_beyond)


_ONE = _Count()


def check_pattern(pattern: str) -> int:
    """Return the length of the shortest match, characters. Raises CostlyPattern."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise CostlyPattern(f"has {len(pattern)} characters, more than the limit of {MAX_PATTERN_CHARACTERS}")
    alternatives = _Parser(pattern).parse()
    steps = _Count(0)
    for sequence in alternatives:
        steps = steps.plus(_cost_of(sequence))
    if steps.is_beyond or steps.linear > MAX_PATTERN_STEPS or steps.constant > MAX_PATTERN_CHARACTERS:
        raise CostlyPattern("can take steps without bound: its repetitions overlap or are nested")
    return min(_shortest(sequence) for sequence in alternatives)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def parse(self) -> tuple[tuple[_Node, ...], ...]:
        alternatives = self._alternatives()
        if self._at < len(self._text):
            raise self._error()
        return alternatives

    def _error(self) -> CostlyPattern:
        return CostlyPattern(f"is not understood at character {self._at}")

    def _alternatives(self) -> tuple[tuple[_Node, ...], ...]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CostlyPattern(f"is nested more than {_MAX_DEPTH} deep")
        alternatives = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            alternatives.append(self._sequence())
        self._depth -= 1
        return tuple(alternatives)

    def _sequence(self) -> tuple[_Node, ...]:
        nodes = list[_Node]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            node = self._atom(is_first=not nodes)
            if node is not None:
                nodes.append(self._repeated(node))
        return tuple(nodes)

    def _atom(self, is_first: bool) -> _Node | None:
        """Return one node, or None for options that apply to the rest of the group."""
        character = self._text[self._at]
        if character == "(":
            return self._group(is_first)
        if character == "[":
            self._class()
            return _Character()
        if character == "\\":
            match = _ESCAPE.match(self._text, self._at)
            if match is None:
                raise self._error()
            self._at = match.end()
            return _Assertion() if match["assertion"] else _Character()
        if character in "*+?" or _INTERVAL.match(self._text, self._at):
            raise self._error()
        self._at += 1
        return _Assertion() if character in "^$" else _Character()

    def _group(self, is_first: bool) -> _Node | None:
        match = _GROUP.match(self._text, self._at)
        if match is None or (match.end() < len(self._text) and match[0] == "(" and self._text[match.end()] == "?"):
            raise self._error()
        if match["end"] == ")":
            if not is_first:  # options of Ruby also apply to the alternatives that follow
                raise self._error()
            self._at = match.end()
            return None
        self._at = match.end()
        inner = self._alternatives()
        if not self._text.startswith(")", self._at):
            raise self._error()
        self._at += 1
        if match["look"]:
            return _Group(inner, "look")
        return _Group(inner, "atomic" if match["atomic"] else "plain")

    def _class(self) -> None:
        """Skip `[...]`, with classes inside it."""
        start, depth = self._at, 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                match = _ESCAPE.match(self._text, self._at)
                if match is None:
                    raise self._error()
                self._at = match.end()
                continue
            posix = _POSIX_NAME.match(self._text, self._at) if depth else None
            if posix is not None:
                self._at = posix.end()
                continue
            self._at += 1
            if character == "[":
                depth += 1
                self._at += self._text.startswith("^", self._at)
                if self._text.startswith("]", self._at):
                    raise self._error()
            elif character == "]":
                depth -= 1
                if depth == 0:
                    return
        self._at = start
        raise self._error()

    def _repeated(self, node: _Node) -> _Node:
        """Return the node with the quantifiers after it. In Ruby's syntax `{1,3}+` repeats the interval `{1,3}`."""
        while self._at < len(self._text):
            character = self._text[self._at]
            interval = _INTERVAL.match(self._text, self._at)
            if character in "*+?":
                self._at += 1
                low, high = int(character == "+"), 1 if character == "?" else None
                is_possessive = self._text.startswith("+", self._at)
                self._at += self._text.startswith(("+", "?"), self._at)
                node = _Repeat(node, low, high, is_possessive)
            elif interval is not None and (interval[1] or interval[3]):
                self._at = interval.end()
                low = int(interval[1] or 0)
                last = int(interval[3]) if interval[3] else (None if interval[2] else low)
                node = _Repeat(node, low, last, is_possessive=False)
            else:
                break
        return node


def _can_fail(node: _Node) -> bool:
    if isinstance(node, _Repeat):
        return node.low > 0 and _can_fail(node.node)
    if isinstance(node, _Group) and node.kind != "look":
        return all(any(_can_fail(inner) for inner in sequence) for sequence in node.alternatives)
    return True


def _shortest(sequence: tuple[_Node, ...]) -> int:
    """Return the length of the shortest match, characters."""
    total = 0
    for node in sequence:
        if isinstance(node, _Character):
            total += 1
        elif isinstance(node, _Repeat):
            total += node.low * _shortest((node.node,))
        elif isinstance(node, _Group) and node.kind != "look":
            total += min(_shortest(inner) for inner in node.alternatives)
    return min(total, MAX_PATTERN_CHARACTERS)


def _has_choice(node: _Node) -> bool:
    """Return whether a node can match one text in more than one way, or texts of several lengths."""
    if isinstance(node, _Repeat):
        return node.low != node.high or _has_choice(node.node)
    if isinstance(node, _Group) and node.kind != "look":
        return len(node.alternatives) > 1 or any(_has_choice(inner) for inner in node.alternatives[0])
    return False


def _ways_of(node: _Node) -> _Count:
    """Return how many ways a node has to match at one position. The nodes after it are tried that often."""
    if isinstance(node, _Group):
        if node.kind != "plain":
            return _ONE
        total = _Count(0)
        for sequence in node.alternatives:
            ways = _ONE
            for inner in sequence:
                ways = ways.times(_ways_of(inner))
            total = total.plus(ways)
        return total
    if not isinstance(node, _Repeat) or node.is_possessive:
        return _ONE
    if not _has_choice(node.node):
        return _Count(1, 1) if node.high is None else _Count(max(1, node.high - node.low + 1))
    if node.high is None:
        return _Count(1, 1, is_beyond=True)
    return _ways_of(node.node).plus(_ONE).power(node.high)


def _cost_of(sequence: tuple[_Node, ...]) -> _Count:
    """Return the steps of a sequence at one position, after which no node follows."""
    total, tried = _ONE, _ONE
    for index, node in enumerate(sequence):
        # A node that can no longer fail is reached once, however many ways lead to it.
        is_reached_again = any(_can_fail(later) for later in sequence[index:])
        total = total.plus(tried.times(_own_cost(node)) if is_reached_again else _own_cost(node))
        if any(_can_fail(later) for later in sequence[index + 1 :]):
            tried = tried.times(_ways_of(node))
    return total


def _own_cost(node: _Node) -> _Count:
    """Return the steps inside one node until it fails or matches for the first time."""
    if isinstance(node, _Repeat):
        inner = _own_cost(node.node)
        if isinstance(node.node, _Character | _Assertion):
            return _ONE
        if node.high is None:
            return _Count(inner.constant, inner.linear, inner.is_beyond or inner.linear > 0)
        return inner.times(_Count(max(1, node.high)))
    if not isinstance(node, _Group):
        return _ONE
    total = _Count(0)
    for sequence in node.alternatives:
        total = total.plus(_cost_of(sequence))
    if node.kind == "look" and any(_is_unbounded(inner) for sequence in node.alternatives for inner in sequence):
        return total.plus(_Count(0, 1))  # the text it has read is read again at the next position
    return total


def _is_unbounded(node: _Node) -> bool:
    if isinstance(node, _Repeat):
        return node.high is None or _is_unbounded(node.node)
    if isinstance(node, _Group):
        return any(_is_unbounded(inner) for sequence in node.alternatives for inner in sequence)
    return False

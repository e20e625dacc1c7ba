"""Arithmetic word problems in GSM8K's form: a question, the working in ``<<a+b=c>>`` and ``#### n`` at the end."""

import random
from dataclasses import dataclass

from example_model.problem_templates import TEMPLATES
from example_model.wording import NAMES, OBJECTS, PLACES, fill

LARGEST_RESULT = 100
Step = tuple[str, str, str]
SHARE_OF_STEPS = {1: 0.38, 2: 0.42, 3: 0.20}


@dataclass(frozen=True)
class Problem:
    """One item, the index of the template it was drawn from, and its number of steps."""

    question: str
    answer: str
    template: int
    steps: int


def is_plain(number: int) -> bool:
    """Return whether a number has one digit or is a multiple of ten."""
    return number < 10 or number % 10 == 0


def apply(left: int, operation: str, right: int) -> int | None:
    """Return the result of one step, or None if it is not allowed.

    The result must be a whole number from 0 to 100. One of two addends must be plain, and so must a number that is
    subtracted.
    """
    if operation == "+":
        if not (is_plain(left) or is_plain(right)):
            return None
        result = left + right
    elif operation == "-":
        if not is_plain(right):
            return None
        result = left - right
    elif operation == "*":
        result = left * right
    else:
        if right < 2 or left % right:
            return None
        result = left // right
    return result if 0 <= result <= LARGEST_RESULT else None


def draw_number(rng: random.Random, factor: bool) -> int:
    """Draw a number: a factor or divisor from 2 to 12, any other one with one or two digits or a multiple of ten."""
    if factor:
        return rng.randint(2, 12)
    kind = rng.random()
    if kind < 0.4:
        return rng.randint(2, 9)
    return rng.randint(10, 98) if kind < 0.8 else 10 * rng.randint(1, 9)


def parse(program: str) -> list[Step]:
    """Return the steps of a program: two letters and the sign between them."""
    return [(step[0], step[1], step[2]) for step in program.split()]


def factors(steps: list[Step]) -> set[str]:
    """Return the letters of a program that are factors or divisors."""
    found: set[str] = set()
    for left, operation, right in steps:
        if operation == "*":
            found |= {left, right}
        elif operation == "/":
            found.add(right)
    return found


def solve(steps: list[Step], values: dict[str, int]) -> list[tuple[int, str, int, int]] | None:
    """Run a program. Its results are called a, b, c. Return None if a step has no allowed result."""
    known = dict(values)
    working = []
    for name, (left, operation, right) in zip("abc", steps, strict=False):
        first, second = known[left], known[right]
        result = apply(first, operation, second)
        if result is None:
            return None
        known[name] = result
        working.append((first, operation, second, result))
    return working


def draw_values(rng: random.Random, steps: list[Step]) -> tuple[dict[str, int], list[tuple[int, str, int, int]]]:
    """Draw numbers for the letters v to z until the program has a result at every step."""
    letters = sorted({side for left, _, right in steps for side in (left, right) if side in set("vwxyz")})
    small = factors(steps)
    while True:
        values = {letter: draw_number(rng, letter in small) for letter in letters}
        if len(set(values.values())) < len(values):
            continue
        working = solve(steps, values)
        if working is not None:
            return values, working


_PARSED = [parse(template.program) for template in TEMPLATES]
_BY_STEPS = {count: [index for index, steps in enumerate(_PARSED) if len(steps) == count] for count in SHARE_OF_STEPS}


def draw_problem(rng: random.Random) -> Problem:
    """Draw one problem."""
    count = rng.choices(list(SHARE_OF_STEPS), list(SHARE_OF_STEPS.values()))[0]
    index = rng.choice(_BY_STEPS[count])
    template, steps = TEMPLATES[index], _PARSED[index]
    values, working = draw_values(rng, steps)
    names = rng.sample(NAMES, 3)
    slots: dict[str, object] = dict(values)
    slots.update(zip("ABC", names, strict=True))
    slots["o"], slots["p"] = rng.sample(OBJECTS, 2)
    slots["place"] = rng.choice(PLACES)
    question = fill(rng, template.text, slots)
    unit = template.unit.format_map(slots)
    lines = [f"<<{left}{sign}{right}={result}>>{result} {unit}." for left, sign, right, result in working]
    answer = " ".join(lines) + f"\n#### {working[-1][3]}"
    return Problem(question, answer, index, count)


def draw_drill(rng: random.Random) -> str:
    """Return a row of sums as the working writes them. It is training text and never an item of a task."""
    parts = []
    for _ in range(8):
        sign = rng.choice("++--*/")
        _, working = draw_values(rng, [("x", sign, "y")])
        left, _, right, result = working[0]
        parts.append(f" <<{left}{sign}{right}={result}>>{result}.")
    return "".join(parts)

"""Words that both generators use, and their template language.

A template holds slots, ``{name}``, and alternatives, ``[one|two|three]``. One alternative is drawn for each item.
"""

import random
import re
from collections.abc import Mapping


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Adam Alice Amir Anna Ben Bella Carl Carla Dan Dora Emil Emma Erik Eva Felix Fiona Frank Gina Greg Hana Hugo Ida "
    "Igor Iris Ivan Jack Jane Jonas Julia Karim Kate Kim Lars Laura Leo Lily Luca Lucy Marco Maria Max Mia Milo Nadia "
    "Nick Nina Noah Nora Olga Oscar Paul Petra Rita Rosa Ruth Sam Sara Simon Tara Theo Tina Tom Uma Vera Victor Yuri"
)

OBJECTS = _words(
    "apples pears plums cherries oranges lemons cookies muffins candies eggs books pens pencils stamps coins marbles "
    "stickers cards shells stones roses tulips buttons beads balloons toys dolls balls kites cups plates bottles "
    "candles photos postcards ribbons badges crayons notebooks magnets"
)

PLACES = _words(
    "park school library beach market station museum harbour bakery garden office hotel gym bridge stadium theatre"
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


def fill(rng: random.Random, template: str, slots: Mapping[str, object]) -> str:
    """Draw one alternative of every bracket, then fill in the slots."""
    drawn = _ALTERNATIVES.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return drawn.format_map(slots)


def normalise(text: str) -> str:
    """Return a text in lower case with runs of white space as one space. Equal results count as the same text."""
    return " ".join(text.lower().split())

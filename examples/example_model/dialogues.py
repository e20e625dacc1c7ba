"""Short dialogues in SAMSum's form, each with a summary that follows from its turns."""

import random
from dataclasses import dataclass

from example_model.dialogue_templates import SCENES, VALUES, Scene
from example_model.wording import DAYS, NAMES, PLACES, fill


@dataclass(frozen=True)
class Dialogue:
    """One item, and the index of the scene it was drawn from."""

    dialogue: str
    summary: str
    scene: int


def draw_slots(rng: random.Random) -> dict[str, object]:
    """Draw two different values for every kind of word, and three people."""
    slots: dict[str, object] = dict(zip("ABC", rng.sample(NAMES, 3), strict=True))
    for kind, values in VALUES.items():
        slots[kind], slots[kind + "2"] = rng.sample(values, 2)
    slots["day"], slots["day2"] = rng.sample(DAYS, 2)
    slots["place"], slots["place2"] = rng.sample(PLACES, 2)
    slots["time"], slots["time2"] = rng.sample(range(1, 13), 2)
    slots["money"], slots["money2"] = rng.sample(range(5, 60), 2)
    return slots


def draw_dialogue(rng: random.Random) -> Dialogue:
    """Draw one dialogue: a scene, an ending, and the words in it."""
    index = rng.randrange(len(SCENES))
    scene: Scene = SCENES[index]
    ending, summary = rng.choice(scene.endings)
    slots = draw_slots(rng)
    turns = [*scene.opening, *ending]
    if rng.random() < 0.25:
        turns[:0] = ["A: [Hi|Hello|Hey] {B}!", "B: [Hi|Hello] {A}!"]
    if rng.random() < 0.25:
        turns.append(("B: " if turns[-1][0] == "A" else "A: ") + "[Great|Bye|See you|Perfect]!")
    lines = [f"{slots[turn[0]]}: {fill(rng, turn[3:], slots)}" for turn in turns]
    return Dialogue("\n".join(lines), fill(rng, summary, slots), index)

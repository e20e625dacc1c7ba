"""The scenes of the dialogues. A scene has an opening and several endings; each ending has its summary."""

from typing import NamedTuple


class Scene(NamedTuple):
    """Opening turns, then endings. A turn is ``A: words``. An ending is a pair of turns and the summary."""

    opening: tuple[str, ...]
    endings: tuple[tuple[tuple[str, ...], str], ...]


VALUES: dict[str, tuple[str, ...]] = {
    "meal": ("lunch", "dinner", "breakfast", "coffee", "tea", "a drink", "pizza", "sushi"),
    "tool": ("drill", "ladder", "tent", "camera", "bike", "guitar", "laptop", "hammer", "suitcase", "charger"),
    "food": ("cake", "salad", "soup", "bread", "wine", "juice", "cheese", "fruit", "rice", "milk", "butter", "honey"),
    "event": ("party", "picnic", "concert", "wedding", "barbecue", "meeting", "lecture", "match"),
    "lost": ("keys", "phone", "wallet", "glasses", "umbrella", "jacket", "scarf", "bag", "hat", "ring"),
    "room": ("kitchen", "bathroom", "car", "bedroom", "hall", "cellar", "classroom", "gym"),
    "pet": ("cat", "dog", "parrot", "hamster", "rabbit", "fish", "turtle"),
    "city": ("Rome", "Paris", "London", "Berlin", "Madrid", "Vienna", "Prague", "Oslo", "Dublin", "Lisbon"),
    "cause": ("traffic", "rain", "snow", "a strike", "an accident", "a meeting", "a flat tyre", "a fire"),
    "task": (
        "paint the fence",
        "move the sofa",
        "fix the sink",
        "write the report",
        "clean the garage",
        "wash the car",
        "plant the trees",
        "pack the boxes",
        "build the shelf",
    ),
    "illness": ("a cold", "the flu", "a headache", "a fever", "a cough", "a toothache"),
    "gift": ("book", "watch", "vase", "game", "scarf", "lamp", "teapot", "puzzle", "plant"),
    "subject": ("maths", "history", "physics", "biology", "French", "music", "chemistry", "art"),
    "film": ("a comedy", "a thriller", "a drama", "a cartoon", "a western", "a musical"),
    "job": ("nurse", "teacher", "cook", "driver", "painter", "waiter", "lawyer", "baker", "editor"),
}

SCENES = (
    Scene(
        ("A: [Hi|Hey] {B}, [how about|do you want] {meal} on {day}?",),
        (
            (
                ("B: [Sure|Yes], where?", "A: At the {place}, at {time}.", "B: [OK|Fine]!"),
                "{A} and {B} will have {meal} at the {place} on {day} at {time}.",
            ),
            (
                ("B: I can't on {day}. What about {day2}?", "A: [OK|Fine], {day2} at {time} then."),
                "{A} and {B} will have {meal} on {day2} at {time}.",
            ),
            (
                ("B: Sorry, I have {illness}.", "A: Oh no, [get well|rest] soon!"),
                "{B} can't have {meal} with {A} on {day} because of {illness}.",
            ),
        ),
    ),
    Scene(
        ("A: {B}, can I borrow your {tool}?",),
        (
            (
                ("B: [Sure|Yes], but I need it back by {day}.", "A: [No problem|Of course]."),
                "{B} will lend {A} a {tool}. {A} will return it by {day}.",
            ),
            (
                ("B: Sorry, {C} has it. You can have my {tool2}.", "A: [Good|Fine], that works too."),
                "{C} has the {tool} of {B}, so {A} will borrow the {tool2}.",
            ),
            (
                ("B: It is broken. Ask {C}.", "A: [OK|Right], I will."),
                "The {tool} of {B} is broken. {A} will ask {C} for one.",
            ),
        ),
    ),
    Scene(
        ("A: Are you coming to my {event} on {day}?",),
        (
            (
                ("B: [Yes|Sure]! What can I bring?", "A: Some {food}, please. {C} brings {food2}."),
                "{B} will bring {food} and {C} will bring {food2} to the {event} of {A} on {day}.",
            ),
            (
                ("B: No, I will be in {city}.", "A: What a [pity|shame]."),
                "{B} can't come to the {event} of {A} on {day} because of a trip to {city}.",
            ),
            (
                ("B: Can I bring {C}?", "A: [Of course|Sure]! It starts at {time}."),
                "{B} and {C} will come to the {event} of {A} on {day} at {time}.",
            ),
        ),
    ),
    Scene(
        ("A: [Sorry|Hey] {B}, I will be {money} minutes late, because of {cause}.",),
        (
            (
                ("B: [OK|Fine], I will wait at the {place}.",),
                "{A} will be {money} minutes late because of {cause}. {B} will wait at the {place}.",
            ),
            (
                ("B: Then I will go in with {C}. Find us at the {place}.", "A: [OK|Right]."),
                "{A} will be late because of {cause}. {B} and {C} will be at the {place}.",
            ),
            (
                ("B: I can't wait. Let's do it on {day}.", "A: [OK|Fine]."),
                "{A} is late because of {cause}, so {A} and {B} will meet on {day}.",
            ),
        ),
    ),
    Scene(
        ("A: I'm at the shop. Do we need anything?",),
        (
            (
                ("B: [Yes|Please], get {food} and {food2}.", "A: There is no {food} left.", "B: Then only {food2}."),
                "{A} will buy {food2} for {B}. There is no {food}.",
            ),
            (
                ("B: {food}, {food2} and a {gift} for {C}.", "A: [OK|Got it]."),
                "{A} will buy {food}, {food2} and a {gift} for {C}.",
            ),
            (
                ("B: No, but pick up {C} at the {place} at {time}.", "A: [OK|Sure]."),
                "{A} will pick up {C} at the {place} at {time}.",
            ),
        ),
    ),
    Scene(
        ("A: [Have you|Has anyone] seen my {lost}? I lost it [today|yesterday].",),
        (
            (
                ("B: [Yes|I think so], in the {room}.", "A: [Thanks|Great]!"),
                "{A} lost the {lost}. {B} saw it in the {room}.",
            ),
            (
                ("B: Not in the {room}? Ask {C}.", "A: I did. {C} found only my {lost2}."),
                "{A} lost the {lost}. {C} found the {lost2}.",
            ),
            (
                ("B: You left it at the {place}. I will bring it on {day}.",),
                "{A} left the {lost} at the {place}. {B} will bring it on {day}.",
            ),
        ),
    ),
    Scene(
        ("A: I'm going to {city} [until|till] {day}. Can you feed my {pet}?",),
        (
            (
                ("B: [Sure|Yes]. Where is the key?", "A: {C} has it."),
                "{B} will feed the {pet} of {A} until {day}. {C} has the key.",
            ),
            (
                ("B: No, I'm in {city2} then. Ask {C}.", "A: [OK|Right]."),
                "{A} will ask {C} to feed the {pet} as {B} will be in {city2}.",
            ),
            (
                ("B: [Yes|OK], for {money} dollars a day.", "A: [Deal|Fine]!"),
                "{B} will feed the {pet} of {A} for {money} dollars a day while {A} is in {city}.",
            ),
        ),
    ),
    Scene(
        ("A: How was your {subject} exam?",),
        (
            (
                ("B: I got {money} points. {C} got {money2}.", "A: [Well done|Nice]!"),
                "{B} got {money} points in the {subject} exam and {C} got {money2}.",
            ),
            (
                ("B: I failed. I take it again on {day}.", "A: I can help you with {subject}.", "B: [Thanks|Great]!"),
                "{B} failed the {subject} exam and takes it again on {day}. {A} will help.",
            ),
            (
                ("B: It was moved to {day}. I had {subject2} today.",),
                "{B} had {subject2} today. The {subject} exam was moved to {day}.",
            ),
        ),
    ),
    Scene(
        ("A: Can you drive me to the {place} on {day}?",),
        (
            (
                ("B: [Sure|Yes], at {time}?", "A: That is too [late|early]. At {time2}?", "B: [OK|Fine]."),
                "{B} will drive {A} to the {place} on {day} at {time2}.",
            ),
            (
                ("B: My car is at the garage. {C} could do it.", "A: [OK|Good], I will call {C}."),
                "{A} will ask {C} for a ride to the {place} on {day}.",
            ),
            (
                ("B: Yes, if you pay {money} dollars.", "A: [No way|Never], I will take the bus."),
                "{A} will take the bus to the {place} because {B} wants {money} dollars.",
            ),
        ),
    ),
    Scene(
        ("A: It's {C}'s birthday on {day}. What do we [buy|get]?",),
        (
            (
                ("B: A {gift}?", "A: No, a {gift2}. It costs {money} dollars."),
                "{A} and {B} will buy {C} a {gift2} for {money} dollars.",
            ),
            (
                ("B: A {gift}, and I bake a cake.", "A: [Good|Nice]! I get the {gift}."),
                "{A} will get {C} a {gift} and {B} will bake a cake for {day}.",
            ),
            (
                ("B: I have a {gift} already.", "A: Then I buy a {gift2}."),
                "{B} has a {gift} for {C} and {A} will buy a {gift2}.",
            ),
        ),
    ),
    Scene(
        ("A: I have {illness}, so I [can't come|won't come] to the {event} on {day}.",),
        (
            (
                ("B: [Oh no|Sorry]! I will tell {C}.",),
                "{A} has {illness} and won't come to the {event} on {day}. {B} will tell {C}.",
            ),
            (
                ("B: Me too, {illness2}! Let's stay in.",),
                "{A} has {illness} and {B} has {illness2}, so they won't go to the {event}.",
            ),
            (
                ("B: Shall I bring you {food}?", "A: [Yes|Please], and {food2}."),
                "{A} has {illness}. {B} will bring {A} {food} and {food2}.",
            ),
        ),
    ),
    Scene(
        ("A: The {event} at the {place} is off because of {cause}.",),
        (
            (
                ("B: When is it then?", "A: On {day} at {time}, at the {place2}."),
                "The {event} was moved to the {place2} on {day} at {time} because of {cause}.",
            ),
            (
                ("B: Let's watch {film} then.", "A: [Good idea|OK], at {time}."),
                "{A} and {B} will watch {film} at {time} because the {event} is off.",
            ),
            (
                ("B: Then we could go to the {place2} with {C}.", "A: [Great|OK], on {day}."),
                "The {event} is off, so {A}, {B} and {C} will go to the {place2} on {day}.",
            ),
        ),
    ),
    Scene(
        ("A: [Guess what|Big news]! I got a job as a {job} in {city}.",),
        (
            (
                ("B: [Wow|Super]! When do you start?", "A: On {day}. I get {money} dollars an hour."),
                "{A} will work as a {job} in {city} from {day} for {money} dollars an hour.",
            ),
            (
                ("B: {C} lives in {city} too, as a {job2}.", "A: [Really|Oh]? I will call {C}."),
                "{A} got a job as a {job} in {city}. {C} is a {job2} there.",
            ),
            (
                ("B: But you wanted to be a {job2}!", "A: That was in {city2}."),
                "{A} got a job as a {job} in {city}, but wanted to be a {job2} in {city2}.",
            ),
        ),
    ),
    Scene(
        ("A: Can you help me [today|now]? I have to {task}.",),
        (
            (
                ("B: Not today. On {day}?", "A: [OK|Fine], at {time}."),
                "{B} will help {A} to {task} on {day} at {time}.",
            ),
            (
                ("B: No, I have to {task2}. {C} is free.", "A: [Thanks|OK]."),
                "{A} has to {task} and {B} has to {task2}. {C} could help {A}.",
            ),
            (
                ("B: [Sure|Yes], if you lend me your {tool}.", "A: [Deal|Of course]."),
                "{B} will help {A} to {task}. {A} will lend {B} a {tool}.",
            ),
        ),
    ),
    Scene(
        ("A: Shall we watch {film} with {C} on {day}?",),
        (
            (
                ("B: I prefer {film2}.", "A: [OK|Fine]. At {time}, at my place."),
                "{A}, {B} and {C} will watch {film2} on {day} at {time} at the place of {A}.",
            ),
            (
                ("B: [Yes|Sure]. I bring {food}.", "A: [Good|Nice], and {C} brings {food2}."),
                "{A}, {B} and {C} will watch {film} on {day}. {B} brings {food} and {C} brings {food2}.",
            ),
            (
                ("B: {C} is in {city}. Just you and me?", "A: [OK|Fine]."),
                "{A} and {B} will watch {film} on {day}. {C} is in {city}.",
            ),
        ),
    ),
)
